"""Greedy speculative decoding of one request with trees, written out: node by node, path by path.

Trees are EAGLE-2's dynamic ones, or grow from the distributions of a block that a draft guesses at once.

Nothing is done at once: a node is drafted by running the path that leads to it as a chain, and the target walks down
the tree reading one token after the other. Row rules are those of `reference/loop.py`.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from support.reference.loop import CachedModel


class Shape(NamedTuple):
    """SGLang's three numbers."""

    num_steps: int
    topk: int
    num_draft_tokens: int


@dataclass
class TreeStep:
    """One verify step: the tree after its root, which columns were accepted, what was committed (bonus included)."""

    guesses: list[int]
    parents: list[int]
    path: list[int]
    committed: list[int]


class Head(Protocol):
    """A draft head, which keeps the K/V of its rows."""

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> [rows, H], each a feature for the next. K/V from `start` on is replaced."""
        ...

    def logits(self, output: Tensor) -> Tensor:
        """Of the token after a row. Shapes: [H] -> [Vd]."""
        ...

    def token(self, column: int) -> int:
        """The token of a column of logits."""
        ...


class Drafter(Protocol):
    """A draft that has absorbed the committed tokens."""

    def absorb(self, tokens: list[int], hidden: list[Tensor], start: int) -> None:
        """Tokens at positions start + 1.., and the target's hidden states of the positions before them."""
        ...

    def children(self, path: list[int], topk: int) -> list[tuple[float, int]]:
        """Log-probability and token of the likeliest ones after the root and a path of guesses, best first."""
        ...


def likeliest(logits: Tensor, topk: int, token: Callable[[int], int]) -> list[tuple[float, int]]:
    """Of one row."""
    found = logits.log_softmax(-1).topk(topk)
    return [(value, token(column)) for value, column in zip(found.values.tolist(), found.indices.tolist(), strict=True)]


class HeadDrafter:
    """Draft row p: (features of p, token of p + 1)."""

    def __init__(self, head: Head, features_of: Callable[[list[Tensor]], Tensor]) -> None:
        self._head = head
        self._features_of = features_of

    def absorb(self, tokens: list[int], hidden: list[Tensor], start: int) -> None:
        self._output = self._head.forward(tokens, self._features_of(hidden), start)[-1]
        self._next = start + len(tokens)

    def children(self, path: list[int], topk: int) -> list[tuple[float, int]]:
        output = self._output
        for i, token in enumerate(path):
            output = self._head.forward([token], output[None], self._next + i)[0]
        return likeliest(self._head.logits(output), topk, self._head.token)


class ModelDrafter:
    """An ordinary language model: draft row p holds the token of p. The prompt's first token is read too."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self._model = CachedModel(model)
        self._tokens = prompt[:1]

    def absorb(self, tokens: list[int], hidden: list[Tensor], start: int) -> None:
        self._tokens = [*self._tokens[: start + 1], *tokens]
        self._model.read(self._tokens[start:-1], start)

    def children(self, path: list[int], topk: int) -> list[tuple[float, int]]:
        logits = self._model.logits([self._tokens[-1], *path], len(self._tokens) - 1)
        return likeliest(logits[-1], topk, lambda column: column)


@dataclass
class Node:
    """A guess: the product of probabilities down to it, as a log; the guesses that lead to it, itself included."""

    log_prob: float
    path: list[int]
    parent: "Node | None"


def grow(drafter: Drafter, shape: Shape) -> tuple[list[int], list[int]]:
    """Tokens and parents of the columns after the root's."""
    every: list[Node] = []
    open_nodes: list[Node | None] = [None]
    for _ in range(shape.num_steps):
        level = [
            Node((node.log_prob if node else 0.0) + value, [*(node.path if node else []), token], node)
            for node in open_nodes
            for value, token in drafter.children(node.path if node else [], shape.topk)
        ]
        every += level
        open_nodes = list(sorted(level, key=lambda node: -node.log_prob)[: shape.topk])
    kept = sorted(every, key=lambda node: -node.log_prob)[: shape.num_draft_tokens - 1]
    columns = {id(node): column for column, node in enumerate(kept, 1)}
    return [node.path[-1] for node in kept], [columns[id(node.parent)] if node.parent else 0 for node in kept]


class BlockDrafter:
    """A draft that guesses a block at once: all that the target has read, and the next root."""

    def __init__(
        self,
        layers: list[int],
        logits_of: Callable[[list[int], Tensor, int], Tensor],
        prompt: list[int],
        token: Callable[[int], int] = lambda column: column,
    ) -> None:
        """`layers`: whose outputs are the aux hidden states.

        `logits_of`: of all tokens, the root last, aux hidden states of all but the root and a number of guesses.
        """
        self._layers = layers
        self._logits_of = logits_of
        self._token = token
        self._tokens = prompt[:1]
        self._aux: Tensor | None = None

    def absorb(self, tokens: list[int], hidden: list[Tensor], start: int) -> None:
        """See `Drafter`."""
        read = torch.cat([hidden[layer + 1] for layer in self._layers], 1)
        self._tokens = [*self._tokens[: start + 1], *tokens]
        self._aux = read if self._aux is None else torch.cat((self._aux[:start], read))

    def levels(self, num_levels: int, topk: int) -> list[list[tuple[float, int]]]:
        """The likeliest tokens of each level, whatever is before them."""
        assert self._aux is not None and len(self._aux) == len(self._tokens) - 1
        rows = self._logits_of(self._tokens, self._aux, num_levels)
        return [likeliest(row, topk, self._token) for row in rows]


def grow_marginals(drafter: BlockDrafter, shape: Shape) -> tuple[list[int], list[int]]:
    """Tokens and parents of the columns after the root's."""
    return marginal_nodes(drafter.levels(shape.num_steps, shape.topk), shape.num_draft_tokens - 1)


def marginal_nodes(levels: list[list[tuple[float, int]]], num_guesses: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the best nodes that there are, by the heap of DDTree (arXiv:2604.12989).

    Of equal nodes the one whose parent came first is better.
    """
    tokens, parents, scores, depths = list[int](), list[int](), [0.0], [0]
    heap = [(-levels[0][0][0], 0, 0)]  # minus the sum of logs, the parent's column, which of its children
    while heap and len(tokens) < num_guesses:
        cost, parent, rank = heapq.heappop(heap)
        if cost == math.inf:
            break
        depth = depths[parent]
        tokens.append(levels[depth][rank][1])
        parents.append(parent)
        scores.append(-cost)
        depths.append(depth + 1)
        if rank + 1 < len(levels[depth]):
            heapq.heappush(heap, (-(scores[parent] + levels[depth][rank + 1][0]), parent, rank + 1))
        if depth + 1 < len(levels):
            heapq.heappush(heap, (-(scores[-1] + levels[depth + 1][0][0]), len(tokens), 0))
    return tokens, parents


class Target(Protocol):
    """See `CachedModel`."""

    def read(self, tokens: list[int], start: int) -> tuple[list[int], list[Tensor]]: ...


class Recorded:
    """A model's output along one greedy answer, which is read once for any number of drafts."""

    def __init__(self, model: Any, prompt: list[int], num_tokens: int) -> None:
        target = CachedModel(model)
        with torch.no_grad():
            self._drawn, hidden = target.read(prompt, 0)
            states = [hidden]
            self._tokens = [*prompt, self._drawn[-1]]
            while len(self._tokens) < len(prompt) + num_tokens:
                drawn, hidden = target.read(self._tokens[-1:], len(self._tokens) - 1)
                self._drawn += drawn
                self._tokens += drawn
                states.append(hidden)
        self._hidden = [torch.cat(layer) for layer in zip(*states, strict=True)]

    def read(self, tokens: list[int], start: int) -> tuple[list[int], list[Tensor]]:
        """See `CachedModel`."""
        end = start + len(tokens)
        assert tokens == self._tokens[start:end] and end <= len(self._drawn), "only what was recorded"
        return self._drawn[start:end], [layer[start:end] for layer in self._hidden]


def walk(target: Target, root: int, tree: tuple[list[int], list[int]], length: int) -> tuple[Any, ...]:
    """Read the root and what follows it in the tree. Returns path, committed tokens and hidden states by layer."""
    tokens, parents = tree
    path, committed, states = [0], [], []
    token: int | None = root
    while token is not None:
        drawn, hidden = target.read([token], length + len(committed))
        committed.append(drawn[0])
        states.append(hidden)
        found = [c for c, t in enumerate(tokens, 1) if parents[c - 1] == path[-1] and t == drawn[0]]
        assert len(found) <= 1, "siblings are distinct"
        path += found
        token = drawn[0] if found else None
    return path, committed, [torch.cat(layer) for layer in zip(*states, strict=True)]


def path_of(guesses: list[int], parents: list[int], run: list[int]) -> list[int]:
    """The columns that a run took."""
    path = [0]
    for token in run[:-1]:
        path += [c for c, guess in enumerate(guesses, 1) if parents[c - 1] == path[-1] and guess == token]
    return path


Grow = Callable[[Any, Shape], tuple[list[int], list[int]]]  # a drafter -> tokens and parents


def generate_trees(
    target: Target, drafter: Any, prompt: list[int], shape: Shape, num_tokens: int, grow: Grow = grow
) -> tuple[int, list[TreeStep]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out. `drafter`: what `grow` takes."""
    with torch.no_grad():
        drawn, hidden = target.read(prompt, 0)
        first = root = drawn[-1]
        drafter.absorb([*prompt[1:], root], hidden, 0)
        length, count, steps = len(prompt), 1, []
        while count < num_tokens:
            tree = grow(drafter, shape)
            path, committed, hidden = walk(target, root, tree, length)
            steps.append(TreeStep(*tree, path, committed))
            drafter.absorb(committed, hidden, length)
            length, root, count = length + len(committed), committed[-1], count + len(committed)
    return first, steps
