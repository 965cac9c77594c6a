"""EAGLE drafting, written out for one request: the oracle for draft tokens and accept lengths.

The target is transformers' model; the head is its checkpoint's tensors and nothing of this project. A row's features
are the target's final hidden state, or the head's own output. There is no norm before the first layer, and none after
the last.
"""

from typing import Any

import torch
from torch import Tensor

from support.reference.layers import Attention, gated_mlp, rms_norm
from support.reference.loop import Step, generate_chains


class ReferenceHead:
    """The tensors of an EAGLE checkpoint, the target's embedding and head, and the K/V of the rows so far.

    `target_ids`: the tokens that may be guessed (FR-Spec); None: all.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        embed: Tensor,
        lm_head: Tensor,
        target_ids: list[int] | None = None,
    ) -> None:
        self.t = tensors
        self.eps = config["rms_norm_eps"]
        self.embed = embed
        self.lm_head = lm_head
        self.target_ids = target_ids
        self.attention = Attention(config["head_dim"], config["rope_theta"])

    def weight(self, name: str) -> Tensor:
        return self.t[f"layers.0.{name}.weight"]

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> outputs. K/V from `start` on is replaced."""
        x = torch.cat((self.embed[tokens], features), -1) @ self.t["fc.weight"].T + self.t["fc.bias"]
        q, k, v = (x @ self.weight(f"self_attn.{name}_proj").T for name in "qkv")
        x = x + self.attention(q, k, v, start) @ self.weight("self_attn.o_proj").T
        y = rms_norm(x, self.weight("post_attention_layernorm"), self.eps)
        return x + gated_mlp(y, *(self.weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")))

    def logits(self, output: Tensor) -> Tensor:
        return output @ (self.lm_head if self.target_ids is None else self.lm_head[self.target_ids]).T

    def token(self, column: int) -> int:
        return column if self.target_ids is None else self.target_ids[column]

    def guess(self, output: Tensor) -> int:
        return self.token(int(self.logits(output).argmax()))


def generate(
    target: Any, head: ReferenceHead, prompt: list[int], num_guesses: int, num_tokens: int
) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    return generate_chains(target, lambda hidden: hidden[-1], head, prompt, num_guesses, num_tokens)
