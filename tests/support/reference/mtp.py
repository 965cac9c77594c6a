"""MTP drafting, written out for one request: the oracle for draft tokens and accept lengths.

The target is transformers' model; the layer is its checkpoint's tensors and nothing of this project. A row's features
are the target's hidden state after its final norm, or the layer's own output after that of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.reference.layers import Attention, gated_mlp, rms_norm
from support.reference.loop import Step, generate_chains


@dataclass(frozen=True)
class Mimo:
    """What MiMo calls the parts of the layer, in the order of the map's halves."""

    prefix: str = "model.mtp_layers.0."
    token_norm: str = "token_layernorm"
    hidden_norm: str = "hidden_layernorm"
    input_map: str = "input_proj"
    final_norm: str = "final_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mask_first: bool = True  # no embedding at position 0

    def halves(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, embedded


MIMO = Mimo()


@dataclass(frozen=True)
class DeepSeek(Mimo):
    """The same of DeepSeek's, for a target of two layers."""

    prefix: str = "model.layers.2."
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    input_map: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    mask_first: bool = False

    def halves(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return embedded, hidden


class ReferenceMtp:
    """The tensors of an MTP layer under the names of the checkpoint, and the K/V of the rows so far."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        embed: Tensor,
        head: Tensor,
        layout: Mimo = MIMO,
        window: int | None = None,
    ) -> None:
        self.t = tensors
        self.eps = config["rms_norm_eps"]
        self.embed = embed
        self.head = head
        self.layout = layout
        self.attention = Attention(config["head_dim"], config["rope_theta"], window)

    def weight(self, name: str) -> Tensor:
        return self.t[f"{self.layout.prefix}{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weight(name), self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(name), self.t.get(f"{self.layout.prefix}{name}.bias"))

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> [rows, H], after the final norm. K/V from `start` on is replaced."""
        return self.norm(self.stream(tokens, features, start), self.layout.final_norm)

    def stream(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """The same before the final norm."""
        embedded = self.embed[tokens]
        if start == 0 and self.layout.mask_first:
            embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        embedded, hidden = self.norm(embedded, self.layout.token_norm), self.norm(features, self.layout.hidden_norm)
        x = self.linear(torch.cat(self.layout.halves(embedded, hidden), -1), self.layout.input_map)
        u = self.norm(x, "input_layernorm")
        q, k, v = (self.linear(u, f"self_attn.{name}_proj") for name in "qkv")
        x = x + self.linear(self.attention(q, k, v, start), "self_attn.o_proj")
        y = self.norm(x, self.layout.mlp_norm)
        return x + gated_mlp(y, *(self.weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")))

    def logits(self, output: Tensor) -> Tensor:
        return self.head @ output

    def token(self, column: int) -> int:
        return column

    def guess(self, output: Tensor) -> int:
        return int(self.logits(output).argmax())


def generate(
    target: Any, mtp: ReferenceMtp, prompt: list[int], num_guesses: int, num_tokens: int
) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    return generate_chains(target, lambda hidden: hidden[-1], mtp, prompt, num_guesses, num_tokens)
