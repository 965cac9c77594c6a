"""The MTP layer of GLM-4.5 and 4.6, written out for one request.

How the layer is fed, normed and read is that of sglang's python/sglang/srt/models/glm4_moe_nextn.py, commit
008b79d2358b08adf9b6c879625030f890c8c4e2. Attention and experts are those of transformers 5.17,
models/glm4_moe/modeling_glm4_moe.py, from which the angles are taken.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from support.reference.layers import rms_norm
from support.reference.sparse_mtp import ReferenceSparseMtp


class ReferenceGlmMtp(ReferenceSparseMtp):
    """See `ReferenceSparseMtp`; the K/V of the rows so far are those of every head of keys."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor, head: Tensor) -> None:
        super().__init__(tensors, config, embed, head)
        settings = {key: value for key, value in config.items() if key != "architectures"}
        self.rope = Glm4MoeRotaryEmbedding(AutoConfig.for_model(**settings))
        self.keys = self.values = torch.zeros(config["num_key_value_heads"], 0, 0)

    def attend(self, u: Tensor, start: int) -> Tensor:
        size, groups = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        q, k, v = (self.linear(u, f"self_attn.{name}_proj").view(len(u), -1, size) for name in "qkv")
        if self.config["use_qk_norm"]:
            q, k = (rms_norm(x, self.weight(f"self_attn.{n}_norm"), self.eps) for x, n in ((q, "q"), (k, "k")))
        q, k, v = self.rotated(q.transpose(0, 1), start), self.rotated(k.transpose(0, 1), start), v.transpose(0, 1)
        if start:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        mask = torch.ones(len(u), k.shape[1], dtype=torch.bool).tril(start)
        found = []
        for index, queries in enumerate(q):
            products = (size**-0.5 * queries @ k[index // groups].T).masked_fill(~mask, -torch.inf)
            found.append(products.softmax(1) @ v[index // groups])
        return self.linear(torch.cat(found, dim=1), "self_attn.o_proj")

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """The first columns of a head turn, those half of them apart are pairs. Shapes: [n, T, d] -> the same."""
        at = torch.arange(start, start + x.shape[1])[None]
        cos, sin = (each[0].chunk(2, dim=1)[0].to(x.dtype) for each in self.rope(torch.zeros(1), at))
        half = cos.shape[1]
        first, second, fixed = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, fixed), dim=-1)
