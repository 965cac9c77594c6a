"""Decoder layers, and the loop over a model's layers that targets and draft heads run.

    residual --> norm --> attention --> + --> norm --> mlp --> + --> residual of the next layer

A linear that adds to the residual also prepares the sum for the next norm (`Normed`), so a layer's result is already
prepared for the next layer's first norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed
from overlap_spec_kernels.norm.norm_heads import UnnormedHeads
from overlap_spec_kernels.norm.silu_mul import mul_by_gates
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.layers.attention import AttentionShape, LayerShape, PagedAttention
from overlap_spec.models.layers.linear import AnyLinear, Linear
from overlap_spec.models.layers.mlp import MLP, GatedMLP
from overlap_spec.models.layers.norm import HeadNormLinear, Norm, RMSNorm
from overlap_spec.models.work import ForwardWork, attention_work, total_work


class Attend(Protocol):
    """One layer's attention in one forward, of T rows, of which the R that are read go on: all, but in a last layer."""

    def __call__(self, qkv: Tensor | UnnormedHeads) -> Tensor:
        """Norm heads that are to be, rotate, store and attend. Shapes: [T, (n + 2 nkv) d] -> [R, n d]."""

    def recurred(self, projected: Tensor, gates: Tensor | None) -> Tensor:
        """See `PagedAttention.recurred`."""

    def kept(self, values: Tensor) -> Tensor:
        """The rows that go on. Shapes: [T, H] -> [R, H]."""

    @property
    def takes(self) -> bool:
        """Whether the layer may overwrite the residual that it reads."""

    @property
    def added(self) -> Tensor | None:
        """What the layer gets of its rows' tokens beside the residual; None: nothing. Shapes: [R, P]."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """`Attend` of one layer in one forward."""

    attention: PagedAttention
    index: int
    rows: RowBatch
    read_before_wait: bool
    takes: bool = False
    of_tokens: Tensor | None = None  # [T, P]

    @property
    def added(self) -> Tensor | None:
        return None if self.of_tokens is None else self.kept(self.of_tokens)

    def __call__(self, qkv: Tensor | UnnormedHeads) -> Tensor:
        return self._found(lambda rows: self.attention(self.index, qkv, rows, self.read_before_wait))

    def recurred(self, projected: Tensor, gates: Tensor | None) -> Tensor:
        return self._found(lambda rows: self.attention.recurred(self.index, projected, gates, rows))

    def _found(self, attend: Callable[[RowBatch], Tensor]) -> Tensor:
        """What the rows that are read find. Of windows all attend, in one launch."""
        read = self.rows.read
        if read is None or not read.of_windows:
            return attend(self.rows)
        return read.of(attend(self.rows.read_whole()))

    def kept(self, values: Tensor) -> Tensor:
        return values if self.rows.read is None else self.rows.read.of(values)


class Projection(Protocol):
    """The linear of queries, keys and values, with whatever norms belong to it."""

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""


class Attention(Protocol):
    """What a layer needs of its attention. It owns its weights and knows its heads."""

    @property
    def shape(self) -> LayerShape:
        """Heads, scale, window and rotation; or the sizes of a state."""

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""

    @property
    def keys_values(self) -> Projection:
        """What gives keys and values, in the last columns of its result. Shapes: [T, H] -> [T, m], m >= 2 nkv d."""

    def __call__(self, x: Normed, attend: Attend) -> Tensor:
        """Shapes: [T, H] -> [R, H]."""

    def add(self, x: Normed, norm: Norm, attend: Attend) -> Normed:
        """The sum with the residual that it reads, and `norm` of it. Shapes: [T, H] -> [R, H]."""


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Attention between two linears."""

    qkv: Projection  # [(n + 2 nkv) d, H]
    output: AnyLinear  # [H, n d]
    shape: AttentionShape

    @property
    def work(self) -> ForwardWork:
        return self.qkv.work + self.output.work + attention_work(self.shape.num_heads, self.shape.head_dim)

    @property
    def keys_values(self) -> Projection:
        """A view of a weight whose rows are contiguous: 16 bits on a GPU.

        Other formats give queries too, which are not used: packed and quantised weights would have to be copied, and
        may not fit their kernels once they are cut; norms of heads are one operation with those of queries.
        """
        queries = self.shape.num_heads * self.shape.head_dim
        return self.qkv.rows(slice(queries, None)) if isinstance(self.qkv, Linear) else self.qkv

    def __call__(self, x: Normed, attend: Attend) -> Tensor:
        return self.output(self.attended(x, attend))

    def add(self, x: Normed, norm: Norm, attend: Attend) -> Normed:
        return norm.join(self.output, self.attended(x, attend), attend.kept(x.values), attend.takes)

    def attended(self, x: Normed, attend: Attend) -> Tensor:
        """What the second linear reads. Shapes: [T, H] -> [R, n d]."""
        return attend(self.qkv.unnormed(x)[1] if isinstance(self.qkv, HeadNormLinear) else self.qkv(x))


@dataclass(frozen=True, slots=True)
class GatedAttention(SelfAttention):
    """What heads find is multiplied, before the second linear, by sigmoids that the row gives, of heads or columns."""

    gate: AnyLinear | None  # [n, H]; None: gates of columns are the first n d of what `qkv` gives

    @property
    def work(self) -> ForwardWork:
        work = self.qkv.work + self.output.work + attention_work(self.shape.num_heads, self.shape.head_dim)
        return work if self.gate is None else work + self.gate.work

    def attended(self, x: Normed, attend: Attend) -> Tensor:
        heads = self.qkv(x)
        if self.gate is None:
            gates, heads = heads.tensor_split([self.shape.num_heads * self.shape.head_dim], dim=1)
            return mul_by_gates(attend(heads), attend.kept(gates))
        return mul_by_gates(attend(heads), attend.kept(self.gate(x)))


@dataclass(frozen=True, slots=True)
class NarrowHeads:
    """The heads of keys and values that a layer's linear gives, where they are fewer or smaller than the cache has.

    A cache holds one size of heads for all layers of a model, and K as large as V. So a head of keys and values is
    stored as often as the layer has fewer of them than the others, and values are filled up with zeros:

        the linear gives    k0 k1        v0 v1          2 heads, where other layers have 4
        the cache has       k0 k0 k1 k1  v0. v0. v1. v1.

    A query finds in its copy what it would find in the one head, and the columns that were filled up are left out of
    what it found.
    """

    num_kv_heads: int  # the cache has a multiple
    value_dim: int  # columns of a value; the cache has as many as a key has
    value_scale: float = 1.0  # factor of values


@dataclass(frozen=True, slots=True)
class NarrowHeadsLinear:
    """`Projection` of a layer with narrow heads."""

    qkv: AnyLinear  # [n d + k (d + dv), H], of k heads
    heads: NarrowHeads
    shape: AttentionShape  # as the cache has it

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return self.qkv.work

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""
        shape, heads, projected = self.shape, self.heads, self.qkv(x)
        dim, values = shape.head_dim, heads.num_kv_heads * heads.value_dim
        keys = heads.num_kv_heads * dim
        q, k, v = projected.split((shape.num_heads * dim, keys, values), dim=1)
        filled = F.pad(v.unflatten(1, (-1, heads.value_dim)) * heads.value_scale, (0, dim - heads.value_dim))
        copies = shape.num_kv_heads // heads.num_kv_heads
        both = torch.stack((k.unflatten(1, (-1, dim)), filled), dim=1)
        return torch.cat((q, both.repeat_interleave(copies, dim=2).flatten(1)), dim=1)


@dataclass(frozen=True, slots=True)
class NarrowAttention(SelfAttention):
    """`Attention` of a layer with narrow heads."""

    value_dim: int  # dv; the second linear is [H, n dv]

    def attended(self, x: Normed, attend: Attend) -> Tensor:
        """Shapes: [T, H] -> [R, n dv]."""
        found = attend(self.qkv(x))
        by_head = found.view(len(found), self.shape.num_heads, -1)
        return by_head[:, :, : self.value_dim].flatten(1)


class DecoderLayer(Protocol):
    """A layer, as `run_layers` calls it."""

    @property
    def input_norm(self) -> Norm: ...

    @property
    def attention(self) -> Attention: ...

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""

    def __call__(self, x: Normed, next_norm: Norm, attend: Attend) -> Normed:
        """Shapes: x [T, H], past `input_norm` -> [R, H], past `next_norm`."""


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """A norm before attention and one before the MLP (Llama)."""

    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP

    @property
    def work(self) -> ForwardWork:
        return total_work(part.work for part in (self.input_norm, self.attention, self.mlp_norm, self.mlp))

    def __call__(self, x: Normed, next_norm: Norm, attend: Attend) -> Normed:
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, SelfAttention) or type(mlp) is not GatedMLP:
            return mlp.add(attention.add(x, self.mlp_norm, attend), next_norm)
        attended, residual = attention.attended(x, attend), attend.kept(x.values)
        if isinstance(self.mlp_norm, RMSNorm) and isinstance(next_norm, RMSNorm):
            linears = mlp.gate_up, mlp.down
            return attention.output.add_mlp(attended, residual, self.mlp_norm, *linears, next_norm, attend.takes)
        return mlp.add(self.mlp_norm.join(attention.output, attended, residual, attend.takes), next_norm)


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """Norms after attention and MLP too, before their results are added (Gemma; OLMo 2 has only these).

    A norm between a linear and the addition prevents their fusion: on a GPU each is a launch of its own.
    """

    input_norm: Norm
    attention: Attention
    attention_norm: Norm
    mlp_norm: Norm
    mlp: MLP
    output_norm: Norm

    @property
    def work(self) -> ForwardWork:
        norms = (self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm)
        return total_work(part.work for part in (*norms, self.attention, self.mlp))

    def __call__(self, x: Normed, next_norm: Norm, attend: Attend) -> Normed:
        x = self.mlp_norm.enter(attend.kept(x.values) + self.attention_norm(self.attention(x, attend)))
        return next_norm.enter(x.values + self.output_norm(self.mlp(x)))


def run_layers(
    x: Normed,
    layers: Sequence[DecoderLayer],
    final_norm: Norm,
    attention: PagedAttention,
    rows: RowBatch,
    *,
    aux_layers: frozenset[int] = frozenset(),
    first: int = 0,
    read_before_wait: bool = False,
    left_out: frozenset[int] = frozenset(),
    added: Tensor | None = None,
) -> tuple[Normed, list[Tensor]]:
    """Run layers one after another. Returns the last one's residual past `final_norm`, and that after each aux layer.

    `first`: place in `attention` of the first one's KV cache. `read_before_wait`: see `PagedAttention`. `left_out`: of
    a forward that skips layers (`layer_run.py`). `added`: what each layer gets of the tokens, [T, L, P].
    Shapes: x [T, H], past the first layer's `input_norm` -> [T, H] ([B, H] with `rows.read`), [T, H] each. Sync: never
    on CUDA.
    """
    aux_hidden: list[Tensor] = []
    rows = attention.placed(rows)
    next_norms = [*(layer.input_norm for layer in layers[1:]), final_norm]
    last, whole = len(layers) - 1, rows.read_whole()
    assert rows.read is None or last not in aux_layers, "an aux hidden state has all rows"
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        if index in left_out:
            continue
        of_layer = rows if index == last else whole
        own = None if added is None else added[:, index]
        takes = index > 0 and index - 1 not in aux_layers  # a result of the layer before, which no draft reads
        x = layer(x, next_norm, LayerAttention(attention, first + index, of_layer, read_before_wait, takes, own))
        if index in aux_layers:
            aux_hidden.append(x.values)
    return x, aux_hidden
