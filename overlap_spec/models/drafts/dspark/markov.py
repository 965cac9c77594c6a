"""The Markov head of a DSpark draft: what the token before a guess adds to the guess's logits.

    vanilla   e = w1[token before]              bias = w2 e
    gated     g = sigmoid(gate_proj [h; e])     bias = w2 (g * e)
    rnn       [g; c; o] = joint_proj [s; e; h], s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), bias = w2 tanh(o)

h is the row's output after the final norm, s the state, zero before a block's first guess. The rank r is small: w1 is
only gathered from, and w2 is read once for each guess.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.work import ForwardWork


class MarkovHead(Protocol):
    """A Markov head, loaded."""

    @property
    def bias(self) -> AnyLinear:
        """w2 [Vd, r]."""

    @property
    def work(self) -> ForwardWork:
        """What one guess reads and computes."""

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What `bias` is to multiply for the guess after `previous`, and the state after it. Sync: never.

        Shapes: previous [B] i64, hidden [B, H], state [B, r], None before the first guess -> [B, r], the new state.
        """


@dataclass(frozen=True)
class VanillaMarkov:
    """`vanilla` of the module's docstring."""

    tokens: Tensor  # w1 [V, r]
    bias: AnyLinear

    @property
    def work(self) -> ForwardWork:
        return self.bias.work

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.tokens[previous], None


@dataclass(frozen=True)
class GatedMarkov:
    """`gated` of the module's docstring."""

    tokens: Tensor  # w1 [V, r]
    bias: AnyLinear
    gate: AnyLinear  # [r, H + r]

    @property
    def work(self) -> ForwardWork:
        return self.bias.work + self.gate.work

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        embedded = self.tokens[previous]
        return self.gate(torch.cat((hidden, embedded), 1)).sigmoid() * embedded, None


@dataclass(frozen=True)
class RNNMarkov:
    """`rnn` of the module's docstring."""

    tokens: Tensor  # w1 [V, r]
    bias: AnyLinear
    joint: AnyLinear  # [3 r, 2 r + H]

    @property
    def work(self) -> ForwardWork:
        return self.bias.work + self.joint.work

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        embedded = self.tokens[previous]
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint(torch.cat((state, embedded, hidden), 1)).chunk(3, 1)
        kept = gate.sigmoid()
        return output.tanh(), kept * state + (1 - kept) * candidate.tanh()
