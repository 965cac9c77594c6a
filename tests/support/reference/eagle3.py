"""EAGLE-3 drafting, written out for one request: the oracle for draft tokens and accept lengths.

The target is transformers' model; the head is its checkpoint's tensors and nothing of this project. A row's features
are the hidden states of three of the target's layers through `fc`, or the head's own output.
"""

from typing import Any

import torch
from torch import Tensor

from support.reference.layers import Attention, gated_mlp, rms_norm
from support.reference.loop import Step, generate_chains


class ReferenceHead:
    """The tensors of an EAGLE-3 checkpoint, and the K/V of the rows so far."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor) -> None:
        self.t = tensors
        self.eps = config["rms_norm_eps"]
        self.aux_hidden: list[int] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.embed = embed
        self.attention = Attention(config["head_dim"], config["rope_theta"])

    def weight(self, name: str) -> Tensor:
        return self.t[f"midlayer.{name}.weight"]

    def features_of(self, hidden: list[Tensor]) -> Tensor:
        """Of the hidden states that enter each layer of the target: layer i's output enters i + 1."""
        return torch.cat([hidden[i + 1] for i in self.aux_hidden], -1) @ self.t["fc.weight"].T

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> residual sums before the final norm. K/V from `start` on is replaced."""
        embedded = rms_norm(self.embed[tokens], self.weight("input_layernorm"), self.eps)
        u = torch.cat((embedded, rms_norm(features, self.weight("hidden_norm"), self.eps)), -1)
        q, k, v = (u @ self.weight(f"self_attn.{name}_proj").T for name in "qkv")
        x = features + self.attention(q, k, v, start) @ self.weight("self_attn.o_proj").T
        y = rms_norm(x, self.weight("post_attention_layernorm"), self.eps)
        return x + gated_mlp(y, *(self.weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")))

    def logits(self, output: Tensor) -> Tensor:
        return rms_norm(output, self.t["norm.weight"], self.eps) @ self.t["lm_head.weight"].T

    def token(self, column: int) -> int:
        return column + int(self.t["d2t"][column])

    def guess(self, output: Tensor) -> int:
        return self.token(int(self.logits(output).argmax()))


def generate(
    target: Any, head: ReferenceHead, prompt: list[int], num_guesses: int, num_tokens: int
) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    return generate_chains(target, head.features_of, head, prompt, num_guesses, num_tokens)
