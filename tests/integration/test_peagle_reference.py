"""P-EAGLE's logits and accept lengths are those of the loop in tests/support/reference/peagle.py, step by step.

On tiny random checkpoints, read from directories as flags name them, with transformers' Llama as target.
"""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from overlap_spec_kernels import Normed
from support.reference.peagle import Loop, generate
from support.solo import Solo
from support.tiny.models import TinyCheckpoint, write_checkpoint
from support.tiny.peagle import reference_of, tiny_peagle
from test_dflash_reference import GREEDY, NUM_STEPS, PROMPTS, TARGET, llama_of
from test_mtp_checkpoint import norm_in_own_dtype
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.models.drafts.eagle3 import Eagle3Head
from overlap_spec.models.interfaces import LazyLogits

FULL = pytest.mark.full


def loop_of(draft: TinyCheckpoint, prompt: list[int], num_guesses: int, dtype: torch.dtype) -> Loop:
    return generate(llama_of(TARGET, dtype), reference_of(draft, dtype), prompt, num_guesses, NUM_STEPS)


def engine_of(draft: TinyCheckpoint, directory: Path, num_guesses: int, dtype: str) -> Solo:
    write_checkpoint(directory / "target", TARGET)
    config = EngineConfig(model_path=str(directory / "target"), skip_tokenizer_init=True)
    return Solo(
        resolve_model(config),
        dtype=dtype,
        device="cpu",
        page_size=4,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(write_checkpoint(directory / "draft", draft)),
        speculative_num_steps=num_guesses,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=num_guesses + 1,
    )


@pytest.mark.parametrize(
    ("num_guesses", "layers", "norm_residual"),
    [(7, 2, True), *(pytest.param(*case, marks=FULL) for case in ((3, 1, False), (8, 4, True)))],
)
def test_logits_of_16_steps(
    num_guesses: int, layers: int, norm_residual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, every tensor random."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    found: list[Tensor] = []
    logits = Eagle3Head.logits

    def recorded(head: Eagle3Head, output: Normed) -> LazyLogits:
        lazy = logits(head, output)
        found.append(lazy.compute())
        return lazy

    monkeypatch.setattr(Eagle3Head, "logits", recorded)
    draft = tiny_peagle(8, TARGET, agree=False, layers=layers, norm_before_residual=norm_residual)
    expected = loop_of(draft, PROMPTS[0], num_guesses, torch.float32)
    with closing(engine_of(draft, tmp_path, num_guesses, "float32")) as solo:
        solo.answer(PROMPTS[0], GREEDY)
    assert len(found) >= NUM_STEPS
    for step, (ours, theirs) in enumerate(zip(found, expected.logits, strict=False)):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda text, step=step: f"{step}: {text}")


@pytest.mark.parametrize("num_guesses", [4, *(pytest.param(count, marks=FULL) for count in (1, 2, 8))])
def test_guesses_and_accept_lengths(num_guesses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    draft, lengths = tiny_peagle(8, TARGET), set()
    with closing(engine_of(draft, tmp_path, num_guesses, "float64")) as solo:
        for prompt in PROMPTS:
            expected = loop_of(draft, prompt, num_guesses, torch.float64).steps
            answer = solo.answer(prompt, GREEDY)
            assert answer.guesses[:NUM_STEPS] == [step.guesses for step in expected]
            assert answer.runs[:NUM_STEPS] == [step.committed for step in expected]
            lengths |= {step.accept_len for step in expected}
    assert len(lengths) > min(num_guesses, 2), "a committed row and a mask guess right, and wrong"
