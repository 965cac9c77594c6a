"""The MTP layer of DeepSeek-V3 and GLM-4.7-Flash, written out for one request: keys and values of every head.

How the layer is fed, normed and read is that of sglang's python/sglang/srt/models/deepseek_nextn.py, commit
0114f9c923f237b42b5a769a8370a71b8b1cee56. Attention and experts are those of transformers 5.17,
models/deepseek_v3/modeling_deepseek_v3.py, from which the angles are taken.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_apply_mscale

from support.reference.layers import rms_norm
from support.reference.sparse_mtp import ReferenceSparseMtp

LATENT_EPS = 1e-6


class ReferenceLatentMtp(ReferenceSparseMtp):
    """See `ReferenceSparseMtp`; the K/V of the rows so far are those of every head."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor, head: Tensor) -> None:
        super().__init__(tensors, config, embed, head)
        settings = {key: value for key, value in config.items() if key != "architectures"}
        self.rope = DeepseekV3RotaryEmbedding(AutoConfig.for_model(**settings))
        size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        self.scale = yarn_apply_mscale(self.rope.config.rope_parameters, size**-0.5)
        self.keys = self.values = torch.zeros(config["num_attention_heads"], 0, 0)

    def attend(self, u: Tensor, start: int) -> Tensor:
        config, heads = self.config, self.config["num_attention_heads"]
        whole, turned, rank = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        latent = rms_norm(self.linear(u, "self_attn.q_a_proj"), self.weight("self_attn.q_a_layernorm"), LATENT_EPS)
        q = self.linear(latent, "self_attn.q_b_proj").view(len(u), heads, -1).transpose(0, 1)
        row, shared = self.linear(u, "self_attn.kv_a_proj_with_mqa").split((rank, turned), dim=1)
        row = rms_norm(row, self.weight("self_attn.kv_a_layernorm"), LATENT_EPS)
        both = self.linear(row, "self_attn.kv_b_proj").view(len(u), heads, -1).transpose(0, 1)
        k = torch.cat((both[..., :whole], self.rotated(shared, start).expand(heads, -1, -1)), dim=2)
        q = torch.cat((q[..., :whole], self.rotated(q[..., whole:], start)), dim=2)
        v = both[..., whole:]
        if start:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        mask = torch.ones(len(u), k.shape[1], dtype=torch.bool).tril(start)
        products = (self.scale * q @ k.transpose(1, 2)).masked_fill(~mask, -torch.inf)
        found = (products.softmax(2) @ v).transpose(0, 1).flatten(1)
        return self.linear(found, "self_attn.o_proj")

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """Neighbours are pairs. Shapes: [.., T, dr] -> the same."""
        at = torch.arange(start, start + x.shape[-2])[None]
        cos, sin = (each[0].chunk(2, dim=1)[0].to(x.dtype) for each in self.rope(torch.zeros(1), at))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
