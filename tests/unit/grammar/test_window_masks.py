"""The masks of windows: in every column that a draw can reach, what may follow the guesses that lead to it."""

import random

import pytest
import torch
from llguidance import LLMatcher
from support.tiny.grammars import END, TINY_GRAMMARS, tiny_grammar_vocabulary

from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.features.grammar.window_masks import MAX_ALONE, HostWindow, Run, WindowMasks, runs_of

VOCAB = 131  # the last word of a mask is not full, and there are odd numbers of words
VOCABULARY = tiny_grammar_vocabulary(VOCAB)
COMPILER = GrammarCompiler(VOCABULARY)
STALE = 1  # of a step before


def allowed_by(row: torch.Tensor) -> set[int]:
    return {token for token in range(VOCAB) if int(row[token // 32]) >> (token % 32) & 1}


def allowed_after(matcher: LLMatcher, path: list[int]) -> set[int]:
    fresh = matcher.deep_copy()
    assert fresh.try_consume_tokens(path) == len(path)
    bits = int.from_bytes(fresh.compute_bitmask(), "little")
    return {token for token in range(VOCAB) if bits >> token & 1}


def random_window(rng: random.Random, matcher: LLMatcher, width: int, is_tree: bool) -> HostWindow:
    """Guesses that are allowed, most of them; some are missing, and some end the output."""
    tokens, parents, paths = [9], [0], [[]]
    for column in range(1, width):
        parent = rng.randrange(column) if is_tree else column - 1
        path = paths[parent]
        known = path is not None and matcher.deep_copy().try_consume_tokens(path) == len(path)
        choice = sorted(allowed_after(matcher, path)) if known else [40]
        tokens.append(rng.choice([*choice, *choice, 41, -1, END] if rng.random() < 0.5 else choice))
        parents.append(parent)
        paths.append([*(path or []), max(tokens[-1], 0)])
    return HostWindow(tokens, parents if is_tree else None)


def path_to(window: HostWindow, column: int) -> list[int]:
    path: list[int] = []
    while column:
        path.insert(0, window.tokens[column])
        column = column - 1 if window.parents is None else window.parents[column]
    return path


@pytest.mark.parametrize("is_tree", [False, True])
def test_every_column_that_can_be_reached_has_its_mask(is_tree: bool) -> None:
    rng, masks = random.Random(3), WindowMasks(VOCAB, frozenset({END}), num_threads=2)
    reached = cut = ended = 0
    for _ in range(12):
        matchers = [COMPILER.compile(rng.choice(list(TINY_GRAMMARS.values()))) for _ in range(3)]
        windows = [random_window(rng, matcher, 6, is_tree) for matcher in matchers]
        memory = masks.memory(4 * 6).fill_(STALE)
        masks.compute(matchers, windows, memory, [12, 0, 18])
        assert (memory[6:12] == STALE).all(), "rows of another window"
        rows = memory.view(4, 6, masks.words)[[2, 0, 3]]
        for index, (matcher, window) in enumerate(zip(matchers, windows, strict=True)):
            for column in range(6):
                path = path_to(window, column)
                is_there = min(path, default=0) >= 0 and END not in path
                if is_there and matcher.deep_copy().try_consume_tokens(path) == len(path):
                    assert allowed_by(rows[index, column]) == allowed_after(matcher, path)
                    reached += 1
                elif END in path:
                    assert (rows[index, column] == -1).all(), "what is drawn here must be the same on every rank"
                    ended += 1
                else:
                    assert rows[index, column].any(), "a row that forbids everything has no largest logit"
                    cut += 1
    assert reached > 60 and cut > 20 and ended > 10


def test_a_chain_is_one_run_and_a_tree_has_one_for_each_leaf() -> None:
    ends = frozenset({END})
    assert runs_of(HostWindow([9, 5, 6, -1]), ends) == [Run([], [0, 1, 2], [5, 6])]
    assert runs_of(HostWindow([9, 5, END, 6]), ends) == [Run([], [0, 1], [5])]
    tree = HostWindow([9, 5, 6, 7, 8, 4], [0, 0, 0, 1, 2, 1])
    assert runs_of(tree, ends) == [Run([], [0, 1, 3], [5, 7]), Run([5, 4], [5], []), Run([6], [2, 4], [8])]


class Counted:
    """llguidance's executor; counts calls."""

    def __init__(self, inner: object) -> None:
        self.calls = 0
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        self.calls += 1
        return getattr(self._inner, name)


def test_many_chains_are_one_call_and_few_are_followed_by_the_calling_thread() -> None:
    """Windows without any guess are another call."""
    masks = WindowMasks(VOCAB, frozenset({END}), num_threads=1)
    counted = Counted(masks._executor)
    masks.__dict__["_executor"] = counted
    num_windows = MAX_ALONE + 7
    matchers = [COMPILER.compile(TINY_GRAMMARS["any object"]) for _ in range(num_windows)]
    places, memory = list(range(0, 4 * num_windows, 4)), masks.memory(4 * num_windows)
    masks.compute(matchers, [HostWindow([9, 96, 7, 5])] * num_windows, memory, places)
    assert counted.calls == 1
    some = [HostWindow([9, 96, 7, 5])] * 4 + [HostWindow([9, -1, -1, -1])] * (num_windows - 4)
    masks.compute(matchers, some, memory, places)
    assert counted.calls == 3
    few = masks.memory(4 * MAX_ALONE)
    masks.compute(matchers[:MAX_ALONE], some[:MAX_ALONE], few, places[:MAX_ALONE])
    assert counted.calls == 3
    assert torch.equal(few, memory[: len(few)])
