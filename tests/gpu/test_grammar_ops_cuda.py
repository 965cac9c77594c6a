"""The ops of grammars on a GPU: equal to their references."""

import random

import pytest
import torch
from overlap_spec_kernels import mask_logits, place_forced
from support.grammar_inputs import MASK_SHAPES, forced_state, mask_inputs

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(("batch", "rows", "columns"), [*MASK_SHAPES, (32, 5, 128256)])
def test_mask_logits(batch: int, rows: int, columns: int, is_pinned: bool) -> None:
    inputs = mask_inputs(batch, rows, columns)
    on_gpu = [tensor.cuda() for tensor in inputs]
    if is_pinned:
        on_gpu[1] = inputs[1].pin_memory()
    mask_logits(*inputs)
    mask_logits(*on_gpu)
    assert torch.equal(on_gpu[0].cpu(), inputs[0])


@pytest.mark.parametrize("is_tree", [False, True])
def test_place_forced(is_tree: bool) -> None:
    rng = random.Random(4)
    for _ in range(20):
        inputs = forced_state(rng, is_tree)
        on_gpu = [None if tensor is None else tensor.cuda() for tensor in inputs]
        place_forced(*inputs)
        place_forced(*on_gpu)
        for ours, wanted in zip(on_gpu, inputs, strict=True):
            assert ours is None or wanted is None or torch.equal(ours.cpu(), wanted)
