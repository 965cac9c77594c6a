"""A DSpark draft and its loop, written out in plain torch: the oracle for logits, guesses and accept lengths.

After the published implementation: github.com/deepseek-ai/DeepSpec at commit afdfa7c9382a3341a3e6f17756dd816da79f132c,
deepspec/modeling/dspark/qwen3/modeling.py (`_forward_backbone`), deepspec/modeling/dspark/markov_head.py
(`sample_block_tokens` of the three heads) and deepspec/eval/dspark (`Qwen3DSparkEvaluator._propose`), without a
confidence threshold. Its layers are DFlash's. Nothing is cached. Shapes: R rows of a block, r the Markov head's rank.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.reference.dflash import ReferenceDFlash
from support.reference.loop import CachedModel, Step, num_accepted


@dataclass(frozen=True)
class ReferenceDSpark:
    """The draft: DFlash's layers, and the Markov head's tensors under their published names."""

    backbone: ReferenceDFlash
    kind: str

    def guess(self, hidden: Tensor, root: int) -> tuple[list[int], Tensor]:
        """Greedy guesses of a block. Shapes: hidden [R, H] -> R guesses, the logits of each [R, V]."""
        base, guesses, logits = hidden @ self.backbone.head.T, list[int](), list[Tensor]()
        previous, state = root, torch.zeros(self._tensor("markov_w1.weight").shape[1]).to(hidden)
        for row, own in zip(hidden, base, strict=True):
            bias, state = self._bias(previous, row, state)
            logits.append(own + bias)
            previous = int(logits[-1].argmax())
            guesses.append(previous)
        return guesses, torch.stack(logits)

    def _bias(self, previous: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: hidden [H], state [r] -> [V], the new state."""
        before, project = self._tensor("markov_w1.weight")[previous], self._tensor("markov_w2.weight")
        if self.kind == "vanilla":
            return project @ before, state
        if self.kind == "gated":
            gate = torch.sigmoid(self._affine("gate_proj", torch.cat((hidden, before))))
            return project @ (gate * before), state
        made = self._affine("joint_proj", torch.cat((state, before, hidden)))
        gate, candidate, output = made.view(3, -1)
        gate = torch.sigmoid(gate)
        return project @ torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def _affine(self, name: str, x: Tensor) -> Tensor:
        return self._tensor(f"{name}.weight") @ x + self._tensor(f"{name}.bias")

    def _tensor(self, name: str) -> Tensor:
        return self.backbone.tensors[f"markov_head.{name}"]


@dataclass
class Loop:
    """What a greedy run did."""

    steps: list[Step] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # of each step's guesses: [R, V]


def generate(model: Any, draft: ReferenceDSpark, prompt: list[int], num_rows: int, num_steps: int) -> Loop:
    """Greedy decoding of one request of a transformers model, `num_steps` verify steps."""
    target, loop, layers = CachedModel(model), Loop(), draft.backbone.aux_layers
    with torch.no_grad():
        drawn, hidden = target.read(prompt, 0)
        root, length = drawn[-1], len(prompt)
        context = torch.cat([hidden[layer + 1] for layer in layers], 1)
        for _ in range(num_steps):
            block = draft.backbone.hidden(context[None], torch.tensor([length]), torch.tensor([root]), num_rows)[0]
            guesses, logits = draft.guess(block, root)
            drawn, hidden = target.read([root, *guesses], length)
            accepted = num_accepted(guesses, drawn)
            loop.steps.append(Step(guesses, accepted, drawn[: accepted + 1]))
            loop.logits.append(logits)
            read = torch.cat([hidden[layer + 1] for layer in layers], 1)
            context = torch.cat((context, read[: accepted + 1]))
            length, root = length + accepted + 1, drawn[accepted]
    return loop
