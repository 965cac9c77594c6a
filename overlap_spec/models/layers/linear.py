"""Linears over flattened rows.

A linear includes its neighbours in a layer, because on a GPU they are one kernel: `gated` is the first half of an MLP;
`add` adds to the residual and prepares the sum for the next norm.

Linears hold loaded tensors and are called with [T, ...] rows; there is no module tree and no autograd.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import (
    DenseWeight,
    LinearOperand,
    Norm,
    Normed,
    add_rms_norm,
    fused_linear,
    largest_columns,
    linear_add,
    linear_argmax,
    linear_beside,
    linear_logits,
    normalised,
    silu_mul,
)
from torch import Tensor

from overlap_spec.models.work import ForwardWork, product_work

FEW_ROWS = 4  # fewer rows are padded to this many, because they would take longer


class AnyLinear(ABC):
    """A linear, `x @ weight.T + bias`. It owns its weight: callers use only the methods below, for every format.

    A subclass must implement the product. The defaults of `gated`, `add` and `argmax` run a product and then separate
    operations; a subclass overrides them where it has a fused kernel.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def out_features(self) -> int:
        """Columns O of the result."""

    @property
    @abstractmethod
    def in_features(self) -> int:
        """Columns I of the rows that it reads."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of weight and bias, which each forward reads."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The weight's device."""

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """Type of the rows that it reads and writes."""

    @property
    def work(self) -> ForwardWork:
        """The bytes that it reads and its operations, from its shape."""
        return product_work(self.num_bytes, self.out_features * self.in_features)

    @abstractmethod
    def rows(self, ids: Tensor | slice) -> "AnyLinear":
        """The linear for only these columns of the result: a view for a slice, a copy for [N] i64 (FR-Spec)."""

    @abstractmethod
    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """The weight, whatever its format: what the linear gives for unit vectors, without its bias. Shapes: [O, I]."""
        unit = torch.eye(self.in_features, dtype=self.compute_dtype, device=self.device)
        return (self(unit) - self(torch.zeros_like(unit[:1]))).T.contiguous()

    def beside(self, x: Normed, other: "AnyLinear") -> tuple[Tensor, Tensor]:
        """What this linear and another one give. Shapes: [T, I] -> [T, O], [T, P]."""
        found = other(x)  # first: this one's weight comes meanwhile
        return self(x), found

    def gated(self, x: Normed) -> Tensor:
        """silu(first half) * second half. Shapes: [T, I] -> [T, O / 2]."""
        return silu_mul(self(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        """The sum with the residual, on its way into `norm`. Shapes: x [T, I], residual [T, O].

        `take`: nothing else reads the residual, so the sum may be written over it.
        """
        rows, values = add_rms_norm(self(x), residual, norm.weight, norm.eps)
        return Normed(values, rows)

    def add_mlp(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        gate_up: "AnyLinear",
        down: "AnyLinear",
        next_norm: Norm,
        take: bool = False,
    ) -> Normed:
        """`add`, and then the sum with what a gated MLP makes of it. Shapes: x [T, I], residual [T, O] -> [T, O]."""
        middle = self.add(x, residual, norm, take)
        return down.add(gate_up.gated(middle), middle.values, next_norm, take=True)

    def logits(self, x: Tensor | Normed) -> Tensor:
        """Logits of a head, unrounded: in 16 bits many would be equal. Shapes: -> [T, O], float32 or wider."""
        y = self(x)
        return y.float() if y.element_size() == 2 else y

    def argmax(self, x: Tensor | Normed, ids: Tensor | None = None) -> Tensor:
        """The column of each row's largest logit, mapped through `ids` if given. Shapes: ids [O] i64 -> [T] i64.

        `NO_TOKEN` where that is not finite, or some id of `ids`.
        """
        return largest_columns(self.logits(x), ids)


class FusedLinear(AnyLinear):
    """`x @ W.T + bias` of an operand; its neighbours are fused with it unless a bias is added between."""

    __slots__ = ()

    bias: Tensor | None  # [O]

    @property
    @abstractmethod
    def operand(self) -> LinearOperand:
        """W [O, I]."""

    @property
    def bias_after(self) -> Tensor | None:
        """The bias, if the operand's kernels do not add it. Shapes: -> [O]."""
        return self.bias

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self._biased(fused_linear(x, self.operand))

    def beside(self, x: Normed, other: AnyLinear) -> tuple[Tensor, Tensor]:
        if isinstance(other, FusedLinear | Linear) and self.bias is None and other.bias is None:
            return linear_beside(x, self.operand, other.operand)
        return AnyLinear.beside(self, x, other)

    def gated(self, x: Normed) -> Tensor:
        return fused_linear(x, self.operand, gated=True) if self.bias_after is None else AnyLinear.gated(self, x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        if self.bias_after is None:
            return linear_add(x, self.operand, residual, norm, take)
        return AnyLinear.add(self, x, residual, norm)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._biased(linear_logits(x, self.operand))

    def argmax(self, x: Tensor | Normed, ids: Tensor | None = None) -> Tensor:
        return linear_argmax(x, self.operand, ids) if self.bias_after is None else AnyLinear.argmax(self, x, ids)

    def _biased(self, y: Tensor) -> Tensor:
        return y if self.bias_after is None else y.add_(self.bias_after)


@dataclass(frozen=True, slots=True)
class WrappedHead(AnyLinear):
    """A head whose logits become others."""

    head: AnyLinear

    @property
    def out_features(self) -> int:
        return self.head.out_features

    @property
    def in_features(self) -> int:
        return self.head.in_features

    @property
    def num_bytes(self) -> int:
        return self.head.num_bytes

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.head.compute_dtype

    @property
    def work(self) -> ForwardWork:
        return self.head.work

    def matrix(self) -> Tensor:
        return self.head.matrix()

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self._changed(self.head(x))

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._changed(self.head.logits(x))

    @abstractmethod
    def _changed(self, logits: Tensor) -> Tensor:
        """Shapes: those of `head` -> [T, O]."""


@dataclass(frozen=True, slots=True)
class DividedLogits(WrappedHead):
    """A head whose logits are divided by a number."""

    divisor: float

    def rows(self, ids: Tensor | slice) -> AnyLinear:
        return DividedLogits(self.head.rows(ids), self.divisor)

    def _changed(self, logits: Tensor) -> Tensor:
        return logits / self.divisor


@dataclass(frozen=True, slots=True)
class DenseLinear(AnyLinear):
    """A linear whose weight is a matrix of the model's own type, in some layout."""

    stored: Tensor  # [O, I], the weight in its layout
    bias: Tensor | None  # [O]

    @property
    def out_features(self) -> int:
        return self.stored.shape[0]

    @property
    def in_features(self) -> int:
        return self.stored.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.stored.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def device(self) -> torch.device:
        return self.stored.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def work(self) -> ForwardWork:
        num_biases = 0 if self.bias is None else self.out_features
        return product_work(self.num_bytes, self.out_features * self.in_features + num_biases)

    def matrix(self) -> Tensor:
        """The weight as contiguous rows, copied from any other layout. Shapes: -> [O, I]."""
        return self.stored if self.stored.layout is torch.strided else self.stored.to_dense()

    def rows(self, ids: Tensor | slice) -> AnyLinear:
        return Linear(self.matrix()[ids], None if self.bias is None else self.bias[ids])


@dataclass(frozen=True, slots=True)
class Linear(DenseLinear):
    """A linear whose weight has contiguous rows. Other rows of x change a row's result by rounding only."""

    bias: Tensor | None = None  # [O]

    @property
    def operand(self) -> DenseWeight:
        return DenseWeight(self.stored, self.bias)

    @property
    def fused(self) -> bool:
        """Whether a kernel fuses the linear with its neighbours."""
        return self.stored.is_cuda

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return fused_linear(x, self.operand) if self.fused else self._alone(normalised(x))

    def gated(self, x: Normed) -> Tensor:
        return fused_linear(x, self.operand, gated=True) if self.fused else DenseLinear.gated(self, x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        if self.fused:
            return linear_add(x, self.operand, residual, norm, take)
        return DenseLinear.add(self, x, residual, norm)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return linear_logits(x, self.operand) if self.fused else DenseLinear.logits(self, x)

    def argmax(self, x: Tensor | Normed, ids: Tensor | None = None) -> Tensor:
        return linear_argmax(x, self.operand, ids) if self.fused else DenseLinear.argmax(self, x, ids)

    def _alone(self, x: Tensor) -> Tensor:
        """The product alone. For few rows a CPU's BLAS is fastest with `weight @ x.T`, `x @ weight.T` runs at half."""
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return F.linear(x, self.stored, self.bias)
        return linear_columns(x, self.stored, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear(DenseLinear):
    """A linear in float32 for a CPU, with its weight only in the layout that oneDNN prefers."""

    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return linear_packed(normalised(x), self.stored, self.bias, FEW_ROWS)


def rows_of(part: AnyLinear | Tensor, rows: slice = slice(None)) -> Tensor:
    """Of a linear's weight, or of a norm's. Of a weight with contiguous rows it is a view."""
    return (part.matrix() if isinstance(part, AnyLinear) else part)[rows]


def linear_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`weight @ x.T`; one row is a matrix-vector product, slow in either form, so it is computed twice."""
    columns = (x.expand(2, -1) if x.shape[0] == 1 else x).contiguous().t()
    y = (weight @ columns).t()[: x.shape[0]].contiguous()
    return y if bias is None else y.add_(bias)


def linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None, least_rows: int = 1) -> Tensor:
    """Multiply by a weight in oneDNN's layout; x is padded to at least `least_rows` rows."""
    num_rows = x.shape[0]
    if num_rows < least_rows:
        x = F.pad(x, (0, 0, 0, least_rows - num_rows))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return y if y.shape[0] == num_rows else y[:num_rows]


def make_linear(weight: Tensor, bias: Tensor | None = None) -> AnyLinear:
    """The form that is fastest where the weight is. Shapes: weight [O, I], bias [O].

    Two cores of an AMD EPYC, float32, the four linears of SmolLM2's 30 layers (425 MB), ms a pass; a busy host, so only
    the ratios count (benchmarks/cpu_linear.py, results/linear_cpu.json):

        rows               1     2     4     6    16    64
        weight @ x.T    33.1  39.5  33.7  64.2  58.7   135
        packed          31.6  30.5  26.9  29.7  30.6    80
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS), bias)
    return Linear(weight, bias)


@dataclass(frozen=True, slots=True)
class HeadLogits:
    """`LazyLogits` of a head: a caller that only wants the argmax does not compute all logits."""

    head: AnyLinear  # [V, H]
    rows: Tensor | Normed  # [R, H]

    def compute(self) -> Tensor:
        """Shapes: -> [R, V], float32 or wider."""
        return self.head.logits(self.rows)

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """The column of each row's largest logit, mapped through `ids` if given. Shapes: ids [V] i64 -> [R] i64."""
        return self.head.argmax(self.rows, ids)
