"""Times every op on one GPU. `benchmarks/kernels.py` is its command line and writes the report.

Each op is compared with its reference first. Bytes are those that must move once; the ceiling is a device copy measured
in the same run. Two clocks:

    layer ops   one launch at a time with a cold L2 cache, median
    step ops    launches in a row in one CUDA graph, as in a step: each begins while the one before it ends, and they
                take turns with weights that the L2 cache cannot hold together; a graph's time over its launches, median
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernel_cases.layer_cases import layer_cases
from kernel_cases.shapes import DTYPE, MODELS, PAGE_SIZE
from kernel_cases.step_cases import NUM_ROWS, Place, StepCase, slot_cases, step_cases
from kernel_cases.tree_cases import tree_cases, tree_slot_cases

ROTATED_BYTES = 160 << 20  # more than twice the L2 cache of any GPU so far
LAUNCHES = 64  # in a graph, at least
REPLAYS = 15


@dataclass(frozen=True)
class Measurement:
    """One row of the report. `share` is of the copy ceiling."""

    op: str
    model: str
    workload: str
    num_bytes: int
    time_us: float
    gb_per_s: float
    share: float


@dataclass(frozen=True)
class StepMeasurement(Measurement):
    """One row of the report on step ops. `model`: empty where it makes no difference."""

    num_rows: int


def run(num_rows: tuple[int, ...] = NUM_ROWS, jobs: int = 1) -> dict[str, Any]:
    """Check and time every case, printing each. `num_rows`: of step ops. `jobs`: processes that compile and check step
    ops before the clock.

    Raises: AssertionError where a kernel disagrees with its reference.
    """
    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.starmap(check_share, [(share, jobs, num_rows) for share in range(jobs)], chunksize=1)
    torch.manual_seed(0)
    ceiling = copy_bandwidth()
    return {
        "cuda": torch.version.cuda,
        "dtype": str(DTYPE).removeprefix("torch."),
        "page_size": PAGE_SIZE,
        "copy_gb_per_s": ceiling,
        "rotated_bytes": ROTATED_BYTES,
        "measurements": [asdict(measurement) for measurement in measure_layer_ops(ceiling)],
        "step_measurements": [asdict(measurement) for measurement in measure_step_ops(ceiling, num_rows)],
    }


def measure_layer_ops(ceiling: float) -> Iterator[Measurement]:
    """Check and time them, printing each."""
    for case in layer_cases():
        case.check()
        time_us = median_ms(case.call) * 1e3
        yield printed(Measurement(*case[:4], time_us, *_speed(case.num_bytes, time_us, ceiling)))


def check_share(share: int, jobs: int, num_rows: tuple[int, ...]) -> None:
    """Compile and check every jobs-th step case: kernels are then in the cache on disk."""
    torch.manual_seed(share)
    for index, case in enumerate(all_step_cases(Place("cuda", 0, num_rows))):
        if index % jobs == share:
            case.check()


def measure_step_ops(ceiling: float, num_rows: tuple[int, ...]) -> Iterator[StepMeasurement]:
    """Check and time them, printing each."""
    place = Place("cuda", ROTATED_BYTES, num_rows)
    for case in all_step_cases(place):
        case.check()
        time_us = graph_us(case.calls)
        speed = _speed(case.num_bytes, time_us, ceiling)
        yield printed(
            StepMeasurement(case.op, case.model, case.workload, case.num_bytes, time_us, *speed, case.num_rows)
        )


def all_step_cases(place: Place) -> Iterator[StepCase]:
    """For every model, then for none."""
    for model, shape in MODELS.items():
        yield from step_cases(model, shape, place)
        yield from tree_cases(model, shape, place)
    yield from slot_cases(place)
    yield from tree_slot_cases(place)


def printed(measurement: Measurement) -> Any:
    """The measurement, once it is on the screen."""
    workload = measurement.workload
    if isinstance(measurement, StepMeasurement):
        workload += f", {measurement.num_rows} rows"
    print(f"{measurement.op:16} {measurement.model:13} {workload:30} {measurement.time_us:9.2f} us", end=" ")
    print(f"{measurement.gb_per_s:7.0f} GB/s {measurement.share:6.1%}", flush=True)
    return measurement


def _speed(num_bytes: int, time_us: float, ceiling: float) -> tuple[float, float]:
    """GB/s, and their share of the ceiling."""
    gb_per_s = num_bytes / time_us / 1e3
    return gb_per_s, gb_per_s / ceiling


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds per call of a CUDA graph of all calls, in turns until there are LAUNCHES."""
    launches = [calls[i % len(calls)] for i in range(max(len(calls), LAUNCHES))]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in launches:
            call()
    times = [_replay_ms(graph) for _ in range(3 + REPLAYS)][3:]
    return statistics.median(times) * 1e3 / len(launches)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def median_ms(call: Callable[[], object]) -> float:
    """Median time of a call, in ms, with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median"))


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e6
