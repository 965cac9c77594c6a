"""DSpark's logits and accept lengths are those of the loop in tests/support/reference/dspark.py, step by step.

On tiny random checkpoints, read from directories as flags name them, with transformers' Llama as target.
"""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.reference.dspark import Loop, generate
from support.solo import Solo
from support.tiny.dspark import reference_of, tiny_dspark
from support.tiny.models import TinyCheckpoint, write_checkpoint
from test_dflash_reference import GREEDY, NUM_STEPS, PROMPTS, TARGET, llama_of
from test_mtp_checkpoint import norm_in_own_dtype
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.models.drafts.dspark import BiasedLogits

FULL = pytest.mark.full


def loop_of(draft: TinyCheckpoint, prompt: list[int], num_rows: int, dtype: torch.dtype) -> Loop:
    return generate(llama_of(TARGET, dtype), reference_of(draft, TARGET, dtype), prompt, num_rows, NUM_STEPS)


def engine_of(draft: TinyCheckpoint, directory: Path, num_rows: int, dtype: str) -> Solo:
    write_checkpoint(directory / "target", TARGET)
    config = EngineConfig(model_path=str(directory / "target"), skip_tokenizer_init=True)
    return Solo(
        resolve_model(config),
        dtype=dtype,
        device="cpu",
        page_size=4,
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(write_checkpoint(directory / "draft", draft)),
        speculative_dspark_block_size=num_rows,
    )


@pytest.mark.parametrize(("kind", "num_rows"), [("vanilla", 4), ("gated", 7), ("rnn", 15)])
def test_logits_of_16_steps(kind: str, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, every tensor random."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    found: list[Tensor] = []
    compute = BiasedLogits.compute

    def recorded(logits: BiasedLogits) -> Tensor:
        found.append(compute(logits))
        return found[-1]

    monkeypatch.setattr(BiasedLogits, "compute", recorded)
    draft = tiny_dspark(8, TARGET, kind=kind, agree=False)
    expected = loop_of(draft, PROMPTS[0], num_rows, torch.float32)
    with closing(engine_of(draft, tmp_path, num_rows, "float32")) as solo:
        solo.answer(PROMPTS[0], GREEDY)
    assert len(found) >= NUM_STEPS * num_rows
    for step, theirs in enumerate(expected.logits):
        ours = torch.cat(found[step * num_rows : (step + 1) * num_rows])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda text, step=step: f"{step}: {text}")


@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [("vanilla", 7), *(pytest.param(*case, marks=FULL) for case in (("vanilla", 3), ("gated", 4), ("rnn", 4)))],
)
@pytest.mark.slow
def test_guesses_and_accept_lengths(kind: str, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    agree = kind == "vanilla"  # what the others add is random
    draft, lengths = tiny_dspark(8, TARGET, kind=kind, agree=agree), set()
    with closing(engine_of(draft, tmp_path, num_rows, "float64")) as solo:
        for prompt in PROMPTS:
            expected = loop_of(draft, prompt, num_rows, torch.float64).steps
            answer = solo.answer(prompt, GREEDY)
            assert answer.guesses[:NUM_STEPS] == [step.guesses for step in expected]
            assert answer.runs[:NUM_STEPS] == [step.committed for step in expected]
            lengths |= {step.accept_len for step in expected}
    assert not agree or len(lengths) > 2, "some guesses are accepted and some are not"
