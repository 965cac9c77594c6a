"""Matrices of 4-bit floats (e2m1), and a linear that multiplies by one: mxfp4 and nvfp4 (OCP MX 1.0; NVIDIA NVFP4).

    W[n, k] = value[n, k] * scale[n, group of k] * factor[n]

Groups of 32 columns share a power of two (e8m0), groups of 16 a float8 (e4m3); only the latter have factors. A product
of value and scale has at most 6 bits, so bfloat16 holds it exactly. Kernels multiply by that, and sums by the factor.

Layout: tiles of 32 rows and 128 columns, whose 8 runs of 16 columns lie in 16 words. Word j has column j of all runs:
those of runs 0 to 3 in its lower half, those of runs 4 to 7 in its upper one. So no bits move between columns when a
tile is unpacked, and a run's scale is one number for each row. In a half, the magnitude of run q has its lowest bit at
`MAGNITUDES[q]` and its sign is bit `SIGNS[q]`: that of run 0 is a bfloat16 where it is, but for an exponent that is too
small by 126, which the scale makes up for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.norm.normed import Normed, normalised

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by their bits
MAGNITUDES, SIGNS = (6, 3, 0, 9), (15, 12, 13, 14)
LARGEST_POWER = 128  # of e8m0, 127 added: larger ones leave the range of float32 once they make up for an exponent
TILE_ROWS, TILE_COLUMNS, RUN = 32, 128, 16
POWERS, FLOATS = 32, 16  # columns of a group whose scale is e8m0, and e4m3
_RUNS = TILE_COLUMNS // RUN
_ROW_UNIT = 64  # rows of a part are filled up with zeros to a multiple
_WIDE_N = 4096  # rows of W from which programs of a few rows of x take more of them


@dataclass(frozen=True, slots=True)
class Float4Matrices:
    """E matrices [O, I] of one shape. Their rows are one part, or two: gate's, and those of the up projection."""

    words: Tensor  # [E, parts, row tiles, column tiles, 32, 16] i32
    scales: Tensor  # [E, parts, row tiles, column tiles, 1 or 2, 32] i32: 4 bytes, the first group in the lowest
    factors: Tensor | None  # [E, O] f32; None: 1
    rows: int  # O
    columns: int  # I
    group: int  # columns that share a scale: `POWERS` or `FLOATS`
    dtype: torch.dtype  # of what they multiply

    @classmethod
    def packed(
        cls, values: Tensor, scales: Tensor, factors: Tensor | None, parts: int, dtype: torch.dtype
    ) -> Float4Matrices:
        """One matrix. Shapes: values [O, I] u8, 0..15, scales [O, I / group] u8, as stored, factors [O] f32."""
        (rows, columns), groups = values.shape, scales.shape[1]
        group, tile_rows, tile_columns = columns // groups, ceil_div(rows // parts, _ROW_UNIT) * 2, _num_tiles(columns)
        if values.is_meta:
            shape = 1, parts, tile_rows, tile_columns
            words = values.new_empty((*shape, TILE_ROWS, RUN), dtype=torch.int32)
            of_groups = scales.new_empty((*shape, _num_words(group), TILE_ROWS), dtype=torch.int32)
        else:
            words = _in_words(_tiled(values, parts, tile_rows, tile_columns, TILE_COLUMNS))
            of_groups = _in_bytes(_tiled(scales, parts, tile_rows, tile_columns, TILE_COLUMNS // group))
        stacked = None if factors is None else factors.float().contiguous()[None]  # one factor may be all rows'
        return cls(words[:1], of_groups[:1], stacked, rows, columns, group, dtype)

    @classmethod
    def stacked(cls, matrices: Sequence[Float4Matrices]) -> Float4Matrices:
        """All in one, as they are alike but for their values."""
        first = matrices[0]
        factors = [each.factors for each in matrices if each.factors is not None]
        return replace(
            first,
            words=_concatenated([each.words for each in matrices]),
            scales=_concatenated([each.scales for each in matrices]),
            factors=_concatenated(factors) if factors else None,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, O and I."""
        return len(self.words), self.rows, self.columns

    @property
    def parts(self) -> int:
        """1, or 2."""
        return self.words.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(each.nbytes for each in self._tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        return [each for each in (self.words, self.scales, self.factors) if each is not None]

    @property
    def unit(self) -> int:
        """The exponent of two that values in registers lack."""
        return 14 if self.dtype == torch.float16 else 126

    @property
    def fits(self) -> bool:
        """Whether the tensors are as kernels read them."""
        tiles = ceil_div(self.rows // self.parts, _ROW_UNIT) * 2, _num_tiles(self.columns)
        shape = len(self.words), self.parts, *tiles
        factors = self.factors
        return (
            (self.words.shape, self.words.dtype) == ((*shape, TILE_ROWS, RUN), torch.int32)
            and self.scales.shape == (*shape, _num_words(self.group), TILE_ROWS)
            and (factors is None) == (self.group == POWERS)
            and (factors is None or (factors.shape == self.shape[:2] and factors.dtype == torch.float32))
            and all(each.is_contiguous() for each in self._tensors)
        )

    def values(self, index: int) -> tuple[Tensor, Tensor]:
        """One matrix as it was given to `packed`. Shapes: -> [O, I] u8, [O, I / group] u8."""
        values = _untiled(_of_words(self.words[index]), self.rows, self.columns)
        return values, _untiled(_of_bytes(self.scales[index]), self.rows, self.columns // self.group)

    def matrix(self, index: int, dtype: torch.dtype) -> Tensor:
        """One of them, dequantised in float32 or wider. Shapes: -> [O, I]."""
        values, scales = self.values(index)
        factors = None if self.factors is None else self.factors[index]
        return dequantised_float4(values, scales, factors, dtype if dtype.itemsize > 2 else torch.float32).to(dtype)


def dequantised_float4(values: Tensor, scales: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """value * scale, which is exact in float32 but for what leaves its range, then * factor.

    Shapes: values [O, I] u8, 0..15, scales [O, I / group] u8, factors [O] f32 -> [O, I].
    """
    known = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=dtype, device=values.device)
    group = values.shape[1] // scales.shape[1]
    matrix = known[values.int()] * scale_values(scales, group).to(dtype).repeat_interleave(group, dim=1)
    return matrix if factors is None else matrix.mul_(factors.to(dtype)[:, None])


def scale_values(scales: Tensor, group: int) -> Tensor:
    """Bytes as the numbers that they are. Shapes: [..] u8 -> [..] f32."""
    if group == FLOATS:
        return scales.view(torch.float8_e4m3fn).float()
    exponents = scales.int() - 127
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True, slots=True)
class Float4Weight(LinearOperand):
    """W [O, I]. A row's result has the same bits whatever rows are beside it, and however many."""

    matrices: Float4Matrices  # of one matrix, in one part

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices.rows, self.matrices.columns

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, which a forward reads."""
        return self.matrices.num_bytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.matrices.words.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of x."""
        return self.matrices.dtype

    def rows(self, ids: Tensor | slice) -> Float4Weight:
        """Some rows of W, packed again."""
        values, scales = self.matrices.values(0)
        factors = None if self.matrices.factors is None else self.matrices.factors[0][ids]
        return Float4Weight(Float4Matrices.packed(values[ids], scales[ids], factors, 1, self.dtype))

    def check(self, x: Tensor) -> None:
        require(self.matrices.columns == x.shape[1], "weight", "[O, I]")
        require(self.dtype == x.dtype, "weight", "made for the dtype of x")

    def product(self, x: Tensor | Normed) -> Tensor:
        return self._multiply(normalised(x), self.dtype)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._multiply(normalised(x), torch.promote_types(self.dtype, torch.float32))

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return (float4_linear if runs_triton(x) else float4_linear_reference)(x, self.matrices, dtype)


def float4_linear_reference(x: Tensor, weight: Float4Matrices, dtype: torch.dtype) -> Tensor:
    wide = x if x.element_size() > 2 else x.float()
    return F.linear(wide, weight.matrix(0, wide.dtype)).to(dtype)


def float4_linear(x: Tensor, weight: Float4Matrices, dtype: torch.dtype) -> Tensor:
    """x @ W.T for the first matrix. Shapes: x [T, I] -> [T, O] of `dtype`. Sync: never."""
    num_rows, size_n = len(x), weight.rows
    out = torch.empty((num_rows, size_n), dtype=dtype, device=x.device)
    is_wide = x.element_size() > 2  # then tiles of another size would have other orders of sums
    block_m, block_n = (16, 32 if size_n > _WIDE_N else 16) if num_rows <= 16 or is_wide else (32, 64)
    _float4_linear_kernel[(ceil_div(size_n, block_n), ceil_div(num_rows, block_m))](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.factors is None else weight.factors,
        out,
        x.stride(0),
        size_n,
        num_rows,
        SIZE_K=weight.columns,
        GROUP=weight.group,
        FACTORS=weight.factors is not None,
        UNIT=weight.unit,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=min(block_n // 8, 4),
        num_stages=2 if is_wide else 4,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _float4_linear_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, factors_ptr: tl.tensor, out_ptr: tl.tensor,
    x_stride: int, size_n: int, num_rows: int, SIZE_K: tl.constexpr, GROUP: tl.constexpr, FACTORS: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N rows of W and BLOCK_M rows of x."""
    wait_for_inputs(PDL)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside_n = m < num_rows, n < size_n
    row = m.to(tl.int64)[:, None]
    y, _ = float4_products(
        x_ptr + row * x_stride, live, words_ptr, scales_ptr, n, 0, 0, SIZE_K, GROUP, False, UNIT, BLOCK_M, BLOCK_N
    )
    if FACTORS:
        y *= tl.load(factors_ptr + n, mask=inside_n, other=0.0)[None, :] * 256.0
    tl.store(out_ptr + row * size_n + n[None, :], y, mask=live[:, None] & inside_n[None, :])


@TritonKernel
def float4_products(
    x_rows: tl.tensor, live: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, n: tl.tensor, begin: tl.tensor,
    up_tiles: int, SIZE_K: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Products of rows of x with rows n behind row tile `begin`, and if GATED with those `up_tiles` tiles behind them.

    Without factors; those of groups of 16 are too small by 2^8, which keeps scales in the range of all types. Columns
    are added up run by run, 0, 4, 1, 5 .. of each tile, in every product of that shape. Rows of x that are not live
    are zeros.
    Shapes: x_rows [BLOCK_M, 1] pointers, live [BLOCK_M], n [BLOCK_N] -> [BLOCK_M, BLOCK_N] f32 twice.
    """
    TILES: tl.constexpr = (SIZE_K + 127) // 128
    WORDS: tl.constexpr = 32 // GROUP
    j = tl.arange(0, 16)
    tile, row = begin + (n // 32).to(tl.int64), n % 32
    words_ptr += (tile * (TILES * 512) + row * 16)[None, :] + j[:, None]
    scales_ptr += (tile * (TILES * WORDS * 32) + row)[None, :]
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(TILES):
        words = tl.load(words_ptr + at * 512)
        low, high = _scales_of_tile(scales_ptr + at * (WORDS * 32), WORDS)
        up_words, up_low, up_high = words, low, high
        if GATED:
            up_words = tl.load(words_ptr + (up_tiles * TILES + at) * 512)
            up_low, up_high = _scales_of_tile(scales_ptr + (up_tiles * TILES + at) * (WORDS * 32), WORDS)
        for q in tl.static_range(4):
            k = at * 128 + q * 16 + j
            first = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < SIZE_K)[None, :], other=0.0)
            k += 64
            second = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < SIZE_K)[None, :], other=0.0)
            y = _add_run(y, first, second, words, low, high, q, GROUP, UNIT)
            if GATED:
                up = _add_run(up, first, second, up_words, up_low, up_high, q, GROUP, UNIT)
    return y, up


@TritonKernel
def _scales_of_tile(scales_ptr: tl.tensor, WORDS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Those of runs 0 to 3, and of runs 4 to 7, which may be the same word."""
    low = tl.load(scales_ptr)
    high = low
    if WORDS == 2:
        high = tl.load(scales_ptr + 32)
    return low, high


@TritonKernel
def _add_run(
    y: tl.tensor, first: tl.tensor, second: tl.tensor, words: tl.tensor, low: tl.tensor, high: tl.tensor,
    Q: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum with the products of runs Q and Q + 4. Shapes: first, second [BLOCK_M, 16], words [16, BLOCK_N]."""
    lower, upper = _halves(words, Q, first.dtype)
    scale = _scale(low, Q * 16 // GROUP % 4, GROUP, UNIT).to(first.dtype)
    y = tl.dot(first, lower * scale, y, input_precision="ieee")
    scale = _scale(high, (Q + 4) * 16 // GROUP % 4, GROUP, UNIT).to(first.dtype)
    return tl.dot(second, upper * scale, y, input_precision="ieee")


@TritonKernel
def _halves(words: tl.tensor, Q: tl.constexpr, TYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The values of run Q and of run Q + 4, times 2^-14 (float16) or 2^-126: their bits in the place of the type's."""
    TO: tl.constexpr = 9 if tl.float16 == TYPE else 6
    AT: tl.constexpr = 6 if Q == 0 else (3 if Q == 1 else (0 if Q == 2 else 9))
    SIGN: tl.constexpr = 15 if Q == 0 else (12 if Q == 1 else (13 if Q == 2 else 14))
    magnitude = words >> AT - TO if AT > TO else words << TO - AT
    bits = (magnitude & (0x00070007 << TO)) | ((words << (15 - SIGN)) & -0x7FFF8000)
    if tl.float32 == TYPE:
        lower = (bits << 16).to(tl.float32, bitcast=True)
        upper = (bits & -0x10000).to(tl.float32, bitcast=True)
    else:
        lower = bits.to(tl.int16).to(TYPE, bitcast=True)
        upper = (bits >> 16).to(tl.int16).to(TYPE, bitcast=True)
    return lower, upper


@TritonKernel
def _scale(words: tl.tensor, BYTE: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Byte BYTE times 2^UNIT; e4m3, whose bits in their place are too small by 2^120, times 2^(UNIT - 8).

    Older GPUs have no float8. Shapes: [1, BLOCK_N] i32 -> f32.
    """
    byte = (words >> (8 * BYTE)) & 255
    if GROUP == 32:
        return ((byte + UNIT) << 23).to(tl.float32, bitcast=True)
    half: tl.constexpr = 2.0 ** ((UNIT + 112) // 2)
    return (byte << 20).to(tl.float32, bitcast=True) * half * half


def _num_tiles(columns: int) -> int:
    return ceil_div(columns, TILE_COLUMNS)


def _num_words(group: int) -> int:
    """Of a row's scales in a tile."""
    return TILE_COLUMNS // group // 4


def _tiled(values: Tensor, parts: int, tile_rows: int, tile_columns: int, width: int) -> Tensor:
    """Filled up with zeros. Shapes: [O, n] -> [1, parts, row tiles, column tiles, 32, width] i32."""
    by_part = values.unflatten(0, (parts, -1)).int()
    missing = tile_columns * width - values.shape[1], tile_rows * TILE_ROWS - by_part.shape[1]
    padded = F.pad(by_part, (0, missing[0], 0, missing[1]))
    return padded.view(parts, tile_rows, TILE_ROWS, tile_columns, width).transpose(2, 3).contiguous()[None]


def _untiled(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `_tiled`. Shapes: [parts, row tiles, column tiles, 32, width] -> [O, n] u8."""
    parts = tiles.transpose(2, 3).flatten(3).flatten(1, 2)  # [parts, padded rows, padded columns]
    return parts[:, : rows // len(parts), :columns].flatten(0, 1).to(torch.uint8)


def _in_words(tiles: Tensor) -> Tensor:
    """Shapes: [.., 128] i32 -> [.., 16] i32."""
    words = torch.zeros_like(tiles[..., :RUN])
    for run, values in enumerate(tiles.unflatten(-1, (_RUNS, RUN)).unbind(-2)):
        q, half = run % 4, 16 * (run // 4)
        words |= (values & 7) << (MAGNITUDES[q] + half) | (values >> 3) << (SIGNS[q] + half)
    return words


def _of_words(words: Tensor) -> Tensor:
    """The inverse of `_in_words`. Shapes: [.., 16] i32 -> [.., 128] i32."""
    runs = []
    for run in range(_RUNS):
        q, half = run % 4, 16 * (run // 4)
        runs.append((words >> (MAGNITUDES[q] + half)) & 7 | ((words >> (SIGNS[q] + half)) & 1) << 3)
    return torch.stack(runs, dim=-2).flatten(-2)


def _in_bytes(tiles: Tensor) -> Tensor:
    """Shapes: [.., 32, groups of a tile] i32 -> [.., groups / 4, 32] i32."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=tiles.device)
    words: Tensor = (tiles.unflatten(-1, (-1, 4)) << shifts).sum(-1, dtype=torch.int32)
    return words.transpose(-1, -2).contiguous()


def _of_bytes(words: Tensor) -> Tensor:
    """The inverse of `_in_bytes`. Shapes: [.., n, 32] i32 -> [.., 32, 4 n] i32."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    values: Tensor = (words.transpose(-1, -2)[..., None] >> shifts) & 255
    return values.flatten(-2)


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.is_meta:
        return first.new_empty((len(tensors), *first.shape[1:]))
    return torch.cat(list(tensors))
