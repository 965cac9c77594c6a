"""Devices whose ceilings were measured, in one table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceiling:
    """What a device can do at best. A rate of 0 is not known."""

    bytes_per_s: float  # copying, reads and writes counted
    flop_per_s: float  # matrix products


# Device name as its driver gives it, and dtype. H200: a device-to-device copy and a large GEMM, torch 2.11, CUDA 13.
H200 = "NVIDIA H200"
CEILINGS = {
    (H200, "bfloat16"): Ceiling(4.23e12, 790e12),
    (H200, "float16"): Ceiling(4.23e12, 0.0),
    (H200, "float32"): Ceiling(4.23e12, 0.0),
}


def known_ceiling(device_name: str, dtype: str) -> Ceiling | None:
    """Look a device up by its exact name; another of the same family has another memory."""
    return CEILINGS.get((device_name, dtype))
