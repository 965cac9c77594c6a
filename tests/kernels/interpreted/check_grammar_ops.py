"""The ops of grammars under the interpreter."""

import random

import pytest
import torch
from overlap_spec_kernels.window.mask_logits import _mask_logits_triton, mask_logits_reference
from overlap_spec_kernels.window.place_forced import _place_forced_triton, place_forced_reference
from support.grammar_inputs import MASK_SHAPES, forced_state, mask_inputs


@pytest.mark.parametrize(("batch", "rows", "columns"), MASK_SHAPES)
def test_mask_logits(batch: int, rows: int, columns: int) -> None:
    logits, *rest = mask_inputs(batch, rows, columns)
    expected = logits.clone()
    _mask_logits_triton(logits, *rest)
    mask_logits_reference(expected, *rest)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("is_tree", [False, True])
def test_place_forced(is_tree: bool) -> None:
    rng = random.Random(3)
    for _ in range(20):
        window, parents, *rest = forced_state(rng, is_tree)
        wanted, wanted_parents = window.clone(), None if parents is None else parents.clone()
        _place_forced_triton(window, parents, *rest)
        place_forced_reference(wanted, wanted_parents, *rest)
        assert torch.equal(window, wanted)
        assert parents is None or wanted_parents is None or torch.equal(parents, wanted_parents)
