"""On the device: the ops that change logits against their twins, and requests with parameters in CUDA graphs."""

import pytest
import torch
from overlap_spec_kernels import count_tokens, penalize
from overlap_spec_kernels.logits.count_tokens import count_tokens_reference
from overlap_spec_kernels.logits.penalize import penalize_reference
from support.logit_inputs import VOCAB, logit_inputs
from support.storm import run_seeds

from overlap_spec.tokenizer.codec import TextCodec


@pytest.mark.parametrize("shape", [(3, 4, 3, VOCAB), (1, 1, 0, 700), (64, 9, 4, 2500)], ids=str)
def test_logit_ops(shape: tuple[int, int, int, int]) -> None:
    given = logit_inputs(*shape, device="cuda")
    counts = count_tokens_reference(given.rows, given.ends, given.output_from, VOCAB)
    assert torch.equal(count_tokens(given.rows, given.ends, given.output_from, VOCAB), counts)
    rest = given.asked, counts, given.guesses, given.token_ids
    torch.testing.assert_close(
        penalize(given.logits, *rest), penalize_reference(given.logits, *rest), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_parameters_in_graphs(codec: TextCodec, method: str, topk: int) -> None:
    """Prefix hits, preemptions, depth 1 and 2; the oracle works each parameter out in plain Python."""
    engine = {"dtype": torch.float32, "place": torch.device("cuda"), "graph_batch_sizes": (1, 2, 4, 6)}
    seen = run_seeds(range(8), codec, {**engine, "method": method, "topk": topk})
    assert min(seen[f"decided_by_{name}"] for name in ("penalties", "logit_bias", "bad_words")) > 0, dict(seen)
