"""The MTP layer of Qwen3-Next, written out for one request, head by head and expert by expert.

How the layer is fed, normed and read is that of sglang's python/sglang/srt/models/qwen3_next_mtp.py, commit
bd998a2c10323e6afaa87a3b2ec8d124dcd9e2d5: embedding and hidden state are normed, the embedding comes first, and the
layer is one of the model that attends. Attention and experts are those of transformers 5.17,
models/qwen3_next/modeling_qwen3_next.py. Norms are stored as what is added to one.
"""

from typing import Any

import torch
from torch import Tensor

from support.reference.layers import rms_norm
from support.reference.sparse_mtp import ReferenceSparseMtp

OUTSIDE = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}


class ReferenceQwen3NextMtp(ReferenceSparseMtp):
    """See `ReferenceSparseMtp`; the K/V of the rows so far are those of every head of keys."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor, head: Tensor) -> None:
        super().__init__(tensors, config, embed, head)
        self.keys = self.values = torch.zeros(config["num_key_value_heads"], 0, 0)

    def weight(self, name: str) -> Tensor:
        return self.t[f"mtp.{OUTSIDE.get(name, f'layers.0.{name}')}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1 + self.weight(name), self.eps)

    def attend(self, u: Tensor, start: int) -> Tensor:
        size, groups = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        both, k, v = (self.linear(u, f"self_attn.{name}_proj") for name in "qkv")
        q, gates = both.view(len(u), -1, 2, size).unbind(2)
        q = self.rotated(self.norm(q, "self_attn.q_norm").transpose(0, 1), start)
        k = self.rotated(self.norm(k.view(len(u), -1, size), "self_attn.k_norm").transpose(0, 1), start)
        v = v.view(len(u), -1, size).transpose(0, 1)
        if start:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        mask, found = torch.ones(len(u), k.shape[1], dtype=torch.bool).tril(start), []
        for index, queries in enumerate(q):
            products = (size**-0.5 * queries @ k[index // groups].T).masked_fill(~mask, -torch.inf)
            found.append(products.softmax(1) @ v[index // groups] * gates[:, index].sigmoid())
        return self.linear(torch.cat(found, dim=1), "self_attn.o_proj")

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """The first columns of a head turn, those half of them apart are pairs. Shapes: [n, T, d] -> the same."""
        angular = self.config.get("rope_parameters", self.config)  # Qwen3.5's, whose three positions are equal for text
        turned = int(x.shape[2] * angular["partial_rotary_factor"])
        frequencies = 1.0 / angular["rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
        angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, fixed = x.split((turned // 2, turned // 2, x.shape[2] - turned), dim=2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, fixed), dim=2)

    def experts(self, row: Tensor) -> Tensor:
        """An MLP in a model without experts. Shapes: [H] -> [H]."""
        if not self.config.get("num_experts"):
            return self.mlp("mlp", row)
        probabilities = (self.weight("mlp.gate") @ row).softmax(0).tolist()
        best = sorted(range(len(probabilities)), key=lambda expert: -probabilities[expert])
        best = best[: self.config["num_experts_per_tok"]]
        total = sum(probabilities[expert] for expert in best)
        found = torch.sigmoid(self.weight("mlp.shared_expert_gate") @ row) * self.mlp("mlp.shared_expert", row)
        for expert in best:
            found = found + probabilities[expert] / total * self.mlp(f"mlp.experts.{expert}", row)
        return found
