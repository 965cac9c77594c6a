"""Drafting with one MTP layer for each guess, written out for one request: the oracle for guesses and accept lengths.

Nothing is kept from step to step: every layer reads all committed tokens again. Layer i's row at position p takes
(features of p, token of p + 1 + i), where tokens past the last committed one are guesses, and its last row guesses.
Features are the target's hidden states before its final norm, or in a chain the output of the layer before, before
its own norm. The target is transformers' model; `mtp.py` computes a layer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from support.reference.loop import Step, num_accepted
from support.reference.mtp import Mimo, ReferenceMtp


@dataclass(frozen=True)
class Layers(ABC):
    """A layout of several layers."""

    chained: bool
    own_head: str | None  # the name of each layer's; None: the target's

    @abstractmethod
    def names(self, index: int, num_target_layers: int) -> Mimo:
        """Of the parts of layer `index`."""


@dataclass(frozen=True)
class EmbeddingFirst(Mimo):
    """What both layouts have in common: the names of DeepSeek's parts, the embedding's half first."""

    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    input_map: str = "eh_proj"
    mask_first: bool = False

    def halves(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return embedded, hidden


class MimoV2(Layers):
    """All layers read the target."""

    def __init__(self) -> None:
        super().__init__(chained=False, own_head=None)

    def names(self, index: int, num_target_layers: int) -> Mimo:
        return EmbeddingFirst(f"model.mtp.layers.{index}.", mlp_norm="pre_mlp_layernorm")


class StepChain(Layers):
    """Step-3.5: a layer reads the one before it, and has its own head."""

    def __init__(self) -> None:
        super().__init__(chained=True, own_head="transformer.shared_head.output")

    def names(self, index: int, num_target_layers: int) -> Mimo:
        prefix = f"model.layers.{num_target_layers + index}."
        return EmbeddingFirst(prefix, final_norm="transformer.shared_head.norm")


class ReferenceLayers:
    """The layers of a checkpoint's tensors, under its names."""

    def __init__(
        self, layout: Layers, tensors: dict[str, Tensor], config: dict[str, Any], window: int | None = None
    ) -> None:
        self.layout = layout
        self._tensors = tensors
        self._config = config
        self._window = window

    def layer(self, index: int) -> ReferenceMtp:
        """With no K/V."""
        names, tensors = self.layout.names(index, self._config["num_hidden_layers"]), self._tensors
        own = self.layout.own_head
        head = tensors["lm_head.weight" if own is None else f"{names.prefix}{own}.weight"]
        embed = tensors["model.embed_tokens.weight"]
        return ReferenceMtp(tensors, self._config, embed, head, names, self._window)

    def guesses(self, tokens: list[int], hidden: Tensor, num_guesses: int) -> list[int]:
        """What follows `tokens`, committed; `hidden` [len(tokens) - 1, H]: of all but the last."""
        tokens, features, guesses = tokens[1:], hidden, []
        for index in range(num_guesses):
            layer = self.layer(index)
            output = layer.stream(tokens, features, 0)
            guesses.append(layer.guess(layer.norm(output[-1], layer.layout.final_norm)))
            tokens = [*tokens[1:], guesses[-1]]
            features = output if self.layout.chained else features
        return guesses


def generate(
    target: Any, layers: ReferenceLayers, prompt: list[int], num_guesses: int, num_tokens: int
) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    with torch.no_grad():
        tokens = [*prompt, read(target, prompt)[0][-1]]
        steps: list[Step] = []
        while len(tokens) - len(prompt) < num_tokens:
            guesses = layers.guesses(tokens, read(target, tokens[:-1])[1], num_guesses)
            drawn = read(target, [*tokens, *guesses])[0][len(tokens) - 1 :]
            accepted = num_accepted(guesses, drawn)
            steps.append(Step(guesses, accepted, drawn[: accepted + 1]))
            tokens += steps[-1].committed
    return tokens[len(prompt)], steps


def read(target: Any, tokens: list[int]) -> tuple[list[int], Tensor]:
    """The most probable token after each, and the hidden states before the final norm [len(tokens), H]."""
    seen: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    try:
        logits = target(torch.tensor([tokens])).logits[0]
    finally:
        hook.remove()
    return logits.argmax(-1).tolist(), seen[0]
