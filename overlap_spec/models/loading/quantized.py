"""Takes linears in 8 or 4 bits from a checkpoint, in the layout of each format.

Layouts of a linear with O rows and I columns, groups of g columns:

    fp8      weight e4m3 [O, I]; weight_scale [], [O, 1], or weight_scale_inv [O / 128, I / 128]
    awq      qweight i32 [I, O / 8], qzeros i32 [I / g, O / 8], scales [I / g, O]; bits in the order of `AWQ_ORDER`
    gptq     qweight i32 [I / 8, O], qzeros i32 [I / g, O / 8], scales [I / g, O]; zero points less 1 in version 1
    packed   weight_packed i32 [O, I / 8], weight_scale [O, I / g], weight_zero_point i32 [O / 8, I / g]
    mxfp4    _blocks u8 [O, I / 32, 16], the first of two columns in the lower bits; _scales u8 [O, I / 32], powers of
             two, each with 127 added; all experts of a layer in one tensor [E, O, ..]
    mxfp4    weight_packed u8 [O, I / 2], weight_scale u8 [O, I / 32], of compressed-tensors
    nvfp4    weight_packed u8 [O, I / 2], weight_scale e4m3 [O, I / 16], weight_global_scale f32 [1], a divisor; or
             weight, weight_scale, weight_scale_2 f32 [], a factor, of ModelOpt

As published in src/compressed_tensors/compressors/{nvfp4,mxfp4}/base.py of vllm-project/compressed-tensors at ac8e2ba8,
and in modelopt/torch/export/unified_export_hf.py of NVIDIA/Model-Optimizer at a2fbac7b.

Scales of activations are checked and not used, because activations are not quantised.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from overlap_spec_kernels import ExpertWeight
from torch import Tensor

from overlap_spec.config.quantization import Granularity, QuantizationScheme, Stored
from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.loading.checkpoint import Shape, Weights
from overlap_spec.models.quantization.float4 import Mxfp4Weight, Nvfp4Weight
from overlap_spec.models.quantization.linear import LinearForms, QuantizedLinear, StoredWeight, stacked

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of a word hold, lowest bits first
IN_ORDER = tuple(range(8))
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
UNUSED = ("input_scale", "input_global_scale")  # of activations
NO_SCALE = 255  # NaN among powers of two
FIRST_UNUSABLE = 127  # of e4m3's bytes the first that is no scale: NaN, and then the negative ones

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


def as_stack(checkpoint: Weights, name: str, experts: Sequence[StoredWeight], parts: int) -> ExpertWeight:
    """A weight of every expert as one, in the form in which a GPU keeps it.

    `name`: for the log. `parts`: of its rows, which are gate's and those of the up projection, or one.
    """
    forms, first = checkpoint.forms, experts[0]
    if forms.keeps_stack(experts):
        return first.stack(experts, forms.dtype, parts)
    if forms.device.type == "cuda" and forms.dequantised == 1:
        log.warning("%s: %s is dequantised while loading, as no kernel multiplies by it", checkpoint.origin, name)
    whole = torch.empty((len(experts), *first.shape), dtype=forms.dtype, device=forms.device)
    for index, stored in enumerate(() if whole.is_meta else experts):
        whole[index] = stored.matrix(forms.dtype)
    return whole


def _without_values(parts: Sequence[StoredWeight], forms: LinearForms, bias: Tensor | None) -> AnyLinear:
    """A linear of the right size, in the form that it has on the device that `meta` is taken for.

    torch.cat, and what packs bits, would load a compiler for such tensors, which takes seconds.
    """
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    whole = parts[0].outlined(rows)
    if not forms.keeps(whole):
        return make_linear(torch.empty((rows, columns), dtype=forms.dtype, device="meta"), bias)
    return QuantizedLinear(whole.operand(forms.dtype, forms.scratch_for((rows, columns))), bias)


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
    blocks, scales = _mxfp4_tensors(checkpoint, scheme, name, shape)
    return [Mxfp4Weight.unpacked(*tensors) for tensors in zip(blocks.flatten(2), scales, strict=True)]


def _mxfp4(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    blocks, scales = _mxfp4_tensors(checkpoint, scheme, name, shape)
    return Mxfp4Weight.unpacked(blocks.flatten(1), scales)


def _mxfp4_tensors(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: Shape) -> tuple[Tensor, Tensor]:
    """Shapes: [.., O, I] -> [.., O, I / 32, 16], [.., O, I / 32]."""
    grouped = (*shape[:-1], _num_groups(checkpoint, scheme, name, shape[-1]))
    blocks = checkpoint.take_stored(f"{name}_blocks", (*grouped, 16), (torch.uint8,))
    scales = checkpoint.take_stored(f"{name}_scales", grouped, (torch.uint8,))
    _refuse_nan(checkpoint, f"{name}_scales", scales)
    return blocks, scales


def _refuse_nan(checkpoint: Weights, name: str, scales: Tensor) -> None:
    if not scales.is_meta and (count := int((scales == NO_SCALE).sum())):
        raise _error(checkpoint, name, f"found {count} scales that are NaN, expected finite ones: it is damaged")


def _mxfp4_packed(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    rows, columns = shape
    groups = _num_groups(checkpoint, scheme, name, columns)
    pairs = checkpoint.take_stored(f"{name}.weight_packed", (rows, columns // 2), (torch.uint8,))
    scales = checkpoint.take_stored(f"{name}.weight_scale", (rows, groups), (torch.uint8,))
    _refuse_nan(checkpoint, f"{name}.weight_scale", scales)
    return Mxfp4Weight.unpacked(pairs, scales)


def _nvfp4_packed(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    pairs, scales = _nvfp4_tensors(checkpoint, scheme, name, shape, "weight_packed")
    divisor = _scales(checkpoint, f"{name}.weight_global_scale", ((1,), ()))
    return Nvfp4Weight.unpacked(pairs, scales, divisor.float().reciprocal().reshape(()))


def _modelopt(checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int]) -> StoredWeight:
    pairs, scales = _nvfp4_tensors(checkpoint, scheme, name, shape, "weight")
    factor = _scales(checkpoint, f"{name}.weight_scale_2", ((), (1,)))
    return Nvfp4Weight.unpacked(pairs, scales, factor.float().reshape(()))


def _nvfp4_tensors(
    checkpoint: Weights, scheme: QuantizationScheme, name: str, shape: tuple[int, int], values: str
) -> tuple[Tensor, Tensor]:
    """`values`: the end of their name. Shapes: [O, I] -> [O, I / 2] u8, [O, I / 16] e4m3."""
    rows, columns = shape
    groups = _num_groups(checkpoint, scheme, name, columns)
    pairs = checkpoint.take_stored(f"{name}.{values}", (rows, columns // 2), (torch.uint8,))
    scales = checkpoint.take_stored(f"{name}.weight_scale", (rows, groups), (torch.float8_e4m3fn,))
    if not scales.is_meta and (count := int((scales.view(torch.uint8) >= FIRST_UNUSABLE).sum())):
        found = f"found {count} scales that are negative or NaN, expected others: it is damaged"
        raise _error(checkpoint, f"{name}.weight_scale", found)
    return pairs, scales


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
    Stored.MXFP4_PACKED: _mxfp4_packed,
    Stored.NVFP4_PACKED: _nvfp4_packed,
    Stored.MODELOPT_FP4: _modelopt,
    Stored.PLAIN: _plain,
}


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """The eight values of 4 bits in each word; value i is column `order[i]`. Shapes: [n, m] i32 -> [n, 8 m] u8."""
    shifts = torch.tensor([4 * order.index(column) for column in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _words(checkpoint: Weights, name: str, shape: Shape) -> Tensor:
    return checkpoint.take_stored(name, shape, (torch.int32,))


def _scales(checkpoint: Weights, name: str, shapes: tuple[Shape, ...]) -> Tensor:
    """Positive, finite scales of one of these shapes, which are those of a rank's part."""
    part = None if checkpoint.division is None else checkpoint.division.part_of(name)
    in_file = {shape if part is None else part.shape_in_file(shape): shape for shape in shapes}
    found = checkpoint.shape(name) if name in checkpoint else shapes[0]
    scales = checkpoint.take_stored(name, in_file.get(found, shapes[0]), FLOAT_SCALES)
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
