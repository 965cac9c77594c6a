"""What the machine offers: cores by affinity and control group, CUDA by its driver."""

import ctypes
import math
import os
from collections.abc import Callable

import pytest

from overlap_spec.runtime import machine


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", math.inf),
        ("-1 100000", math.inf),
        ("", math.inf),
        (" ", math.inf),
        ("200000 100000", 2.0),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("100000 0", math.inf),
    ],
)
def test_control_group_limits(limit: str, cores: float) -> None:
    assert machine.cgroup_cores(limit) == cores


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1)])
def test_the_smaller_limit_counts(limit: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(machine, "_read", lambda path: limit)
    assert machine.inspect().num_cores == expected


class Driver:
    """A CUDA driver that answers as told."""

    def __init__(self, init: int, devices: int) -> None:
        self._init, self._devices = init, devices

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: object) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._devices
        return 0


def no_driver(name: str) -> Driver:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (no_driver, False),
        (lambda name: Driver(init=100, devices=1), False),
        (lambda name: Driver(init=0, devices=0), False),
        (lambda name: Driver(init=0, devices=2), True),
    ],
)
def test_cuda_is_there_if_its_driver_has_devices(
    load: Callable[[str], Driver], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert machine.inspect().has_cuda is expected
