"""DFlash's logits and accept lengths are those of the loop in tests/support/reference/dflash.py, step by step.

On tiny random checkpoints, read from directories as flags name them, with transformers' Llama as target.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference.dflash import Loop, generate
from support.solo import Solo
from support.tiny.dflash import reference_of, tiny_dflash
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from test_mtp_checkpoint import norm_in_own_dtype
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams
from overlap_spec.models.drafts.dflash import DFlashHead
from overlap_spec.models.interfaces import LazyLogits

TARGET = tiny_target(7, layers=3)  # a draft reads all layers but the last: of that, transformers gives what is normed
PROMPTS = [list(range(7, 29)), [90, 3, 17], [64]]
NUM_STEPS = 16
GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)


def llama_of(target: TinyCheckpoint, dtype: torch.dtype) -> Any:
    config = LlamaConfig(**{key: value for key, value in target.config.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config).to(torch.float64).eval()
    model.load_state_dict(target.tensors, strict=False)
    return model.to(dtype)


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
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(write_checkpoint(directory / "draft", draft)),
        speculative_dflash_block_size=num_rows,
    )


@pytest.mark.parametrize("num_rows", [5, pytest.param(16, marks=pytest.mark.slow)])
def test_logits_of_16_steps(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, every tensor random."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    found: list[Tensor] = []
    logits = DFlashHead.logits

    def recorded(head: DFlashHead, values: Tensor) -> LazyLogits:
        lazy = logits(head, values)
        found.append(lazy.compute())
        return lazy

    monkeypatch.setattr(DFlashHead, "logits", recorded)
    draft = tiny_dflash(8, TARGET, agree=False)
    for prompt in PROMPTS[:2]:
        expected = loop_of(draft, prompt, num_rows, torch.float32)
        found.clear()
        with closing(engine_of(draft, tmp_path / str(len(prompt)), num_rows, "float32")) as solo:
            solo.answer(prompt, GREEDY)
        for step, (ours, theirs) in enumerate(zip(found, expected.logits, strict=False)):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, msg=lambda text, step=step: f"{step}: {text}")
        assert len(found) >= NUM_STEPS


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_guesses_and_accept_lengths(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    draft, lengths = tiny_dflash(8, TARGET), set()
    with closing(engine_of(draft, tmp_path, num_rows, "float64")) as solo:
        for prompt in PROMPTS:
            expected = loop_of(draft, prompt, num_rows, torch.float64).steps
            answer = solo.answer(prompt, GREEDY)
            assert answer.guesses[:NUM_STEPS] == [step.guesses for step in expected]
            assert answer.runs[:NUM_STEPS] == [step.committed for step in expected]
            lengths |= {step.accept_len for step in expected}
    assert len(lengths) > 1, "some guesses are accepted and some are not"
