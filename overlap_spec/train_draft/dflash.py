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
from overlap_spec_kernels import token_losses
from torch import Tensor

from overlap_spec.train_draft.head import (
    FC_STD,
    Batch,
    Frozen,
    RotatedHeads,
    Tensors,
    Weights,
    as_parameters,
    begun_layer,
    chunked_argmax,
)
from overlap_spec.train_draft.state import dflash_config

NUM_LAYERS = 5
BLOCKS = 24  # of a sample, in a training step
VISITS = 3  # hidden states of a batch take longer than a step, and have roots for more
FADES = 7.0  # places over which a guess's weight decreases by e, in windows of 14 and more; less in shorter ones
RANK = 256  # of DSpark's Markov head, at most
DISTANCE = 0.9  # share of the distance in DSpark's loss; the rest is the cross-entropy's
MARKOV, CONFIDENCE = "markov_head.markov_w", "confidence_head.proj"


class DFlash:
    """The draft (`Head`)."""

    first_guess = 1  # of a block's rows
    visits = VISITS

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
        """The target's last layers, which read its last aux hidden state as their own inputs."""
        llama, hidden = self._frozen.llama, self._frozen.llama.hidden_size
        made: Tensors = {}
        count = self._frozen.target.num_layers
        for index in range(self._num_layers):
            known = self._frozen.layer(max(count - self._num_layers + index, 0))
            layer = begun_layer(llama, hidden, known, random)
            made |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
            sizes = {part: _head_norm(known, part) * torch.ones(llama.head_dim) for part in "qk"}
            made |= {f"layers.{index}.self_attn.{part}_norm.weight": size for part, size in sizes.items()}
        fc = torch.randn(hidden, len(self._aux_layers) * hidden, generator=random) * FC_STD
        fc[:, -hidden:] += torch.eye(hidden)
        norms = [made[f"layers.{index}.input_layernorm.weight"] for index in range(self._num_layers)]
        made["fc.weight"], made["hidden_norm.weight"] = fc, torch.stack(norms).mean(0)
        made["norm.weight"] = self._frozen.final_norm.cpu()
        return made

    def config(self) -> dict[str, Any]:
        return dflash_config(self._frozen, self._aux_layers, self._num_layers, self._block_size, self._mask)

    def buffers(self) -> Tensors:
        return {}

    def kept(self) -> dict[str, Any]:
        return {"mask": self._mask, "block_size": self._block_size}

    def loss(self, batch: Batch, random: torch.Generator) -> Tensor:
        return self.loss_at(batch, self.places(batch, random))

    def places(self, batch: Batch, random: torch.Generator) -> Tensor:
        roots, (count, length) = self._drawn_roots(batch, random), batch.tokens.shape
        return (roots + length * torch.arange(count, device=roots.device)[:, None]).flatten()

    def loss_at(self, batch: Batch, places: Tensor, count: Tensor | None = None) -> Tensor:
        """Of as many roots of each sample, in their order; places behind them are none. Sync: never."""
        samples, length = batch.tokens.shape
        roots = (places[: samples * _num_blocks(batch)] % length).view(samples, -1)
        guessed, weights = roots[..., None] + self._guessed, self._weights()
        fades = min(FADES, (len(self._guessed) + 1) / 2)
        shares = torch.exp(-(self._guessed - 1) / fades) * (guessed < batch.lengths[:, None, None])
        shares = (shares / shares.sum().clamp(min=1e-6)).flatten()
        previous = _at(batch.tokens, guessed - 1)
        inputs = self._inputs(weights, self._block_rows(weights, batch, roots), previous).flatten(0, 2)
        return self._error(weights, inputs, batch, guessed, shares)

    def _error(self, weights: Weights, inputs: Tensor, batch: Batch, guessed: Tensor, shares: Tensor) -> Tensor:
        """Of guesses of tokens at places `guessed`, with their weights. Shapes: inputs [n, I], shares [n] -> []."""
        tokens = _at(batch.tokens, guessed).flatten()
        loss: Tensor = _GuessLoss.apply(inputs, None, self._head(weights), tokens, shares, None, 0.0)[0]  # type: ignore[no-untyped-call]  # autograd's
        return loss

    def _inputs(self, weights: Weights, rows: Tensor, previous: Tensor) -> Tensor:
        """What the head reads of rows that guess, and of the tokens before their guesses."""
        return rows

    def _head(self, weights: Weights) -> Tensor:
        return self._frozen.head

    def _weights(self) -> Weights:
        return Weights(self.tensors, self._embedding.dtype, self._frozen.llama.rms_norm_eps)

    def _drawn_roots(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Tokens of the answers that have one behind them: one of each part of an answer. Shapes: -> [B, N] i64."""
        count, blocks = (batch.lengths - 1 - batch.starts).clamp(min=1)[:, None], _num_blocks(batch)
        share = (torch.rand(len(count), blocks, generator=random) + torch.arange(blocks)) / blocks
        return batch.starts[:, None] + (share.to(count.device) * count).long().minimum(count - 1)

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
        return weights.norm("norm", hidden).view(count, blocks, size, -1)[:, :, self.first_guess :]


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
        # Of the parameter itself: its gradient is summed in float32.
        known = self.tensors[f"{MARKOV}1.weight"].index_select(0, previous.flatten())
        return torch.cat((rows, known.to(rows.dtype).view(*previous.shape, -1)), -1)

    def _head(self, weights: Weights) -> Tensor:
        return torch.cat((self._frozen.head, weights[f"{MARKOV}2"].detach()), 1)

    def _error(self, weights: Weights, inputs: Tensor, batch: Batch, guessed: Tensor, shares: Tensor) -> Tensor:
        tokens = _at(batch.tokens, guessed).flatten()
        with torch.no_grad():  # of the hidden state that said the token
            target = self._frozen.target.head.logits(_at(batch.hidden, guessed - 1).flatten(0, 2)).contiguous()
        given = weights[f"{MARKOV}2"], self._head(weights), tokens, shares, target, DISTANCE
        loss, distances = _GuessLoss.apply(inputs, *given)  # type: ignore[no-untyped-call]  # autograd's
        confidence = weights.linear(CONFIDENCE, inputs).squeeze(-1).float() + self.tensors[f"{CONFIDENCE}.bias"]
        doubts = F.binary_cross_entropy_with_logits(confidence, 1 - distances / 2, reduction="none")
        whole: Tensor = loss + (doubts * shares).sum()
        return whole


class _GuessLoss(torch.autograd.Function):
    """Sum of the guesses' losses, and their distances. Gradients are computed with it: no logits are kept.

    Shapes: inputs [R, I], bias [V, r] or None: the last columns of head [V, I], tokens [R], shares [R] f32,
    target [R, V] or None -> [] f32, [R] f32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        bias: Tensor | None,
        head: Tensor,
        tokens: Tensor,
        shares: Tensor,
        target: Tensor | None,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(inputs, head)
        errors, distances = token_losses(logits, tokens, shares, target, share)
        if any(ctx.needs_input_grad):
            of_bias = None if bias is None else logits.mT @ inputs[:, -bias.shape[1] :]
            ctx.save_for_backward(logits @ head, of_bias)
        ctx.mark_non_differentiable(distances)
        return (((1 - share) * errors + share * distances) * shares).sum(), distances

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs, of_bias = (None if each is None else each * grad.to(each.dtype) for each in ctx.saved_tensors)
        return of_inputs, of_bias, None, None, None, None, None


def _head_norm(known: Tensors, part: str) -> Tensor:
    """The target's; else what leaves heads as large as its projection makes them of rows that are drawn."""
    if (norm := known.get(f"self_attn.{part}_norm.weight")) is not None:
        return norm.cpu()
    if (weight := known.get(f"self_attn.{part}_proj.weight")) is None:
        return torch.ones(1)
    return (weight * known["input_layernorm.weight"]).square().sum(1).mean().sqrt().view(1).cpu()


def _num_blocks(batch: Batch) -> int:
    """Of each sample."""
    return min(BLOCKS, batch.tokens.shape[1])


def _turned(weights: Weights, name: str, x: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads with their norm and rotated. Shapes: x [B, T, h * d], cos_sin [B, T, d] -> [B, T, h, d]."""
    dim = cos_sin.shape[2]
    heads = weights.norm(f"{name}_norm", x.unflatten(2, (-1, dim)))
    given = heads.view(1, -1, x.shape[2]), cos_sin.flatten(0, 1), heads.shape[2], 0
    turned: Tensor = RotatedHeads.apply(*given)[0]  # type: ignore[no-untyped-call]  # autograd's
    return turned.view_as(heads)


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden_from: Tensor) -> Tensor:
    """Shapes: q [B, T, h, d], k and v [B, T', g, d], hidden_from [B, 1, T, T']: 0, or -inf -> [B, T, h, d]."""
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for each in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=hidden_from).transpose(1, 2)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Values at these places, at most the last. Shapes: [B, L, ..], [B, N, K] -> [B, N, K, ..]."""
    samples = torch.arange(len(values), device=values.device)[:, None, None]
    return values[samples, places.clamp(max=values.shape[1] - 1)]
