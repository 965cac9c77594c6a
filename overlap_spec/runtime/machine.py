"""The machine's cores and CUDA devices, found without torch."""

import ctypes
import math
import os
import platform
from pathlib import Path

from overlap_spec.config import Machine, asked_otlp_protocol, asked_threads, forces_greedy_verify

_PROCESSORS = Path("/proc/cpuinfo")
_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")  # "quota period" or "max period", microseconds
_CGROUP_V1 = tuple(Path("/sys/fs/cgroup/cpu") / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def inspect() -> Machine:
    """The cores and devices that this process may use."""
    num_gpus = _num_cuda_devices()
    return Machine(
        num_cores=num_cores(),
        has_cuda=num_gpus > 0,
        num_gpus=num_gpus,
        forces_greedy_verify=forces_greedy_verify(),
        otlp_protocol=asked_otlp_protocol(),
        num_threads=asked_threads(),
    )


def processor_name() -> str:
    """The kernel's name of the processor; without one, its architecture."""
    lines = _read(_PROCESSORS).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def num_cores() -> int:
    """Cores of the affinity mask, fewer if the control group grants less time than that."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores(_read(_CGROUP_V2) or " ".join(_read(path) for path in _CGROUP_V1))
    return max(1, math.ceil(min(cores, quota)))


def cgroup_cores(limit: str) -> float:
    """Cores that a `quota period` grants; infinity where it sets no limit ("max 100000", "-1 100000", "")."""
    quota, _, period = limit.partition(" ")
    if not quota.isdigit() or not period.strip().isdigit() or int(period) == 0:
        return math.inf
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _num_cuda_devices() -> int:
    """Ask the driver; no driver, no devices."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
