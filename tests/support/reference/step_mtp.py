"""The MTP layers of Step-3.5-Flash, written out for one request, head by head.

How a layer is fed, normed and read, and that it has a head of its own, is that of sglang's
python/sglang/srt/models/step3p5_mtp.py, commit 03d73863b6f9f24b0edf14f23291ed3019fde2c6; its attention (norms and
gates of heads, a window) and its dense MLP are those of step3p5.py, commit 01b5f572b7b678e2fa5a727881f1ff3ab4dd3c6d. A
row sees as many keys as in transformers 5.17, models/step3p7/modeling_step3p7.py, its own included. The chain is
`mtp_layers.py`.
"""

from typing import Any

import torch
from torch import Tensor

from support.reference.layers import rms_norm
from support.reference.mtp import ReferenceMtp
from support.reference.mtp_layers import ReferenceLayers, StepChain


class ReferenceStepLayer(ReferenceMtp):
    """Layer `index` of a checkpoint's tensors, and the K/V of the rows so far."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], index: int) -> None:
        layout = StepChain()
        names = layout.names(index, config["num_hidden_layers"])
        head = tensors[f"{names.prefix}{layout.own_head}.weight"]
        plain = {"rms_norm_eps": config["rms_norm_eps"], "head_dim": config["head_dim"], "rope_theta": 1e4}
        super().__init__(tensors, plain, tensors["model.embed_tokens.weight"], head, names)
        self.config, self.place = config, config["num_hidden_layers"] + index
        self.keys = self.values = torch.zeros(config["num_attention_groups"], 0, 0)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Norms are stored as what is added to one."""
        return rms_norm(x, 1 + self.weight(name), self.eps)

    def stream(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Before the final norm."""
        both = torch.cat((self.norm(self.embed[tokens], "enorm"), self.norm(features, "hnorm")), -1)
        x = self.linear(both, "eh_proj")
        x = x + self.attend(self.norm(x, "input_layernorm"), start)
        y = self.norm(x, "post_attention_layernorm")
        gate, up = self.linear(y, "mlp.gate_proj"), self.linear(y, "mlp.up_proj")
        return x + self.linear(gate * torch.sigmoid(gate) * up, "mlp.down_proj")

    def attend(self, u: Tensor, start: int) -> Tensor:
        heads, groups = self.config["attention_other_setting"]["num_attention_heads"], len(self.keys)
        q, k, v = (
            self.linear(u, f"self_attn.{part}_proj").view(len(u), n, -1)
            for part, n in zip("qkv", (heads, groups, groups), strict=True)
        )
        q, k = (
            self.rotated(self.norm(x, f"self_attn.{part}_norm").transpose(0, 1), start)
            for x, part in ((q, "q"), (k, "k"))
        )
        v = v.transpose(0, 1)
        if start:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        gates = torch.sigmoid(self.linear(u, "self_attn.g_proj"))
        found = [
            gates[:, head, None] * self.head_of(q[head], k[head * groups // heads], v[head * groups // heads])
            for head in range(heads)
        ]
        return self.linear(torch.cat(found, dim=1), "self_attn.o_proj")

    def head_of(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Row by row. Shapes: [T, d], [S, d], [S, d] -> [T, d]."""
        rows, first = [], len(k) - len(q)
        for row, query in enumerate(q):
            stop = first + row + 1
            seen = slice(max(stop - self.config["sliding_window"], 0), stop)
            rows.append((k[seen] @ query * len(query) ** -0.5).softmax(0) @ v[seen])
        return torch.stack(rows)

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """By the base of this layer, over the whole head. Shapes: [.., T, d] -> the same."""
        size, base = x.shape[-1], self.config["rope_theta"][self.place]
        assert self.config["partial_rotary_factors"][self.place] == 1.0
        frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(start, start + x.shape[-2], dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class ReferenceStepLayers(ReferenceLayers):
    """All of them."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        super().__init__(StepChain(), tensors, config)

    def layer(self, index: int) -> ReferenceStepLayer:
        """With no K/V."""
        return ReferenceStepLayer(self._tensors, self._config, index)
