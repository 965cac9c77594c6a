"""Random weights of 4-bit floats, as they are stored, and what they mean, from the definitions alone."""

import torch
from overlap_spec_kernels import Float4Matrices
from torch import Tensor

FORMATS = (32, 16)  # columns of a group: of mxfp4, and of nvfp4
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
Stored = tuple[Tensor, Tensor, Tensor | None]  # values [O, I] u8, scales [O, I / group] u8, factors [O] f32


def random_float4(rows: int, columns: int, group: int, device: str = "cpu", seed: int = 0) -> Stored:
    """All values, scales of different sizes, and a factor for each row in groups of 16."""
    random = torch.Generator(device).manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=random)

    values = drawn(0, 16, rows, columns)
    if group == 32:
        return values, drawn(118, 123, rows, columns // 32), None
    factors = torch.rand(rows, device=device, generator=random) * 1e-2 + 1e-3
    return values, drawn(1, 100, rows, columns // 16), factors


def float4_matrix(rows: int, columns: int, group: int, dtype: torch.dtype, parts: int = 1) -> Float4Matrices:
    """One random matrix."""
    return Float4Matrices.packed(*random_float4(rows, columns, group), parts, dtype)


def meaning_of(values: Tensor, scales: Tensor, factors: Tensor | None) -> Tensor:
    """Shapes: -> [O, I] f64."""
    group = values.shape[1] // scales.shape[1]
    magnitudes = MAGNITUDES.to(values.device)[(values & 7).long()]
    signed = torch.where(values >= 8, -magnitudes, magnitudes)
    powers = (scales.double() - 127).exp2() if group == 32 else _of_bits(scales)
    meant = signed * powers.repeat_interleave(group, dim=1)
    return meant if factors is None else meant * factors.double()[:, None]


def _of_bits(scales: Tensor) -> Tensor:
    """Of e4m3 without a sign, by its bits."""
    exponent, mantissa = (scales >> 3).double(), (scales & 7).double()
    return torch.where(exponent > 0, (1 + mantissa / 8) * (exponent - 7).exp2(), mantissa / 8 * 2.0**-6)
