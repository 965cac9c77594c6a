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

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from overlap_spec_kernels import token_losses
from torch import Tensor

from overlap_spec.train_draft.head import Batch, Frozen, Head, Tensors, Weights, guess_loss, rotated

NUM_LAYERS = 5
BLOCKS = 24  # of a sample, in a training step
FADES = 7.0  # places over which a guess's weight decreases by e, in windows of 14 and more; less in shorter ones
RANK = 256  # of DSpark's Markov head, at most
DISTANCE = 0.9  # share of the distance in DSpark's loss; the rest is the cross-entropy's
MARKOV, CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"


class DFlash(Head):
    """The draft, of as many layers as it reads."""

    first_guess = 1  # of a block's rows
    visits = 3  # hidden states of a batch take longer than a step, and have roots for more

    def __init__(
        self, frozen: Frozen, aux_layers: tuple[int, ...], block_size: int, mask: int, begun: Tensors | int = 0
    ) -> None:
        self._num_layers, self._mask = len(aux_layers), mask
        self._embedding = frozen.embedding.scaled(1.0)  # rows as they are stored
        self._ahead = torch.arange(block_size, device=frozen.embedding.device)
        self._guessed = self._ahead[self.first_guess :] + 1 - self.first_guess  # places after the root
        super().__init__(frozen, aux_layers, begun)
        self.kept = {"mask": mask, "block_size": block_size}

    def _begun(self, random: torch.Generator) -> Tensors:
        """The target's last layers, which read its last aux hidden state as their own inputs."""
        llama, count = self._frozen.llama, self._frozen.target.num_layers
        made: Tensors = {}
        for index in range(self._num_layers):
            known = self._frozen.layer(max(count - self._num_layers + index, 0))
            layer = self._frozen.begun_layer(known, llama.hidden_size, random)
            ones = torch.ones(llama.head_dim)
            layer |= {f"self_attn.{part}_norm.weight": _head_norm(known, part) * ones for part in "qk"}
            made |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
        norms = [made[f"layers.{index}.input_layernorm.weight"] for index in range(self._num_layers)]
        made["fc.weight"] = self._frozen.fc(len(self._aux_layers), random)
        made["hidden_norm.weight"], made["norm.weight"] = torch.stack(norms).mean(0), self._frozen.final_norm
        return made

    def config(self) -> dict[str, Any]:
        """With block, mask and the layers that are read."""
        return self._frozen.given | {
            "num_hidden_layers": self._num_layers,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": len(self._ahead),
            "layer_types": ["full_attention"] * self._num_layers,
            "num_target_layers": self._frozen.target.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "dflash_config": {"mask_token_id": self._mask, "target_layer_ids": list(self._aux_layers)},
        }

    def places(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Roots: tokens of the answers that have one behind them, one of each part of an answer."""
        count, blocks = (batch.lengths - 1 - batch.starts).clamp(min=1)[:, None], min(BLOCKS, batch.tokens.shape[1])
        share = (torch.rand(len(count), blocks, generator=random) + torch.arange(blocks)) / blocks
        roots = batch.starts[:, None] + (share.to(count.device) * count).long().minimum(count - 1)
        return (roots + batch.tokens.shape[1] * torch.arange(len(roots), device=roots.device)[:, None]).flatten()

    def loss_at(self, batch: Batch, places: Tensor, count: Tensor) -> Tensor:
        """Of as many roots of each sample, in their order; places behind them are none."""
        samples, length = batch.tokens.shape
        roots = (places[: samples * min(BLOCKS, length)] % length).view(samples, -1)
        guessed, weights = roots[..., None] + self._guessed, self.weights()
        fades = min(FADES, (len(self._guessed) + 1) / 2)
        shares = torch.exp(-(self._guessed - 1) / fades) * (guessed < batch.lengths[:, None, None])
        shares = (shares / shares.sum().clamp(min=1e-6)).flatten()
        inputs = self.inputs(weights, batch, roots, guessed)
        return self._error(weights, inputs, batch, guessed, shares)

    def _error(self, weights: Weights, inputs: Tensor, batch: Batch, guessed: Tensor, shares: Tensor) -> Tensor:
        """Of guesses of tokens at places `guessed`, with their weights. Shapes: inputs [n, I], shares [n] -> []."""
        measure = partial(measure_tokens, _at(batch.tokens, guessed).flatten(), shares, None, 0.0)
        return guess_loss(inputs, self.head(weights), None, measure)[0]

    def head(self, weights: Weights) -> Tensor:
        """Shapes: -> [V, I]."""
        return self._frozen.head

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        counts = torch.zeros_like(batch.tokens)
        first, last = int(batch.starts.min()), int(batch.lengths.max()) - 1
        weights = self.weights()
        head = self.head(weights)
        for begin in range(first, last, BLOCKS):
            roots = torch.arange(begin, min(begin + BLOCKS, last), device=counts.device).expand(len(counts), -1)
            guessed = roots[..., None] + self._guessed
            guesses = self.guesses(self.inputs(weights, batch, roots, guessed), head).view_as(guessed)
            is_right = (guesses == _at(batch.tokens, guessed)) & (guessed < batch.lengths[:, None, None])
            counts[:, roots[0]] = is_right.cumprod(2).sum(2)
        return counts

    def inputs(self, weights: Weights, batch: Batch, roots: Tensor, guessed: Tensor) -> Tensor:
        """What the head reads for guesses of tokens at places `guessed`, in blocks that begin at these roots.

        Shapes: roots [B, N], guessed [B, N, K] -> [B * N * K, I].
        """
        size, (count, blocks) = len(self._ahead), roots.shape
        places = (roots[..., None] + self._ahead).flatten(1)
        tokens = torch.full((count, blocks, size), self._mask, device=roots.device)
        tokens[..., 0] = batch.tokens.gather(1, roots)
        hidden = self._embedding(tokens.flatten(1))
        context = weights.norm("hidden_norm", weights.linear("fc", batch.aux))
        of_block = torch.arange(blocks, device=roots.device).repeat_interleave(size)
        sees_context = batch.places < roots.repeat_interleave(size, 1)[..., None]
        sees_block = (of_block == of_block[:, None]).expand(count, -1, -1)
        visible = torch.cat((sees_context, sees_block), 2)[:, None]
        hidden_from = torch.zeros_like(visible, dtype=hidden.dtype).masked_fill(~visible, -torch.inf)
        of_rows = self._frozen.cos_sin[places]
        of_both = torch.cat((self._frozen.cos_sin[batch.places].expand(count, -1, -1), of_rows), 1)
        for index in range(self._num_layers):
            name = f"layers.{index}"
            x = weights.norm(f"{name}.input_layernorm", hidden)
            q = _turned(weights, f"{name}.self_attn.q", weights.linear(f"{name}.self_attn.q_proj", x), of_rows)
            k, v = (
                torch.cat([weights.linear(f"{name}.self_attn.{part}_proj", rows) for rows in (context, x)], 1)
                for part in "kv"
            )
            k, v = _turned(weights, f"{name}.self_attn.k", k, of_both), v.unflatten(2, (-1, q.shape[3]))
            found = _attended(q, k, v, hidden_from)
            hidden = hidden + weights.linear(f"{name}.self_attn.o_proj", found.flatten(2))
            hidden = hidden + weights.mlp(f"{name}.mlp", weights.norm(f"{name}.post_attention_layernorm", hidden))
        rows = weights.norm("norm", hidden).view(count, blocks, size, -1)
        return rows[:, :, self.first_guess :].flatten(0, 2)


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

    def inputs(self, weights: Weights, batch: Batch, roots: Tensor, guessed: Tensor) -> Tensor:
        """The token before a guess is the one that was guessed, or the guess counts no more."""
        previous, rows = _at(batch.tokens, guessed - 1).flatten(), super().inputs(weights, batch, roots, guessed)
        # Of the parameter itself: its gradient is summed in float32.
        known = self.tensors[f"{MARKOV}1.weight"].index_select(0, previous)
        return torch.cat((rows, known.to(rows.dtype)), -1)

    def head(self, weights: Weights) -> Tensor:
        return torch.cat((self._frozen.head, weights[f"{MARKOV}2"].detach()), 1)

    def _error(self, weights: Weights, inputs: Tensor, batch: Batch, guessed: Tensor, shares: Tensor) -> Tensor:
        with torch.no_grad():  # of the hidden state that said the token
            target = self._frozen.target.head.logits(_at(batch.hidden, guessed - 1).flatten(0, 2)).contiguous()
        measure = partial(measure_tokens, _at(batch.tokens, guessed).flatten(), shares, target, DISTANCE)
        loss, distances = guess_loss(inputs, self.head(weights), weights[f"{MARKOV}2"], measure)
        confidence = weights.linear(CONFIDENCE, inputs).squeeze(-1).float() + self.tensors[f"{CONFIDENCE}.bias"]
        doubts = F.binary_cross_entropy_with_logits(confidence, 1 - distances / 2, reduction="none")
        return loss + (doubts * shares).sum()


def measure_tokens(
    tokens: Tensor, shares: Tensor, target: Tensor | None, share: float, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses of guesses, and their distances (`guess_loss`). `share`: the distance's, of each loss.

    Shapes: tokens [R], shares [R] f32, target [R, V] or None, logits [R, V] -> [] f32, [R] f32.
    """
    errors, distances = token_losses(logits, tokens, shares, target, share)
    return (((1 - share) * errors + share * distances) * shares).sum(), distances


def _head_norm(known: Tensors, part: str) -> Tensor:
    """The target's; else what leaves heads as large as its projection makes them of rows that are drawn."""
    if (norm := known.get(f"self_attn.{part}_norm.weight")) is not None:
        return norm.cpu()
    if (weight := known.get(f"self_attn.{part}_proj.weight")) is None:
        return torch.ones(1)
    return (weight * known.get("input_layernorm.weight", 1)).square().sum(1).mean().sqrt().view(1).cpu()


def _turned(weights: Weights, name: str, x: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads with their norm and rotated. Shapes: x [B, T, h * d], cos_sin [B, T, d] -> [B, T, h, d]."""
    dim = cos_sin.shape[2]
    heads = weights.norm(f"{name}_norm", x.unflatten(2, (-1, dim)))
    turned, _, _ = rotated(heads.view(1, -1, x.shape[2]), cos_sin.flatten(0, 1), heads.shape[2], 0)
    return turned.view_as(heads)


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden_from: Tensor) -> Tensor:
    """Shapes: q [B, T, h, d], k and v [B, T', g, d], hidden_from [B, 1, T, T']: 0, or -inf -> [B, T, h, d]."""
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for each in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=hidden_from).transpose(1, 2)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Values at these places, at most the last. Shapes: [B, L, ..], [B, N, K] -> [B, N, K, ..]."""
    samples = torch.arange(len(values), device=values.device)[:, None, None]
    return values[samples, places.clamp(max=values.shape[1] - 1)]
