"""In what order the tests of a GPU begin where pytest-xdist runs them beside each other, and which GPU a worker has.

No long test begins near the end, and long ones begin spread over the time before: they wait for a GPU that they share,
while most short ones compile kernels. How long tests take is read from a run's summary (tests/support/summaries.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LONG_S = 10.0
SHORT_AT_END = 1 / 3  # of the short ones


def seconds_of_tests(summaries: Path) -> dict[str, float]:
    """Mean seconds of a test, by `FILE::FUNCTION` of those that were listed, and by `FILE` of any."""
    if not summaries.is_file():
        return {}
    seconds: dict[str, float] = {}
    for file, row in json.loads(summaries.read_text()).get("files", {}).items():
        seconds[file] = row["seconds"] / max(row["passed"] + row["failed"] + row["skipped"], 1)
        seconds |= {f"{file}::{function}": mean for function, mean in row.get("longest", {}).items()}
    return seconds


def expected_seconds(nodeid: str, seconds: dict[str, float]) -> float:
    """What a test takes, by what is known of its function or else of its file; a new file's tests count as long."""
    function = nodeid.partition("[")[0]
    return seconds.get(function, seconds.get(function.partition("::")[0], LONG_S))


def in_order(units: Sequence[tuple[float, T]]) -> list[T]:
    """Units of work with their seconds: long ones, longest first, each followed by its share of the short ones."""
    longs = sorted((unit for unit in units if unit[0] >= LONG_S), key=lambda unit: -unit[0])
    shorts = [work for seconds, work in units if seconds < LONG_S]
    share = int((1 - SHORT_AT_END) * len(shorts) / max(len(longs), 1))
    ordered: list[T] = []
    for i, (_, work) in enumerate(longs):
        ordered += [work, *shorts[i * share : (i + 1) * share]]
    return ordered + shorts[len(longs) * share :]


def visible_to(worker: str, num_gpus: int, visible: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES for worker `gwN`: one of the GPUs that are `visible`, in turns. None: as it is."""
    if num_gpus < 2:
        return visible
    devices = visible.split(",") if visible else [str(i) for i in range(num_gpus)]
    return devices[int(worker.removeprefix("gw")) % num_gpus]
