"""The ops of grammars against loops in plain Python."""

import random

import pytest
import torch
from overlap_spec_kernels import mask_logits, place_forced
from support.grammar_inputs import MASK_SHAPES, forced_state, mask_inputs


@pytest.mark.parametrize(("batch", "rows", "columns"), MASK_SHAPES)
def test_mask_logits(batch: int, rows: int, columns: int) -> None:
    logits, bits, active, slots = mask_inputs(batch, rows, columns)
    before = logits.clone()
    mask_logits(logits, bits, active, slots)
    for b, slot in enumerate(slots.tolist()):
        for r in range(rows):
            words = [word & 0xFFFFFFFF for word in bits[slot, r].tolist()] + [0] * columns
            for t in range(columns):
                allowed = not active[slot] or words[t // 32] >> (t % 32) & 1
                assert logits[b, r, t] == (before[b, r, t] if allowed else -torch.inf)


@pytest.mark.parametrize("is_tree", [False, True])
def test_place_forced(is_tree: bool) -> None:
    rng = random.Random(5)
    seen = set()
    for _ in range(60):
        window, parents, slots, forced = forced_state(rng, is_tree)
        old_window, old_parents = window.clone(), None if parents is None else parents.clone()
        place_forced(window, parents, slots, forced)
        for slot in range(len(window)):
            tokens = forced[slots.tolist().index(slot)].tolist() if slot in slots.tolist() else []
            tokens = [token for token in tokens if token >= 0]
            kept = follows(
                old_window[slot].tolist(), None if old_parents is None else old_parents[slot].tolist(), tokens
            )
            seen.add(kept)
            if kept:
                assert torch.equal(window[slot], old_window[slot])
                continue
            rest = window.shape[1] - 1 - len(tokens)
            assert window[slot].tolist() == [int(old_window[slot, 0]), *tokens, *[-1] * rest]
            if parents is not None:
                assert parents[slot].tolist() == [0, *range(len(tokens)), *[0] * rest]
    assert seen == {True, False}


def follows(window: list[int], parents: list[int] | None, tokens: list[int]) -> bool:
    """Whether the tokens are a path of the window from its root."""
    node = 0
    for token in tokens:
        children = [
            column
            for column in range(1, len(window))
            if window[column] == token and (column - 1 if parents is None else parents[column]) == node
        ]
        if not children:
            return False
        node = children[0]
    return True


def test_arguments_are_checked() -> None:
    logits, bits, active, slots = mask_inputs(2, 2, 40)
    for name, arguments in (
        ("logits", (logits[0], bits, active, slots)),
        ("bits", (logits, bits[:, :1], active, slots)),
        ("active", (logits, bits, active.long(), slots)),
        ("slots", (logits, bits, active, slots.int())),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            mask_logits(*arguments)
    window, parents, slots, forced = forced_state(random.Random(1), True)
    for name, given in (
        ("window", (window.int(), parents, slots, forced)),
        ("forced", (window, parents, slots, window)),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            place_forced(*given)
