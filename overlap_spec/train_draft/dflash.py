"""Trains drafts that guess a block of masks at once, which reads several target layers.

Blocks begin at roots drawn from the answers. A block at place a has rows a .. a + R - 1: the root, and masks. Each of
them sees the context at places 0 .. a - 1 and the whole block.

DFlash (Chen et al. 2026, arXiv:2602.06036). Row a + k guesses token a + k. The loss is the cross-entropy with the
answer's tokens, and weighs less with k, since a guess counts only if those before it are right.

DSpark (2026, github.com/deepseek-ai/DeepSpec). Row a + k guesses token a + k + 1, and knows token a + k: what goes into
the head is [the row; w1 of that token], and the head is [the target's; w2]. In training that token is the answer's.
The loss of a guess, with d = sum |draft's probabilities - target's|, which is accepted with probability 1 - d / 2:

    0.1 cross-entropy  +  0.9 d  +  binary cross-entropy of the confidence head with 1 - d / 2
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
FADES = 7.0  # places over which a guess's weight decreases by e, in windows of 14 and more; less in shorter ones
RANK = 256  # of DSpark's Markov head, at most
SHARES = 0.1, 0.9  # of cross-entropy and distance in DSpark's loss
MARKOV, CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"


class DFlash:
    """The draft (`Head`)."""

    first_guess = 1  # of a block's rows

    def __init__(
        self, frozen: Frozen, aux_layers: tuple[int, ...], num_layers: int, block_size: int, mask: int, seed: int = 0
    ) -> None:
        self._frozen, self._aux_layers = frozen, aux_layers
        self._num_layers, self._block_size, self._mask = num_layers, block_size, mask
        self._embedding = frozen.embedding.scaled(1.0)  # rows as they are stored
        self._ahead = torch.arange(block_size, device=frozen.embedding.device)
        self._guessed = self._ahead[self.first_guess :] + 1 - self.first_guess  # places after the root
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
        guessed, weights = roots[..., None] + self._guessed, self._weights()
        counted = guessed < batch.lengths[:, None, None]
        fades = min(FADES, (len(self._guessed) + 1) / 2)
        shares = (torch.exp(-(self._guessed - 1) / fades) * counted)[counted]
        tokens, previous = _at(batch.tokens, guessed), _at(batch.tokens, guessed - 1)
        inputs = self._inputs(weights, self._block_rows(weights, batch, roots), previous)[counted]
        logits = F.linear(inputs, self._head(weights)).float()
        errors = F.cross_entropy(logits, tokens[counted], reduction="none")
        errors = self._errors(weights, errors, inputs, logits, _at(batch.hidden, guessed - 1)[counted])
        return (errors * shares).sum() / shares.sum().clamp(min=1e-6)

    def _errors(self, weights: Weights, errors: Tensor, inputs: Tensor, logits: Tensor, hidden: Tensor) -> Tensor:
        """Of guesses, whose cross-entropies are `errors`; `hidden`: the target's that said the token."""
        return errors

    def _inputs(self, weights: Weights, rows: Tensor, previous: Tensor) -> Tensor:
        """What the head reads of rows that guess, and of the tokens before their guesses."""
        return rows

    def _head(self, weights: Weights) -> Tensor:
        return self._frozen.head

    def _weights(self) -> Weights:
        return Weights(self.tensors, self._embedding.dtype, self._frozen.llama.rms_norm_eps)

    def _drawn_roots(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Tokens of the answers that have one behind them. Shapes: -> [B, N] i64."""
        count = (batch.lengths - 1 - batch.starts).clamp(min=1)
        share = torch.rand(len(count), BLOCKS, generator=random).to(count.device)
        return batch.starts[:, None] + (share * count[:, None]).long()

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        counts = torch.zeros_like(batch.tokens)
        first, last = int(batch.starts.min()), int(batch.lengths.max()) - 1
        weights = self._weights()
        head = self._head(weights)
        for begin in range(first, last, BLOCKS):
            roots = torch.arange(begin, min(begin + BLOCKS, last), device=counts.device).expand(len(counts), -1)
            guessed = roots[..., None] + self._guessed
            # The token before a guess is the one that was guessed, or the guess counts no more.
            previous = _at(batch.tokens, guessed - 1)
            inputs = self._inputs(weights, self._block_rows(weights, batch, roots), previous)
            guesses = chunked_argmax(inputs.flatten(0, 2), head).view_as(guessed)
            is_right = (guesses == _at(batch.tokens, guessed)) & (guessed < batch.lengths[:, None, None])
            counts[:, roots[0]] = is_right.cumprod(2).sum(2)
        return counts

    def _block_rows(self, weights: Weights, batch: Batch, roots: Tensor) -> Tensor:
        """Each block's rows that guess, before the head. Shapes: roots [B, N] -> [B, N, K, H]."""
        size, (count, blocks) = self._block_size, roots.shape
        places = (roots[..., None] + self._ahead).flatten(1)
        tokens = torch.full((count, blocks, size), self._mask, device=roots.device)
        tokens[..., 0] = batch.tokens.gather(1, roots)
        hidden = self._embedding(tokens.flatten(1))
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
        return weights.norm("norm", hidden).view(count, blocks, size, -1)[:, :, self.first_guess :]

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


class DSpark(DFlash):
    """The same with a vanilla Markov head, and a confidence head that reads what the head does."""

    first_guess = 0

    def _begun(self, random: torch.Generator) -> Tensors:
        """The bias is 0 at first, and a guess is as likely accepted as not."""
        size, hidden = self._frozen.target.vocab_size, self._frozen.llama.hidden_size
        rank = min(RANK, hidden)
        return super()._begun(random) | {
            f"{MARKOV}1.weight": torch.randn(size, rank, generator=random) * rank**-0.5,
            f"{MARKOV}2.weight": torch.zeros(size, rank),
            f"{CONFIDENCE}.weight": torch.zeros(1, hidden + rank),
            f"{CONFIDENCE}.bias": torch.zeros(1),
        }

    def config(self) -> dict[str, Any]:
        config, rank = super().config(), self.tensors[f"{MARKOV}1.weight"].shape[1]
        config["dflash_config"] |= {
            "projector_type": "dspark",
            "markov_head_type": "vanilla",
            "markov_rank": rank,
            "enable_confidence_head": True,
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
        }
        return config | {"architectures": ["DSparkDraftModel"]}

    def _inputs(self, weights: Weights, rows: Tensor, previous: Tensor) -> Tensor:
        return torch.cat((rows, F.embedding(previous, weights[f"{MARKOV}1"])), -1)

    def _head(self, weights: Weights) -> Tensor:
        return torch.cat((self._frozen.head, weights[f"{MARKOV}2"]), 1)

    def _errors(self, weights: Weights, errors: Tensor, inputs: Tensor, logits: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            probs = self._frozen.target.head.logits(hidden).float().softmax(-1)
        distance = (logits.softmax(-1) - probs).abs().sum(-1)
        confidence = weights.linear(CONFIDENCE, inputs).squeeze(-1).float() + self.tensors[f"{CONFIDENCE}.bias"]
        doubts = F.binary_cross_entropy_with_logits(confidence, 1 - distance.detach() / 2, reduction="none")
        return SHARES[0] * errors + SHARES[1] * distance + doubts


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Values at these places, at most the last. Shapes: [B, L, ..], [B, N, K] -> [B, N, K, ..]."""
    samples = torch.arange(len(values), device=values.device)[:, None, None]
    return values[samples, places.clamp(max=values.shape[1] - 1)]
