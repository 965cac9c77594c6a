"""A DFlash draft and its loop, written out in plain torch: the oracle for logits, guesses and accept lengths.

After the published implementation: github.com/z-lab/dflash, dflash/model.py at commit
10129599dffb338ff38cfd235a53ca6d3667b4dd (`DFlashDraftModel.forward`, `dflash_generate`). Nothing is cached: each step
makes the keys and values of the whole context again. Shapes: N blocks of R rows, T context rows, n aux layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.reference.layers import gated_mlp, rms_norm
from support.reference.loop import CachedModel, Step, num_accepted

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class ReferenceDFlash:
    """The draft. `embed` [V, H] and `head` [V, H] are the target's."""

    tensors: Tensors
    config: dict[str, Any]
    embed: Tensor
    head: Tensor

    @property
    def aux_layers(self) -> list[int]:
        found: list[int] = self.config["dflash_config"]["target_layer_ids"]
        return found

    def logits(self, context: Tensor, lengths: Tensor, roots: Tensor, num_rows: int) -> Tensor:
        """Of each row of each block: `hidden` and the head. Shapes: -> [N, R, V]."""
        return self.hidden(context, lengths, roots, num_rows) @ self.head.T

    def hidden(self, context: Tensor, lengths: Tensor, roots: Tensor, num_rows: int) -> Tensor:
        """The output of each row of each block, after the final norm. Block b sees context rows 0 .. lengths[b] - 1.

        Shapes: context [N, T, n * H], lengths, roots [N] -> [N, R, H].
        """
        t, eps = self.tensors, self.config["rms_norm_eps"]
        seen = rms_norm(context @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
        masks = torch.full((len(roots), num_rows - 1), self.config["dflash_config"]["mask_token_id"])
        hidden = F.embedding(torch.cat((roots[:, None], masks), 1), self.embed)
        at = torch.arange(context.shape[1])
        block_at = lengths[:, None] + torch.arange(num_rows)
        positions = torch.cat((at.expand(len(roots), -1), block_at), 1)
        visible = torch.cat((at < lengths[:, None], torch.ones_like(block_at, dtype=torch.bool)), 1)
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            x = rms_norm(hidden, t[f"{name}.input_layernorm.weight"], eps)
            hidden = hidden + self._attended(name, x, seen, positions, visible)
            x = rms_norm(hidden, t[f"{name}.post_attention_layernorm.weight"], eps)
            hidden = hidden + gated_mlp(x, *(t[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
        return rms_norm(hidden, t["norm.weight"], eps)

    def _attended(self, name: str, x: Tensor, seen: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Shapes: x [N, R, H], seen [N, T, H], positions [N, T + R], visible [N, T + R] -> [N, R, H]."""
        num_rows, both = x.shape[1], torch.cat((seen, x), 1)
        q = self._heads(f"{name}.self_attn.q", x)
        k, v = (self._heads(f"{name}.self_attn.{part}", both) for part in "kv")
        q, k = self._rope(q, positions[:, -num_rows:]), self._rope(k, positions)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(3)
        return (weights @ v).transpose(1, 2).flatten(2) @ self.tensors[f"{name}.self_attn.o_proj.weight"].T

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """Shapes: [N, R, H] -> [N, heads, R, d]."""
        heads = (x @ self.tensors[f"{name}_proj.weight"].T).unflatten(2, (-1, self.config["head_dim"])).transpose(1, 2)
        norm = self.tensors.get(f"{name}_norm.weight")
        return heads if norm is None else rms_norm(heads, norm, self.config["rms_norm_eps"])

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Shapes: x [N, heads, R, d], positions [N, R]."""
        d = x.shape[3]
        inverse = 1.0 / self.config["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = positions.float()[:, None, :, None] * inverse
        cos, sin = torch.cat([angles.cos()] * 2, -1).to(x), torch.cat([angles.sin()] * 2, -1).to(x)
        return x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin


@dataclass
class Loop:
    """What a greedy run did."""

    steps: list[Step] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # of each step's guesses: [K, V]


def generate(model: Any, draft: ReferenceDFlash, prompt: list[int], num_rows: int, num_steps: int) -> Loop:
    """Greedy decoding of one request of a transformers model, `num_steps` verify steps."""
    target, loop = CachedModel(model), Loop()
    with torch.no_grad():
        drawn, hidden = target.read(prompt, 0)
        root, length = drawn[-1], len(prompt)
        context = torch.cat([hidden[layer + 1] for layer in draft.aux_layers], 1)
        for _ in range(num_steps):
            logits = draft.logits(context[None], torch.tensor([length]), torch.tensor([root]), num_rows)[0, 1:]
            guesses: list[int] = logits.argmax(1).tolist()
            drawn, hidden = target.read([root, *guesses], length)
            accepted = num_accepted(guesses, drawn)
            loop.steps.append(Step(guesses, accepted, drawn[: accepted + 1]))
            loop.logits.append(logits)
            read = torch.cat([hidden[layer + 1] for layer in draft.aux_layers], 1)
            context = torch.cat((context, read[: accepted + 1]))
            length, root = length + accepted + 1, drawn[accepted]
    return loop
