"""Committed steps on real weights, judged again: guesses of a written-out loop against transformers' own tokens.

The files (tests/data) hold what a loop in plain torch guessed and what it kept of that. Here the engine's ops decide
what is kept, step by step, given the tokens that transformers decodes. Where a guess is wrong, what the target would
draw after it is not on record; the token of the right prefix is there, which must not be taken.
"""

from typing import Any

import torch
from overlap_spec_kernels import judge_tree
from torch import Tensor

from overlap_spec.speculative.interfaces import Drawn
from support.given_logits import commit

NO_TOKEN = -9  # equals no guess, not even a missing one
Row = dict[str, Any]  # `first`, and `steps` with guesses, committed tokens, and for trees parents


def judged_runs(rows: list[Row], references: list[list[int]]) -> list[list[int]]:
    """Tokens that each step of all rows commits. Raises: AssertionError where the file says otherwise."""
    runs = []
    for row, reference in zip(rows, references, strict=True):
        stream = [row["first"], *(token for step in row["steps"] for token in step["committed"])]
        shared = min(len(stream), len(reference))
        assert stream[:shared] == reference[:shared], "not the tokens of plain decoding"
        judged = judge(row["steps"], stream)
        assert judged == [step["committed"] for step in row["steps"]]
        runs += judged
    return runs


def judge(steps: list[Row], stream: list[int]) -> list[list[int]]:
    """By the engine's ops, all steps at once."""
    windows, drawn, parents, root = [], [], [], 0
    for step in steps:
        guesses = step["guesses"]
        above = [0, *step.get("parents", range(len(guesses)))]
        depths = [0]
        for parent in above[1:]:
            depths.append(depths[parent] + 1)
        after = [root + 1 + depth for depth in depths]
        windows.append([stream[root], *guesses])
        drawn.append([stream[place] if place < len(stream) else NO_TOKEN for place in after])
        parents.append(above)
        root += len(step["committed"])
    tensors = torch.tensor(windows), torch.tensor(drawn), torch.tensor(parents)
    return judged_trees(steps, *tensors) if "parents" in steps[0] else judged_chains(steps, *tensors[:2])


def judged_chains(steps: list[Row], windows: Tensor, drawn: Tensor) -> list[list[int]]:
    """Runs; also holds the number of accepted guesses against the file's."""
    judged = commit(windows, Drawn(drawn))
    assert judged.accept_len.tolist() == [step["accept_len"] for step in steps]
    return trimmed(judged.tokens)


def judged_trees(steps: list[Row], windows: Tensor, drawn: Tensor, parents: Tensor) -> list[list[int]]:
    """Runs; also holds the paths against the file's."""
    size, width = windows.shape
    slots, length = torch.arange(size), torch.zeros(size + 1, dtype=torch.int64)
    rows = torch.zeros(size + 1, width, dtype=torch.int64)
    judged = judge_tree(drawn, windows, parents, slots, length[:-1].clone(), length, rows, size, width)
    paths = [path[: 1 + accept_len] for path, accept_len in zip(judged.path.tolist(), judged.accept_len, strict=True)]
    assert paths == [step["path"] for step in steps]
    return trimmed(judged.tokens)


def trimmed(tokens: Tensor) -> list[list[int]]:
    return [[token for token in run if token != -1] for run in tokens.tolist()]


def mean_length(runs: list[list[int]]) -> float:
    """The accept length: committed tokens a step."""
    return sum(len(run) for run in runs) / len(runs)
