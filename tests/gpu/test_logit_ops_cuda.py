"""On the device: the ops that change logits against their references, and requests with parameters in CUDA graphs."""

import random

import pytest
import torch
from overlap_spec_kernels import count_tokens, guesses_before, process_logits
from overlap_spec_kernels.logits.count_tokens import count_tokens_reference
from overlap_spec_kernels.logits.guesses_before import guesses_before_reference
from overlap_spec_kernels.logits.process_logits import process_logits_reference
from support.logit_inputs import VOCAB, logit_inputs
from support.random_schedules import run_seeds
from support.reasoning_rows import RandomRows, by_hand

from overlap_spec.frontend.codec import TextCodec


@pytest.mark.parametrize("shape", [(4, 4, 3, VOCAB), (1, 1, 0, 700), (64, 9, 4, 2500), (2, 60, 8, VOCAB)], ids=str)
def test_logit_ops(shape: tuple[int, int, int, int]) -> None:
    given = logit_inputs(*shape, device="cuda")
    rows = given.history.store, given.history.roots, given.rules.output_from
    counts = count_tokens_reference(*rows, VOCAB)
    assert torch.equal(count_tokens(*rows, VOCAB), counts)
    rest = given.rules, given.history._replace(counts=counts), given.token_ids
    expected = process_logits_reference(given.logits, *rest)
    torch.testing.assert_close(process_logits(given.logits, *rest), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "root"), [(60, 0), (8, -1), (1, -1)])
def test_guesses_before(num_rows: int, root: int) -> None:
    tokens = torch.randint(0, 99, (32, 60), device="cuda")
    nodes = torch.randint(root, 60, (32, num_rows), device="cuda")
    parents = torch.randint(-1, 1 << 40, (32, 60), device="cuda") % torch.arange(1, 61, device="cuda")
    for given in (parents, nodes), (parents, None), (None, nodes), (None, None):
        arguments = tokens, *given, num_rows, 8, root
        assert torch.equal(guesses_before(*arguments), guesses_before_reference(*arguments))


@pytest.mark.parametrize("seed", range(50))
def test_closing_markers(seed: int) -> None:
    long = {"most_positions": 3000, "budgets": (2000, 2990)} if seed % 5 == 0 else {}
    rows = RandomRows(random.Random(seed), **long)
    assert rows.forced(process_logits, "cuda") == by_hand(rows)


@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_parameters_in_graphs(codec: TextCodec, method: str, topk: int) -> None:
    """Prefix hits, preemptions, depth 1 and 2; the oracle works each parameter out in plain Python."""
    engine = {"dtype": torch.float32, "place": torch.device("cuda"), "graph_batch_sizes": (1, 2, 4, 6)}
    seen = run_seeds(range(8), codec, {**engine, "method": method, "topk": topk})
    assert min(seen[f"decided_by_{name}"] for name in ("penalties", "logit_bias", "bad_words")) > 0, dict(seen)
