"""Trains a DFlash draft (Chen et al. 2026, arXiv:2602.06036): blocks of masks that read several target layers.

Blocks begin at roots drawn from the answers. A block at place a has rows a .. a + R - 1: the root, and masks. Its row
a + k sees the context at places 0 .. a - 1 and the whole block, and guesses token a + k. The loss is the cross-entropy
with the answer's tokens, and weighs less with k, since a guess counts only if those before it are right.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.train_draft.head import (
    STD,
    Batch,
    Frozen,
    Tensors,
    Weights,
    as_parameters,
    begun_layer,
    chunked_argmax,
    in_heads,
    rotated,
)
from overlap_spec.train_draft.state import dflash_config

NUM_LAYERS = 5
BLOCKS = 24  # of a sample, in a training step
FADES = 7.0  # places over which a guess's weight decreases by e, in blocks of 14 and more; less in shorter ones


class DFlash:
    """The draft (`Head`)."""

    def __init__(
        self, frozen: Frozen, aux_layers: tuple[int, ...], num_layers: int, block_size: int, mask: int, seed: int = 0
    ) -> None:
        self._frozen, self._aux_layers = frozen, aux_layers
        self._num_layers, self._block_size, self._mask = num_layers, block_size, mask
        self._embedding = frozen.embedding.scaled(1.0)  # rows as they are stored
        self._ahead = torch.arange(block_size, device=frozen.embedding.device)
        drawn = self._begun(torch.Generator().manual_seed(seed))
        self.tensors: Tensors = as_parameters(drawn, frozen.embedding.device)

    def _begun(self, random: torch.Generator) -> Tensors:
        """The target's last layers, with norms of heads that have no effect yet but the scale."""
        llama, hidden = self._frozen.llama, self._frozen.llama.hidden_size
        made: Tensors = {}
        count = self._frozen.target.num_layers
        for index in range(self._num_layers):
            known = self._frozen.layer(max(count - self._num_layers + index, 0))
            layer = begun_layer(llama, hidden, known, random)
            made |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
            made |= {f"layers.{index}.self_attn.{part}_norm.weight": torch.ones(llama.head_dim) for part in "qk"}
        fc = torch.randn(hidden, len(self._aux_layers) * hidden, generator=random) * STD
        fc[:, -hidden:] += torch.eye(hidden)
        made["fc.weight"], made["hidden_norm.weight"] = fc, torch.ones(hidden)
        made["norm.weight"] = self._frozen.final_norm.cpu()
        return made

    def config(self) -> dict[str, Any]:
        return dflash_config(self._frozen, self._aux_layers, self._num_layers, self._block_size, self._mask)

    def buffers(self) -> Tensors:
        return {}

    def kept(self) -> dict[str, Any]:
        return {"mask": self._mask, "block_size": self._block_size}

    def loss(self, batch: Batch, random: torch.Generator) -> Tensor:
        roots = self._drawn_roots(batch, random)
        guessed = roots[..., None] + self._ahead[1:]
        counted = guessed < batch.lengths[:, None, None]
        fades = min(FADES, self._block_size / 2)
        weights = torch.exp(-(self._ahead[1:] - 1) / fades) * counted
        rows = self.block_rows(batch, roots)[:, :, 1:][counted]
        tokens = batch.tokens.gather(1, guessed.clamp(max=batch.tokens.shape[1] - 1).flatten(1)).view_as(guessed)
        errors = F.cross_entropy(F.linear(rows, self._frozen.head).float(), tokens[counted], reduction="none")
        return (errors * weights[counted]).sum() / weights.sum().clamp(min=1e-6)

    def _drawn_roots(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Tokens of the answers that have one behind them. Shapes: -> [B, N] i64."""
        count = (batch.lengths - 1 - batch.starts).clamp(min=1)
        share = torch.rand(len(count), BLOCKS, generator=random).to(count.device)
        return batch.starts[:, None] + (share * count[:, None]).long()

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        counts = torch.zeros_like(batch.tokens)
        first, last = int(batch.starts.min()), int(batch.lengths.max()) - 1
        for begin in range(first, last, BLOCKS):
            roots = torch.arange(begin, min(begin + BLOCKS, last), device=counts.device).expand(len(counts), -1)
            guessed = roots[..., None] + self._ahead[1:]
            rows = self.block_rows(batch, roots)[:, :, 1:]
            guesses = chunked_argmax(rows.flatten(0, 2), self._frozen.head).view_as(guessed)
            tokens = batch.tokens.gather(1, guessed.clamp(max=counts.shape[1] - 1).flatten(1)).view_as(guessed)
            is_right = (guesses == tokens) & (guessed < batch.lengths[:, None, None])
            counts[:, roots[0]] = is_right.cumprod(2).sum(2)
        return counts

    def block_rows(self, batch: Batch, roots: Tensor) -> Tensor:
        """Each block's rows before the head. Shapes: roots [B, N] -> [B, N, R, H]."""
        size, (count, blocks) = self._block_size, roots.shape
        places = (roots[..., None] + self._ahead).flatten(1)
        tokens = torch.full((count, blocks, size), self._mask, device=roots.device)
        tokens[..., 0] = batch.tokens.gather(1, roots)
        hidden = self._embedding(tokens.flatten(1))
        weights = Weights(self.tensors, hidden.dtype, self._frozen.llama.rms_norm_eps)
        context = weights.norm("hidden_norm", weights.linear("fc", batch.aux))
        of_block = torch.arange(blocks, device=roots.device).repeat_interleave(size)
        sees_context = batch.places < roots.repeat_interleave(size, 1)[..., None]
        sees_block = (of_block == of_block[:, None]).expand(count, -1, -1)
        visible = torch.cat((sees_context, sees_block), 2)[:, None]
        for index in range(self._num_layers):
            name = f"layers.{index}"
            x = weights.norm(f"{name}.input_layernorm", hidden)
            hidden = hidden + self._attended(weights, f"{name}.self_attn", x, context, places, visible)
            hidden = hidden + weights.mlp(f"{name}.mlp", weights.norm(f"{name}.post_attention_layernorm", hidden))
        return weights.norm("norm", hidden).view(count, blocks, size, -1)

    def _attended(
        self, weights: Weights, name: str, x: Tensor, context: Tensor, places: Tensor, visible: Tensor
    ) -> Tensor:
        """Shapes: x [B, N * R, H], context [B, L, H], places [B, N * R], visible [B, 1, N * R, L + N * R]."""
        table, dim = self._frozen.cos_sin, self._frozen.llama.head_dim
        of_context = table[: context.shape[1]].expand(len(x), -1, -1)
        of_rows = table[places]
        both = torch.cat((context, x), 1)
        q, k, v = (
            in_heads(weights.linear(f"{name}.{part}_proj", rows), dim)
            for part, rows in zip("qkv", (x, both, both), strict=True)
        )
        q = rotated(weights.norm(f"{name}.q_norm", q), of_rows[:, None])
        k = rotated(weights.norm(f"{name}.k_norm", k), torch.cat((of_context, of_rows), 1)[:, None])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return weights.linear(f"{name}.o_proj", found.transpose(1, 2).flatten(2))
