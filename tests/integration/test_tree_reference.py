"""Drafted trees and accepted paths are those of the loop in tests/support/reference/trees.py, step by step.

On tiny random checkpoints in float64, read from directories as flags name them, with transformers' Llama as target.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import eagle as eagle_reference, eagle3 as eagle3_reference
from support.reference.loop import CachedModel
from support.reference.mtp import Mimo, ReferenceMtp
from support.reference.trees import (
    BlockDrafter,
    Drafter,
    HeadDrafter,
    ModelDrafter,
    Shape,
    TreeStep,
    generate_trees,
    grow,
    grow_marginals,
    path_of,
)
from support.solo import Solo
from support.tiny.dflash import drafter_of as dflash_drafter, tiny_dflash
from support.tiny.eagle import tiny_eagle
from support.tiny.models import TinyCheckpoint, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.mtp import tiny_mtp
from support.tiny.peagle import drafter_of as peagle_drafter, tiny_peagle
from support.tiny.standalone import tiny_language_draft
from test_mtp_checkpoint import norm_in_own_dtype
from test_smollm2 import greedy
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model

TARGET = tiny_target(
    7, layers=3
)  # an EAGLE-3 head reads all layers but the last: of that, transformers hands out what is normed
PROMPTS = [list(range(7, 29)), [90, 3, 17], [64]]
NUM_TOKENS = 18
SHAPES = {Shape(1, 4, 5): 1, Shape(3, 2, 6): 64, Shape(4, 3, 10): 16, Shape(5, 8, 32): 4}  # with a page size each

# What is written for the engine; a drafter for a prompt.
Made = tuple[TinyCheckpoint, Callable[[list[int]], Drafter | BlockDrafter]]


def transformers_model(checkpoint: TinyCheckpoint) -> Any:
    config = LlamaConfig(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    assert not model.load_state_dict(checkpoint.tensors, strict=False).missing_keys
    return model


def last(hidden: list[Tensor]) -> Tensor:
    return hidden[-1]


def eagle() -> Made:
    checkpoint = tiny_eagle(8, TARGET)
    tensors = (checkpoint.tensors, checkpoint.config, *(TARGET.tensors[name] for name in EMBED_AND_HEAD))
    return checkpoint, lambda prompt: HeadDrafter(eagle_reference.ReferenceHead(*tensors), last)


def eagle3() -> Made:
    checkpoint = tiny_eagle3(8, TARGET)

    def drafter(prompt: list[int]) -> Drafter:
        embed = TARGET.tensors[EMBED_AND_HEAD[0]]
        head = eagle3_reference.ReferenceHead(checkpoint.tensors, checkpoint.config, embed)
        return HeadDrafter(head, head.features_of)

    return checkpoint, drafter


def nextn() -> Made:
    checkpoint = tiny_mtp(8, TARGET)
    tensors = (checkpoint.tensors, checkpoint.config, *(TARGET.tensors[name] for name in EMBED_AND_HEAD))
    return checkpoint, lambda prompt: HeadDrafter(ReferenceMtp(*tensors, Mimo()), last)


def standalone() -> Made:
    checkpoint = tiny_language_draft(8, TARGET)
    model = transformers_model(checkpoint)
    return checkpoint, lambda prompt: ModelDrafter(model, prompt)


def dflash() -> Made:
    checkpoint = tiny_dflash(8, TARGET)
    return checkpoint, lambda prompt: dflash_drafter(checkpoint, TARGET, prompt)


def peagle() -> Made:
    checkpoint = tiny_peagle(8, TARGET)
    return checkpoint, lambda prompt: peagle_drafter(checkpoint, prompt)


EMBED_AND_HEAD = ("model.embed_tokens.weight", "lm_head.weight")
METHODS = {"EAGLE": eagle, "EAGLE3": eagle3, "NEXTN": nextn, "STANDALONE": standalone}
BLOCKS = {"DFLASH": dflash, "P-EAGLE": peagle}
QUICK = {("EAGLE", min(SHAPES)), ("DFLASH", min(SHAPES)), *((method, max(SHAPES)) for method in BLOCKS)}


@pytest.mark.full_but_every(8)
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        pytest.param(method, shape, id=f"{method}-{shape}", marks=() if (method, shape) in QUICK else pytest.mark.slow)
        for method, shape in itertools.product(METHODS | BLOCKS, SHAPES)
    ],
)
def test_trees_are_the_written_out_loops(
    method: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    draft, drafter = (METHODS | BLOCKS)[method]()
    write_checkpoint(tmp_path / "target", TARGET)
    write_checkpoint(tmp_path / "draft", draft)
    target = transformers_model(TARGET)
    solo = Solo(
        resolve_model(EngineConfig(model_path=str(tmp_path / "target"), skip_tokenizer_init=True)),
        device="cpu",
        dtype="float64",
        speculative_algorithm="EAGLE3" if method == "P-EAGLE" else method,
        speculative_draft_model_path=str(tmp_path / "draft"),
        page_size=SHAPES[shape],
        speculative_num_steps=shape.num_steps,
        speculative_eagle_topk=shape.topk,
        speculative_num_draft_tokens=shape.num_draft_tokens,
    )
    lengths = []
    try:
        for prompt in PROMPTS:
            how = grow_marginals if method in BLOCKS else grow
            first, steps = generate_trees(CachedModel(target), drafter(prompt), prompt, shape, NUM_TOKENS, how)
            answer = solo.answer(prompt, greedy(NUM_TOKENS))
            assert answer.tokens[0] == first
            found = [
                TreeStep(guesses, parents, path_of(guesses, parents, run), run)
                for guesses, parents, run in zip(answer.guesses, answer.parents, answer.runs, strict=True)
            ]
            assert found == steps[: len(found)] and found
            lengths += [len(run) for run in answer.runs]
    finally:
        solo.close()
    assert len(set(lengths)) > 1
