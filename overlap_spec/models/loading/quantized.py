"""Takes linears in 8 or 4 bits from a checkpoint, in the layout of each format.

Layouts of a linear with O rows and I columns, groups of g columns:

    fp8      weight e4m3 [O, I]; weight_scale [], [O, 1], or weight_scale_inv [O / 128, I / 128]
    awq      qweight i32 [I, O / 8], qzeros i32 [I / g, O / 8], scales [I / g, O]; bits in the order of `AWQ_ORDER`
    gptq     qweight i32 [I / 8, O], qzeros i32 [I / g, O / 8], scales [I / g, O]; zero points less 1 in version 1
    packed   weight_packed i32 [O, I / 8], weight_scale [O, I / g], weight_zero_point i32 [O / 8, I / g]
    mxfp4    _blocks u8 [O, I / 32, 16], the first of two columns in the lower bits; _scales u8 [O, I / 32], powers of
             two, each with 127 added; all experts of a layer in one tensor [E, O, ..]

Scales of activations are checked and not used, because activations are not quantised.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from overlap_spec_kernels import ExpertWeight, Packing, QuantizedStack, QuantizedWeight, part_of
from torch import Tensor

from overlap_spec.config.quantization import Granularity, QuantizationScheme, Stored
from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.loading.checkpoint import Shape, Weights
from overlap_spec.models.quantization.linear import (
    Float4Weight,
    LinearForms,
    QuantizedLinear,
    StoredWeight,
    stacked,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of a word hold, lowest bits first
IN_ORDER = tuple(range(8))
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
UNUSED = ("input_scale",)  # of activations
NO_SCALE = 255  # NaN among powers of two

log = logging.getLogger(__name__)


def is_quantized(checkpoint: Weights, names: Iterable[str]) -> bool:
    """Whether the linears, which are one in the model, are stored in fewer bits.

    Raises: CheckpointError if some of them are.
    """
    names = list(names)
    covered = [name for name in names if checkpoint.covers(name)]
    if covered and covered != names:
        kept = next(name for name in names if name not in covered)
        raise CheckpointError(
            f"{checkpoint.origin}: {kept} stays in 16 bits and {covered[0]} does not, but the model multiplies by both"
            " at once: quantise both or neither"
        )
    return bool(covered)


def is_stored_quantized(checkpoint: Weights, name: str) -> bool:
    """Whether a head, which formats leave out without naming it, is stored in fewer bits."""
    scheme = checkpoint.scheme
    return scheme is not None and checkpoint.covers(name) and f"{name}.{scheme.scale}" in checkpoint


def take_quantized(
    checkpoint: Weights, sizes: Mapping[str, int], input_size: int, bias: Tensor | None = None
) -> AnyLinear:
    """Stack linears with the same input. `sizes`: output rows by name.

    Where no kernel multiplies by the format it becomes a matrix of the model's type, and `checkpoint.forms` counts it.
    """
    scheme = checkpoint.scheme
    assert scheme is not None
    parts = [take_stored(checkpoint, scheme, name, (size, input_size)) for name, size in sizes.items()]
    return as_linear(checkpoint, next(iter(sizes)), parts, bias)


def as_linear(checkpoint: Weights, name: str, parts: Sequence[StoredWeight], bias: Tensor | None = None) -> AnyLinear:
    """Weights with the same input, below one another, in the form in which they are kept. `name`: for the log."""
    forms = checkpoint.forms
    if forms.device.type == "meta":
        return _without_values(parts, forms, bias)
    stored = stacked(parts)
    if not forms.keeps(stored):
        if forms.device.type == "cuda" and forms.dequantised == 1:
            log.warning("%s: %s is dequantised while loading, as no kernel multiplies by it", checkpoint.origin, name)
        return make_linear(stored.matrix(forms.dtype), bias)
    return QuantizedLinear(stored.operand(forms.dtype, forms.scratch_for(stored.shape)), bias)


def as_stack(checkpoint: Weights, name: str, experts: Sequence[StoredWeight]) -> ExpertWeight:
    """A weight of every expert as one, in the form in which a GPU keeps it. `name`: for the log."""
    forms, first = checkpoint.forms, experts[0]
    if forms.keeps_stack(first):
        if first.values.is_meta:
            return _stack_without_values(first, len(experts))
        return QuantizedStack.of([each.in_rows() for each in experts])
    if forms.device.type == "cuda" and forms.dequantised == 1:
        log.warning("%s: %s is dequantised while loading, as no kernel multiplies by it", checkpoint.origin, name)
    whole = torch.empty((len(experts), *first.shape), dtype=forms.dtype, device=forms.device)
    for index, stored in enumerate(() if whole.is_meta else experts):
        whole[index] = stored.matrix(forms.dtype)
    return whole


def _stack_without_values(first: StoredWeight, num_experts: int) -> QuantizedStack:
    """As large as such experts are; `_without_values` states why it is made by hand."""
    (rows, columns), part = first.shape, part_of(first.bits, first.group, first.shape[1])
    assert part is not None
    group = part if first.bits == 4 and not first.group else first.group
    sizes = num_experts, columns // group if group else 1
    scales = first.values.new_empty((*sizes, -(-rows // first.scale_rows)), dtype=torch.float32)
    zeros = None if first.zeros is None else first.values.new_empty((*sizes, rows), dtype=torch.float32)
    packing = Packing(scales, zeros, first.bits, part, group, first.scale_rows)
    return QuantizedStack(first.values.new_empty((num_experts, rows, columns * first.bits // 8)), packing)


def _without_values(parts: Sequence[StoredWeight], forms: LinearForms, bias: Tensor | None) -> AnyLinear:
    """A linear of the right size, in the form that it has on the device that `meta` is taken for.

    torch.cat, and what packs bits, would load a compiler for such tensors, which takes seconds.
    """
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    columns, scale_rows = first.shape[1], first.scale_rows
    whole = replace(
        first,
        values=first.values.new_empty((rows, columns)),
        scales=first.scales.new_empty((len(first.scales), -(-rows // scale_rows))),
        zeros=None if first.zeros is None else first.zeros.new_empty((len(first.zeros), rows)),
    )
    part = part_of(first.bits, first.group, columns)
    if part is None or not forms.keeps(whole):
        return make_linear(torch.empty((rows, columns), dtype=forms.dtype, device="meta"), bias)
    data = whole.values.new_empty((rows, columns * first.bits // 8))
    zeros = None if whole.zeros is None else whole.zeros.new_empty(whole.zeros.shape, dtype=torch.bfloat16)
    packing = Packing(whole.scales, zeros, first.bits, part, first.group, scale_rows)
    weight = QuantizedWeight(data, packing, forms.dtype, forms.scratch_for((rows, columns)))
    return QuantizedLinear(weight.in_order_of_device(), bias)


def take_matrix(checkpoint: Weights, name: str, shape: Shape) -> Tensor:
    """A weight as a matrix of the model's type, whatever it is stored in; it is never rounded while loading.

    For the small linears before a draft's layers.
    """
    scheme = checkpoint.scheme
    if scheme is None or scheme.stored is Stored.PLAIN or not is_stored_quantized(checkpoint, name):
        return checkpoint.take(f"{name}.weight", shape)
    rows, columns = shape
    return take_stored(checkpoint, scheme, name, (rows, columns)).matrix(checkpoint.forms.dtype)


def take_stored(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    """One linear's weight. Raises: CheckpointError naming file, tensor, found and expected."""
    checkpoint.skip(*(f"{name}.{unused}" for unused in UNUSED))
    for unused in UNUSED:
        if f"{name}.{unused}" in checkpoint:
            _scales(checkpoint, f"{name}.{unused}", ((), (1,)))
    return READERS[scheme.stored](checkpoint, scheme, name, shape)


def take_stored_experts(checkpoint: Weights, name: str, shape: tuple[int, int, int]) -> list[StoredWeight]:
    """The weights [O, I] of experts that are in one tensor [E, O, I].

    Raises: CheckpointError naming file, tensor, found and expected; or the format, if it has no such tensors.
    """
    scheme = checkpoint.scheme
    assert scheme is not None
    if scheme.stored is not Stored.MXFP4:
        what = f"experts in one tensor are not supported as {scheme.stored.value}"
        raise CheckpointError(f"{checkpoint.origin}: {name}: {what}; expected mxfp4, or 16 bits or more")
    return [_float4(*tensors) for tensors in zip(*_mxfp4_tensors(checkpoint, scheme, name, shape), strict=True)]


def _mxfp4(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    return _float4(*_mxfp4_tensors(checkpoint, scheme, name, shape))


def _mxfp4_tensors(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: Shape) -> tuple[Tensor, Tensor]:
    """Shapes: [.., O, I] -> [.., O, I / 32, 16], [.., O, I / 32]."""
    grouped = (*shape[:-1], _num_groups(checkpoint, scheme, name, shape[-1]))
    blocks = checkpoint.take_stored(f"{name}_blocks", (*grouped, 16), (torch.uint8,))
    scales = checkpoint.take_stored(f"{name}_scales", grouped, (torch.uint8,))
    if not scales.is_meta and (count := int((scales == NO_SCALE).sum())):
        raise _error(
            checkpoint, f"{name}_scales", f"found {count} scales that are NaN, expected finite ones: it is damaged"
        )
    return blocks, scales


def _float4(blocks: Tensor, scales: Tensor) -> StoredWeight:
    """Shapes: blocks [O, groups, 16] u8, scales [O, groups] u8 -> [O, 32 groups]."""
    rows, groups = scales.shape
    if blocks.is_meta:
        return Float4Weight(blocks.new_empty((rows, 32 * groups)), scales.new_empty((groups, rows)), None, 4, 32)
    values = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(rows, 32 * groups)
    exponents = scales.t().int() - 127
    factors = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return Float4Weight(values, factors.contiguous(), None, 4, 32)


def _plain(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    return StoredWeight.rounded(checkpoint.take(f"{name}.weight", shape))


def _float8(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    rows, columns = shape
    data = checkpoint.take_stored(f"{name}.weight", shape, (torch.float8_e4m3fn,)).view(torch.uint8)
    if not data.is_meta and (data & 127 == 127).any():
        raise _error(checkpoint, f"{name}.weight", "found NaN, expected finite values: it is damaged")
    scale = f"{name}.{scheme.scale}"
    if scheme.granularity is Granularity.BLOCK:
        size = scheme.group_size or columns
        scales = _scales(checkpoint, scale, ((-(-rows // size), -(-columns // size)),)).float()
        return StoredWeight(data, scales.t().contiguous(), None, 8, size, scheme.block_rows)
    if scheme.granularity is Granularity.TENSOR:
        scales = _scales(checkpoint, scale, ((), (1,), (1, 1))).reshape(1, 1).expand(1, rows)
    else:
        scales = _scales(checkpoint, scale, ((rows, 1), (rows,))).reshape(1, rows)
    return StoredWeight(data, scales.float().contiguous(), None, 8, 0)


def _awq(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    rows, columns = shape
    groups = _num_groups(checkpoint, scheme, name, columns)
    words = _words(checkpoint, f"{name}.qweight", (columns, rows // 8))
    zeros = _words(checkpoint, f"{name}.qzeros", (groups, rows // 8))
    return StoredWeight(
        _unpacked(words, AWQ_ORDER).t().contiguous(),
        _scales(checkpoint, f"{name}.scales", ((groups, rows),)),
        _unpacked(zeros, AWQ_ORDER),
        4,
        scheme.group_size or 0,
    )


def _gptq(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    rows, columns = shape
    groups = _num_groups(checkpoint, scheme, name, columns)
    _check_order(checkpoint, f"{name}.g_idx", columns, columns // groups)
    words = _words(checkpoint, f"{name}.qweight", (columns // 8, rows))
    zeros = _unpacked(_words(checkpoint, f"{name}.qzeros", (groups, rows // 8)), IN_ORDER) + scheme.zero_offset
    if not zeros.is_meta and (zeros > 15).any():
        found = f"found a zero point of {int(zeros.max())}, expected 0 to 15"
        raise _error(checkpoint, f"{name}.qzeros", f"{found}: is checkpoint_format right?")
    scales = _scales(checkpoint, f"{name}.scales", ((groups, rows),))
    values = _unpacked(words.t().contiguous(), IN_ORDER)
    middle = scheme.symmetric and (zeros.is_meta or bool((zeros == 8).all()))
    return StoredWeight(values, scales, None if middle else zeros, 4, scheme.group_size or 0)


def _packed(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    rows, columns = shape
    groups = _num_groups(checkpoint, scheme, name, columns)
    if f"{name}.weight_shape" in checkpoint:
        found = checkpoint.take_stored(f"{name}.weight_shape", (2,), (torch.int64, torch.int32))
        if not found.is_meta and tuple(found.tolist()) != shape:
            raise _error(checkpoint, f"{name}.weight_shape", f"found {found.tolist()}, expected {list(shape)}")
    if f"{name}.weight_g_idx" in checkpoint:
        _check_order(checkpoint, f"{name}.weight_g_idx", columns, columns // groups)
    words = _words(checkpoint, f"{name}.weight_packed", (rows, columns // 8))
    scales = _scales(checkpoint, f"{name}.weight_scale", ((rows, groups),)).t().contiguous()
    zeros = None
    if not scheme.symmetric:
        stored = _words(checkpoint, f"{name}.weight_zero_point", (rows // 8, groups))
        zeros = _unpacked(stored.t().contiguous(), IN_ORDER)
    return StoredWeight(_unpacked(words, IN_ORDER), scales, zeros, 4, scheme.group_size or 0)


READERS: dict[Stored, Callable[[Weights, QuantizationScheme, str, tuple[int, int]], StoredWeight]] = {
    Stored.FLOAT8: _float8,
    Stored.AWQ: _awq,
    Stored.GPTQ: _gptq,
    Stored.PACKED: _packed,
    Stored.MXFP4: _mxfp4,
    Stored.PLAIN: _plain,
}


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """The eight values of 4 bits in each word; value i is column `order[i]`. Shapes: [n, m] i32 -> [n, 8 m] u8."""
    shifts = torch.tensor([4 * order.index(column) for column in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _words(checkpoint: Weights, name: str, shape: Shape) -> Tensor:
    return checkpoint.take_stored(name, shape, (torch.int32,))


def _scales(checkpoint: Weights, name: str, shapes: tuple[Shape, ...]) -> Tensor:
    """Positive, finite scales of one of these shapes."""
    found = checkpoint.shape(name) if name in checkpoint else shapes[0]
    scales = checkpoint.take_stored(name, found if found in shapes else shapes[0], FLOAT_SCALES)
    if not scales.is_meta and not (usable := (scales > 0) & scales.isfinite()).all():
        bad = float(scales[~usable].flatten()[0])
        count = int((~usable).sum())
        raise _error(checkpoint, name, f"found {count} scales like {bad:g}, expected positive, finite ones")
    return scales


def _num_groups(checkpoint: Weights, scheme: QuantizationScheme, name: str, columns: int) -> int:
    size = scheme.group_size or columns
    if columns % size:
        raise CheckpointError(f"{checkpoint.origin}: {name} has {columns} columns, which are no groups of {size}")
    return columns // size


def _check_order(checkpoint: Weights, name: str, columns: int, size: int) -> None:
    """Groups must be columns side by side."""
    if name not in checkpoint:
        return
    found = checkpoint.take_stored(name, (columns,), (torch.int32, torch.int64))
    if not found.is_meta and not torch.equal(found.long().cpu(), torch.arange(columns) // size):
        raise _error(checkpoint, name, "found columns in another order (act-order), expected groups side by side")


def _error(checkpoint: Weights, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.file_of(name)}: tensor {name}: {what}")
