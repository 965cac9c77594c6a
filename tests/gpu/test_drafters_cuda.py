"""Drafts that make all guesses in one forward, on a GPU: chains, trees and accept lengths of the loops written out.

In float32, eager and in graphs: what `tests/integration/test_dflash_reference.py` and its neighbours compare on a CPU.
Draft steps are captured with the window, so a graph has read the mask rows, the scratch rows and the Markov head.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.random_schedules import run_schedules
from support.reference import dflash, dspark, peagle
from support.reference.loop import CachedModel, Step
from support.reference.trees import BlockDrafter, Shape, TreeStep, generate_trees, grow_marginals, path_of
from support.solo import Solo
from support.tiny.dflash import drafter_of as dflash_drafter, reference_of as dflash_of, tiny_dflash
from support.tiny.dspark import reference_of as dspark_of, tiny_dspark
from support.tiny.methods import COPIED, FUSED
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.peagle import drafter_of as peagle_drafter, reference_of as peagle_of, tiny_peagle
from test_ring_cuda import BATCH_SIZES, PLACE
from transformers import LlamaConfig, LlamaForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.frontend.codec import TextCodec
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
    steps: list[Step] = generate(target_model(), draft, prompt).steps
    return steps


def target_model() -> Any:
    config = LlamaConfig(**{key: value for key, value in TARGET.config.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config).to(torch.float64).eval()
    model.load_state_dict(TARGET.tensors, strict=False)
    return model


def solo_of(draft: TinyCheckpoint, directory: Path, **flags: Any) -> Solo:
    write_checkpoint(directory / "target", TARGET)
    files = resolve_model(EngineConfig(model_path=str(directory / "target"), skip_tokenizer_init=True))
    path = str(write_checkpoint(directory / "draft", draft))
    shape = {"dtype": "float32", "device": "cuda", "page_size": 4}
    return Solo(files, speculative_draft_model_path=path, **shape, **flags)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_guesses_and_accept_lengths(name: str, graphs: bool, tmp_path: Path) -> None:
    draft, _, flags = CASES[name]
    lengths = set()
    with closing(solo_of(draft, tmp_path, graphs=graphs, **flags)) as solo:
        for prompt in PROMPTS:
            expected = loop_of(name, prompt)
            answer = solo.answer(prompt, GREEDY)
            assert answer.guesses[:NUM_STEPS] == [step.guesses for step in expected]
            assert answer.runs[:NUM_STEPS] == [step.committed for step in expected]
            lengths |= {step.accept_len for step in expected}
    assert len(lengths) > 1 or "gated" in name or "rnn" in name, "some guesses are accepted and some are not"


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("name", "drafter"),
    [("DFLASH", lambda draft, prompt: dflash_drafter(draft, TARGET, prompt)), ("P-EAGLE", peagle_drafter)],
)
def test_trees_and_accepted_paths(
    name: str, drafter: Callable[[TinyCheckpoint, list[int]], BlockDrafter], graphs: bool, tmp_path: Path
) -> None:
    draft, _, flags = CASES[name]
    shape, num_tokens, lengths = Shape(NUM_GUESSES, 4, 24), 40, set()
    numbers = dict(zip(NUMBERS, shape, strict=True))
    flags = {"speculative_algorithm": flags["speculative_algorithm"], **numbers}
    with closing(solo_of(draft, tmp_path, graphs=graphs, **flags)) as solo:
        for prompt in PROMPTS:
            target = CachedModel(target_model())
            first, steps = generate_trees(target, drafter(draft, prompt), prompt, shape, num_tokens, grow_marginals)
            answer = solo.answer(prompt, replace(GREEDY, max_new_tokens=num_tokens))
            found = [
                TreeStep(guesses, parents, path_of(guesses, parents, run), run)
                for guesses, parents, run in zip(answer.guesses, answer.parents, answer.runs, strict=True)
            ]
            assert answer.tokens[0] == first and found == steps[: len(found)] and found
            lengths |= {len(run) for run in answer.runs}
    assert len(lengths) > 1, "some guesses are accepted and some are not"


@pytest.mark.parametrize("batch_sizes", [(), BATCH_SIZES], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", FUSED)
def test_windows_with_the_guesses_of_n_grams_too(
    codec: TextCodec, method: str, batch_sizes: tuple[int, ...], record_summary
) -> None:
    width = 3 + 1 + COPIED
    shape = {"num_steps": 3, "num_draft_tokens": width, "dtype": torch.float32, "place": PLACE}
    seen = run_schedules(6, codec, method=method, topk=1, graph_batch_sizes=batch_sizes, **shape)
    name = f"schedules_fused_{'graphs' if batch_sizes else 'eager'}_{method.replace(' ', '_')}"
    record_summary(name, {"schedules": 6, **seen}, torch.cuda.get_device_name())
