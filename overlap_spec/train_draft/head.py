"""What all drafts in training have (`Head`), and the parts of the target that they read and begin with (`Frozen`).

Legend: B samples, L rows of the longest, n aux layers, H hidden size, V and Vd vocabularies of target and draft.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from overlap_spec_kernels import split_rotated, split_rotated_back
from torch import Tensor

from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.linear import rows_of
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.targets.llama import LlamaConfig, layer_parts

Tensors = dict[str, Tensor]
Measure = Callable[[Tensor], tuple[Tensor, Tensor]]
STD = 0.02  # of weights that are drawn
FC_STD = 0.005  # of those that read hidden states, which are large


@dataclass(frozen=True)
class Batch:
    """Samples with the target's hidden states. Rows at and after a sample's length hold anything finite."""

    tokens: Tensor  # [B, L] i64
    aux: Tensor  # [B, L, n * H]
    hidden: Tensor  # [B, L, H], after the final norm
    lengths: Tensor  # [B] i64
    starts: Tensor  # [B] i64: the first token of the answer

    @cached_property
    def places(self) -> Tensor:
        """Shapes: [L] i64."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def answered(self, ahead: int) -> Tensor:
        """Whether the token so many places after each row is one of the answer. Shapes: [B, L] bool."""
        after = self.places + ahead
        return (after >= self.starts[:, None]) & (after < self.lengths[:, None])

    def ahead(self, count: int) -> Tensor:
        """The token so many places after each row; the last one where there is none. Shapes: [B, L] i64."""
        return self.tokens[:, (self.places + count).clamp(max=self.tokens.shape[1] - 1)]


class Head(ABC):
    """A draft that is trained.

    tensors: its parameters in float32, by the names of its checkpoint
    buffers: what the checkpoint holds beside them
    kept: what a run that goes on must know of it, beside them
    visits: steps on a batch's hidden states, each with other places
    """

    visits = 1

    def __init__(self, frozen: "Frozen", aux_layers: tuple[int, ...], begun: Tensors | int) -> None:
        """`begun`: parameters; or a seed: of the target's layers, and at random."""
        self._frozen, self._aux_layers = frozen, aux_layers
        drawn = self._begun(torch.Generator().manual_seed(begun)) if isinstance(begun, int) else begun
        device = frozen.embedding.device  # steps write in place, so that tensors have memory of their own
        own = {name: each.detach().to(device, torch.float32, copy=True) for name, each in drawn.items()}
        self.tensors = {name: tensor.requires_grad_() for name, tensor in own.items()}
        self.buffers: Tensors = {}
        self.kept: dict[str, Any] = {}

    @abstractmethod
    def _begun(self, random: torch.Generator) -> Tensors: ...

    @abstractmethod
    def places(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Rows that the loss is of. Shapes: -> [n] i64, of B * L."""

    @abstractmethod
    def loss_at(self, batch: Batch, places: Tensor, count: Tensor) -> Tensor:
        """The paper's loss, a mean over what some rows guess: the first `count` of them. Sync: never.

        Shapes: places [n] i64, of B * L, count [] i64 -> [].
        """

    @abstractmethod
    def accepted(self, batch: Batch) -> Tensor:
        """How many guesses are right after each root, greedily. Shapes: [B, L] i64; only the answers' roots count."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""

    def weights(self) -> "Weights":
        """The parameters in the type that it computes in."""
        return Weights(self.tensors, self._frozen.embedding.dtype, self._frozen.llama.rms_norm_eps)

    @staticmethod
    def guesses(rows: Tensor, head: Tensor) -> Tensor:
        """The largest logit of each row, without all logits at once. Shapes: [R, H], head [V, H] -> [R] i64."""
        return torch.cat([(part @ head.T).argmax(-1) for part in rows.split(4096)])


def accept_length(accepted: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int]) -> float:
    """Committed tokens per verify step, bonus included, as the engine would go through these greedy answers.

    The first token of an answer is the prefill's; it is the first root. 0.0 without a step.
    """
    committed = steps = 0
    for row, root, length in zip(accepted, starts, lengths, strict=True):
        while (left := length - 1 - root) > 0:
            run = min(row[root] + 1, left)
            committed, steps, root = committed + run, steps + 1, root + run
    return committed / steps if steps else 0.0


class Frozen:
    """The target's parts that a draft reads, as they are, and rotary tables for so many positions.

    llama: the numbers of a draft layer
    given: a draft's config.json, as far as it is its target's
    cos_sin: [P, d], float32 or wider: cosines, then sines
    """

    def __init__(self, target: LoadedTarget, llama: LlamaConfig, given: dict[str, Any], num_positions: int) -> None:
        self.target, self.llama, self.given, self.embedding = target, llama, given, target.embedding
        self.cos_sin = llama.rope.table(num_positions, self.embedding.dtype, self.embedding.device)

    @cached_property
    def head(self) -> Tensor:
        """The target's head as a matrix. Shapes: [V, H]."""
        return self.target.head.matrix()

    def layer(self, index: int) -> Tensors:
        """A layer's weights in float32 by Llama's names; those that have another form are left out."""
        layers, shapes = getattr(self.target, "layers", ()), layer_sizes(self.llama, self.llama.hidden_size)
        found = {name: rows_of(*place) for name, place in layer_parts(layers[index]).items()} if layers else {}
        fits = {name: each for name, each in found.items() if each.shape == shapes.get(name, each.shape)}
        return {name: each.float().clone() for name, each in fits.items()}

    def begun_layer(self, known: Tensors, input_size: int, random: torch.Generator) -> Tensors:
        """A layer to begin with, whose attention reads rows of this size: with what is known, and others are drawn.

        Known weights are in the last columns where it reads wider rows.
        """
        made: Tensors = {}
        for name, shape in layer_sizes(self.llama, input_size).items():
            weight = known.get(name)
            made[name] = torch.randn(shape, generator=random) * STD if len(shape) > 1 else torch.ones(shape)
            if weight is not None:
                made[name][..., -weight.shape[-1] :] = weight.cpu()
        return made

    @property
    def final_norm(self) -> Tensor:
        """Of another norm than Llama's, ones. Shapes: [H] f32."""
        norm = getattr(self.target, "norm", None)
        return norm.weight.float() if isinstance(norm, RMSNorm) else torch.ones(self.llama.hidden_size)

    def fc(self, num_aux: int, random: torch.Generator) -> Tensor:
        """A linear to begin with that joins aux hidden states: it lets the last one pass. Shapes: [H, n * H]."""
        hidden = self.llama.hidden_size
        drawn = torch.randn(hidden, num_aux * hidden, generator=random) * FC_STD
        drawn[:, -hidden:] += torch.eye(hidden)
        return drawn


def layer_sizes(llama: LlamaConfig, input_size: int) -> dict[str, tuple[int, ...]]:
    """Of the weights of a Llama layer whose attention reads rows of this size."""
    hidden, inner = llama.hidden_size, llama.intermediate_size
    queries, keys = llama.num_heads * llama.head_dim, llama.num_kv_heads * llama.head_dim
    return {
        "self_attn.q_proj.weight": (queries, input_size),
        "self_attn.k_proj.weight": (keys, input_size),
        "self_attn.v_proj.weight": (keys, input_size),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


class Weights:
    """A head's parameters in the type that it computes in; the part of each name before `prefix` left out."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype, eps: float) -> None:
        self._tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self._eps = eps

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Shapes: [.., I] -> [.., O]."""
        return F.linear(x, self[name])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Root-mean-square norm of the last dimension."""
        weight = self[name]
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        """Llama's gated MLP. Shapes: [.., H]."""
        gate, up = (self.linear(f"{prefix}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{prefix}.down_proj", F.silu(gate) * up)


class _RotatedHeads(torch.autograd.Function):
    """`split_rotated`."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos_sin)
        return split_rotated(qkv, cos_sin, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor, None, None, None]:
        return split_rotated_back(of_q, of_k, of_v, *ctx.saved_tensors), None, None, None


rotated: Callable[..., tuple[Tensor, Tensor, Tensor]] = _RotatedHeads.apply


class _GuessLoss(torch.autograd.Function):
    """`guess_loss`. Gradients are computed with it: no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, head: Tensor, trained: Tensor | None, measure: Measure
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(inputs, head)
        loss, told = measure(logits)
        if any(ctx.needs_input_grad):
            of_inputs = logits @ head
            ctx.save_for_backward(of_inputs, None if trained is None else logits.mT @ inputs[:, -trained.shape[1] :])
        ctx.mark_non_differentiable(told)
        ctx.set_materialize_grads(False)  # of what is told there is none
        return loss, told

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        of_inputs, of_trained = (None if each is None else each * grad.to(each.dtype) for each in ctx.saved_tensors)
        return of_inputs, None, of_trained, None


# The loss of guesses, and of each what is told beside it. It is given inputs [R, I], head [V, I], trained [V, r]: the
# head's last columns, which learn, or None; and `measure`, which turns logits [R, V] into the loss [] and what is told
# [R], and leaves the loss's gradient in their place.
guess_loss: Callable[..., tuple[Tensor, Tensor]] = _GuessLoss.apply
