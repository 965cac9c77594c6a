"""The MTP layers of MiMo-V2-Flash, written out for one request, head by head.

How a layer is fed, normed and read, and which attention it has (that of layers with a window, values scaled, a dense
MLP), is that of sglang's python/sglang/srt/models/mimo_v2_nextn.py, commit 060c48f709115f3b8f1573c7a00c66a457ced8a6;
that all layers read the target's hidden state before its final norm is `mtp_layers.py`. A row sees as many keys as in
transformers 5.17, models/mimo_v2_flash/modeling_mimo_v2_flash.py, its own included, from which the sinks are too.
"""

from typing import Any

import torch
from torch import Tensor

from support.reference.layers import Attention
from support.reference.mtp import ReferenceMtp
from support.reference.mtp_layers import MimoV2, ReferenceLayers


class WindowedAttention(Attention):
    """See `Attention`; with a sink in each head, and values that have fewer columns than keys."""

    def __init__(self, config: dict[str, Any], sinks: Tensor | None) -> None:
        super().__init__(config["swa_head_dim"], config["swa_rope_theta"], config["sliding_window"])
        self.config, self.sinks = config, sinks
        self.keys = self.values = torch.zeros(config["swa_num_key_value_heads"], 0, 0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Shapes: [T, n d], [T, k d], [T, k dv] -> [T, n dv]."""
        config, rows = self.config, len(q)
        heads, kv_heads = config["swa_num_attention_heads"], config["swa_num_key_value_heads"]
        q = self.rotated(q.view(rows, heads, -1).transpose(0, 1), start)
        k = self.rotated(k.view(rows, kv_heads, -1).transpose(0, 1), start)
        v = v.view(rows, kv_heads, -1).transpose(0, 1) * config["attention_value_scale"]
        if start:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        found = [
            self.head(q[head], k[head * kv_heads // heads], v[head * kv_heads // heads], head) for head in range(heads)
        ]
        return torch.cat(found, dim=1)

    def head(self, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
        """Row by row. Shapes: [T, d], [S, d], [S, dv] -> [T, dv]."""
        rows, first = [], len(k) - len(q)
        for row, query in enumerate(q):
            stop = first + row + 1
            begin = max(stop - self.config["sliding_window"], 0)
            products = k[begin:stop] @ query * len(query) ** -0.5
            if self.sinks is not None:
                products = torch.cat((products, self.sinks[head : head + 1]))
            rows.append(products.softmax(0)[: stop - begin] @ v[begin:stop])
        return torch.stack(rows)

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """The first columns, as halves. Shapes: [.., T, d] -> the same."""
        turned = int(x.shape[-1] * self.config["partial_rotary_factor"])
        frequencies = 1.0 / self.config["swa_rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
        angles = torch.arange(start, start + x.shape[-2], dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, fixed = x.split((turned // 2, turned // 2, x.shape[-1] - turned), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, fixed), dim=-1)


class ReferenceMimoV2Layer(ReferenceMtp):
    """Layer `index` of a checkpoint's tensors."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], index: int) -> None:
        names = MimoV2().names(index, config["num_hidden_layers"])
        super().__init__(tensors, config, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"], names)
        self.attention = WindowedAttention(config, tensors.get(f"{names.prefix}self_attn.attention_sink_bias"))


class ReferenceMimoV2Layers(ReferenceLayers):
    """All of them."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        super().__init__(MimoV2(), tensors, config)

    def layer(self, index: int) -> ReferenceMimoV2Layer:
        """With no K/V."""
        return ReferenceMimoV2Layer(self._tensors, self._config, index)
