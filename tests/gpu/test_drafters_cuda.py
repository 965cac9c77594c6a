"""Drafts that guess all of a chain in one forward, on a GPU: guesses and accept lengths of the loops written out.

In float32, eager and in graphs: what `tests/integration/test_dflash_reference.py` and its neighbours compare on a CPU.
Draft steps are captured with the window, so a graph has read the mask rows, the scratch rows and the Markov head.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import dflash, dspark, peagle
from support.reference.loop import Step
from support.solo import Solo
from support.tiny.dflash import reference_of as dflash_of, tiny_dflash
from support.tiny.dspark import reference_of as dspark_of, tiny_dspark
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.peagle import reference_of as peagle_of, tiny_peagle
from transformers import LlamaConfig, LlamaForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams

TARGET = tiny_target(7, layers=3)
PROMPTS = [list(range(7, 29)), [90, 3, 17], [64]]
NUM_STEPS, NUM_GUESSES = 16, 7
GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)
NUMBERS = {
    "speculative_num_steps": NUM_GUESSES,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_GUESSES + 1,
}
# The draft, what runs its loop, and flags.
CASES: dict[str, tuple[TinyCheckpoint, Any, dict[str, Any]]] = {
    "DFLASH": (
        tiny_dflash(8, TARGET),
        lambda model, draft, prompt: dflash.generate(
            model, dflash_of(draft, TARGET, torch.float64), prompt, NUM_GUESSES + 1, NUM_STEPS
        ),
        {"speculative_algorithm": "DFLASH", "speculative_dflash_block_size": NUM_GUESSES + 1},
    ),
    **{
        f"DSPARK {kind}": (
            tiny_dspark(8, TARGET, kind=kind, agree=kind == "vanilla"),
            lambda model, draft, prompt: dspark.generate(
                model, dspark_of(draft, TARGET, torch.float64), prompt, NUM_GUESSES, NUM_STEPS
            ),
            {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": NUM_GUESSES},
        )
        for kind in ("vanilla", "gated", "rnn")
    },
    "P-EAGLE": (
        tiny_peagle(8, TARGET),
        lambda model, draft, prompt: peagle.generate(
            model, peagle_of(draft, torch.float64), prompt, NUM_GUESSES, NUM_STEPS
        ),
        {"speculative_algorithm": "EAGLE3", **NUMBERS},
    ),
}


def loop_of(name: str, prompt: list[int]) -> list[Step]:
    """On the CPU, in float64."""
    draft, generate, _ = CASES[name]
    config = LlamaConfig(**{key: value for key, value in TARGET.config.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config).to(torch.float64).eval()
    model.load_state_dict(TARGET.tensors, strict=False)
    steps: list[Step] = generate(model, draft, prompt).steps
    return steps


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_guesses_and_accept_lengths(name: str, graphs: bool, tmp_path: Path) -> None:
    draft, _, flags = CASES[name]
    write_checkpoint(tmp_path / "target", TARGET)
    files = resolve_model(EngineConfig(model_path=str(tmp_path / "target"), skip_tokenizer_init=True))
    path = str(write_checkpoint(tmp_path / "draft", draft))
    solo = Solo(
        files, dtype="float32", device="cuda", page_size=4, graphs=graphs, speculative_draft_model_path=path, **flags
    )
    lengths = set()
    with closing(solo):
        for prompt in PROMPTS:
            expected = loop_of(name, prompt)
            answer = solo.answer(prompt, GREEDY)
            assert answer.guesses[:NUM_STEPS] == [step.guesses for step in expected]
            assert answer.runs[:NUM_STEPS] == [step.committed for step in expected]
            lengths |= {step.accept_len for step in expected}
    assert len(lengths) > 1 or "gated" in name or "rnn" in name, "some guesses are accepted and some are not"
