"""Greedy speculative decoding of one request, written out: what the loops of all draft heads share.

Row rule: the draft row at position p takes (features of p, token of p + 1) and predicts the token of p + 2. Features
are the target's for committed tokens, the head's own output in a chain.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Step:
    """One verify step: the guesses, how many were accepted, and what was committed (bonus included)."""

    guesses: list[int]
    accept_len: int
    committed: list[int]


class Head(Protocol):
    """A draft head, which keeps the K/V of its rows."""

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> [rows, H], each a feature for the next. K/V from `start` on is replaced."""
        ...

    def guess(self, output: Tensor) -> int:
        """The most probable token after a row."""
        ...


class CachedModel:
    """A transformers model and the KV of the tokens that it has read."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache()
        self._recurs = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
        self._tokens: list[int] = []  # that a model has read whose layers recur: a state cannot be cropped

    def read(self, tokens: list[int], start: int) -> tuple[list[int], list[Tensor]]:
        """Read tokens at positions start.., overwriting what was there.

        Returns the most probable token after each, and the hidden states [rows, H] that enter each layer, then those
        after the final norm.
        """
        out = self._run(tokens, start)
        return out.logits[0].argmax(-1).tolist(), [hidden[0] for hidden in out.hidden_states]

    def logits(self, tokens: list[int], start: int) -> Tensor:
        """The same. Returns the logits after each token."""
        return self._run(tokens, start).logits[0]

    def _run(self, tokens: list[int], start: int) -> Any:
        if self._recurs:
            self._tokens = [*self._tokens[:start], *tokens]
            out = self._model(torch.tensor([self._tokens]), output_hidden_states=True, use_cache=False)
            hidden_states = [hidden[:, start:] for hidden in out.hidden_states]
            return SimpleNamespace(logits=out.logits[:, start:], hidden_states=hidden_states)
        self._cache.crop(start)
        return self._model(
            torch.tensor([tokens]), past_key_values=self._cache, output_hidden_states=True, use_cache=True
        )


def num_accepted(guesses: list[int], drawn: list[int]) -> int:
    """How many guesses are what the target drew in their place."""
    return next((i for i, guess in enumerate(guesses) if guess != drawn[i]), len(guesses))


def generate_chains(
    model: Any,
    features_of: Callable[[list[Tensor]], Tensor],
    head: Head,
    prompt: list[int],
    num_guesses: int,
    num_tokens: int,
) -> tuple[int, list[Step]]:
    """Greedy decoding of a transformers model. Returns (first token, steps), ending when `num_tokens` are out.

    `features_of` makes the head's features from the hidden states of `CachedModel.read`.
    """
    target = CachedModel(model)

    def draft(tokens: list[int], features: Tensor, start: int) -> list[int]:
        """Absorb committed tokens, then guess."""
        output = head.forward(tokens, features, start)[-1]
        guesses = [head.guess(output)]
        for i in range(num_guesses - 1):
            output = head.forward(guesses[-1:], output[None], start + len(tokens) + i)[0]
            guesses.append(head.guess(output))
        return guesses

    with torch.no_grad():
        drawn, hidden = target.read(prompt, 0)
        first = root = drawn[-1]
        length, count, steps = len(prompt), 1, []
        guesses = draft([*prompt[1:], root], features_of(hidden), 0)
        while count < num_tokens:
            drawn, hidden = target.read([root, *guesses], length)
            accepted = num_accepted(guesses, drawn)
            committed = drawn[: accepted + 1]
            steps.append(Step(guesses, accepted, committed))
            guesses = draft(committed, features_of(hidden)[: accepted + 1], length)
            length, root, count = length + accepted + 1, committed[-1], count + accepted + 1
    return first, steps
