"""What a method gives the training loop, and the parts of the target that a draft reads.

Legend: B samples, L rows of the longest, n aux layers, H hidden size, V and Vd vocabularies of target and draft.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from overlap_spec_kernels import split_rotated, split_rotated_back
from torch import Tensor

from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import SelfAttention
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.linear import AnyLinear, WrappedHead
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import HeadNormLinear, RMSNorm
from overlap_spec.models.targets.llama import LlamaConfig

Tensors = dict[str, Tensor]
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


class Head(Protocol):
    """A draft that is trained. `tensors`: its parameters in float32, by the names of its checkpoint.

    `visits`: steps on a batch's hidden states, each with other places.
    """

    tensors: Tensors
    visits: int

    def loss(self, batch: Batch, random: torch.Generator) -> Tensor:
        """The paper's loss, a mean over what is guessed. Shapes: -> []."""

    def places(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Rows that the loss is of. Shapes: -> [n] i64, of B * L."""

    def loss_at(self, batch: Batch, places: Tensor, count: Tensor | None = None) -> Tensor:
        """The loss of some rows, or of the first `count`. Shapes: places [n] i64, count [] i64 -> []. Sync: never."""

    def accepted(self, batch: Batch) -> Tensor:
        """How many guesses are right after each root, greedily. Shapes: [B, L] i64; only the answers' roots count."""

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""

    def buffers(self) -> Tensors:
        """What the checkpoint holds beside parameters."""

    def kept(self) -> dict[str, Any]:
        """What a run that goes on must know of it, beside parameters."""


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


@dataclass(frozen=True)
class Frozen:
    """The target's parts that a draft reads, as they are. `llama`: the numbers of a draft layer."""

    target: LoadedTarget
    llama: LlamaConfig
    given: Mapping[str, Any]  # of the target's config.json, what a draft's has too
    cos_sin: Tensor  # [P, d], float32 or wider: cosines, then sines

    @classmethod
    def of(cls, target: LoadedTarget, llama: LlamaConfig, given: Mapping[str, Any], num_positions: int) -> "Frozen":
        """With rotary tables for so many positions."""
        like = target.embedding
        return cls(target, llama, given, llama.rope.table(num_positions, like.dtype, like.device))

    @property
    def embedding(self) -> Embedding:
        return self.target.embedding

    @cached_property
    def head(self) -> Tensor:
        """The target's head as a matrix. Shapes: [V, H]."""
        return dense(self.target.head)

    def layer(self, index: int) -> Tensors:
        """A layer's weights in float32 by Llama's names; those that have another form are left out."""
        layers = getattr(self.target, "layers", ())
        return _weights_of(layers[index], self.llama) if layers else {}

    @property
    def final_norm(self) -> Tensor:
        """Shapes: [H] f32."""
        return _norm_weight(getattr(self.target, "norm", None), self.llama.hidden_size)


@torch.no_grad()
def dense(linear: AnyLinear) -> Tensor:
    """The weight of a linear of any format, without its bias: what it gives for the unit vectors. Shapes: [O, I].

    Of a head whose logits become others, before they do.
    """
    while isinstance(linear, WrappedHead):
        linear = linear.head
    unit = torch.eye(linear.in_features, dtype=linear.compute_dtype, device=linear.device)
    rows = linear(unit) - linear(torch.zeros_like(unit[:1]))
    return rows.T.contiguous()


def _weights_of(layer: Any, llama: LlamaConfig) -> Tensors:
    found: Tensors = {}
    attention, mlp = layer.attention, getattr(layer, "mlp", None)
    queries, keys = llama.num_heads * llama.head_dim, llama.num_kv_heads * llama.head_dim
    if isinstance(attention, SelfAttention):
        qkv = attention.qkv.qkv if isinstance(attention.qkv, HeadNormLinear) else attention.qkv
        if isinstance(qkv, AnyLinear) and qkv.out_features == queries + 2 * keys:
            parts = dense(qkv).split((queries, keys, keys))
            found |= {f"self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
            found["self_attn.o_proj.weight"] = dense(attention.output)
            if isinstance(attention.qkv, HeadNormLinear):
                norms = attention.qkv.query, attention.qkv.key
                found |= {f"self_attn.{name}_norm.weight": norm for name, norm in zip("qk", norms, strict=True)}
    if isinstance(mlp, GatedMLP) and mlp.down.in_features == llama.intermediate_size:
        found["mlp.gate_proj.weight"], found["mlp.up_proj.weight"] = dense(mlp.gate_up).chunk(2)
        found["mlp.down_proj.weight"] = dense(mlp.down)
    found["input_layernorm.weight"] = _norm_weight(layer.input_norm, llama.hidden_size)
    found["post_attention_layernorm.weight"] = _norm_weight(getattr(layer, "mlp_norm", None), llama.hidden_size)
    return {name: tensor.float().clone() for name, tensor in found.items()}


def _norm_weight(norm: Any, size: int) -> Tensor:
    """Of another norm than Llama's, ones."""
    weight: Tensor = norm.weight if isinstance(norm, RMSNorm) else torch.ones(size)
    return weight.float()


def layer_shapes(llama: LlamaConfig, input_size: int) -> dict[str, tuple[int, ...]]:
    """Weights of a Llama layer whose attention reads rows of this size."""
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


def begun_layer(llama: LlamaConfig, input_size: int, known: Tensors, random: torch.Generator) -> Tensors:
    """A layer to begin with: the target's weights, in the last columns where it reads wider rows; others are drawn."""
    made: Tensors = {}
    for name, shape in layer_shapes(llama, input_size).items():
        if len(shape) == 1:
            made[name] = known.get(name, torch.ones(shape)).cpu()
            continue
        made[name] = torch.randn(shape, generator=random) * STD
        if (weight := known.get(name)) is not None:
            made[name][:, -weight.shape[1] :] = weight.cpu()
    return made


def as_parameters(tensors: Tensors, device: torch.device) -> Tensors:
    """Leaves that gradients are of, in float32, and in memory of their own: they are written in place."""
    return {name: each.detach().to(device, torch.float32, copy=True).requires_grad_() for name, each in tensors.items()}


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


def in_heads(x: Tensor, head_dim: int) -> Tensor:
    """Shapes: [B, T, h * d] -> [B, h, T, d]."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


class RotatedHeads(torch.autograd.Function):
    """`split_rotated`."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos_sin)
        return split_rotated(qkv, cos_sin, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor, None, None, None]:
        return split_rotated_back(of_q, of_k, of_v, *ctx.saved_tensors), None, None, None


def chunked_argmax(rows: Tensor, head: Tensor, size: int = 4096) -> Tensor:
    """The largest logit of each row, without all logits at once. Shapes: rows [R, H], head [V, H] -> [R] i64."""
    return torch.cat([(part @ head.T).argmax(-1) for part in rows.split(size)])


def total(values: Iterable[Tensor]) -> Tensor:
    """Their sum."""
    return torch.stack(list(values)).sum()
