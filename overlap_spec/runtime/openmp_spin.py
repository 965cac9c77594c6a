"""How long the worker's threads spin before they sleep, chosen by what waking them costs here.

A step on a CPU is some 150 parallel regions with pauses of 10 to 100 microseconds between them. A thread that sleeps in
each has to be woken: 10 microseconds on one machine, 400 on another. A thread that spins for long takes a core from
other threads, and where cores are shared they all wait for it: two engines on two cores of an EPYC take 34 ms a step
each where threads sleep at once, 60 where they spin for 0.1 ms first, 113 for 0.3 ms. So the shortest spin
is chosen that is hardly slower than the best.
"""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from overlap_spec.config import own_environment
from overlap_spec.runtime.measured import once

SPINS = (0, 1000, 3000, 10_000, 30_000, 100_000)  # turns of libgomp's waiting loop: 0.03 to 0.05 us each
WEIGHTS = (0.3, 0.4, 0.3)  # of a step's pauses, how many are as long as each of the probe's
TOLERATED_US = 2.0  # more than with the best spin, for a region: 0.3 ms of a step
TOLERATED = 1.1  # or times the best
ROUNDS = 2
PROBE_S = 2.0

log = logging.getLogger(__name__)

Probe = Callable[[int], Sequence[float]]  # spin -> microseconds of a region after each of the probe's pauses


def choose_spin(num_threads: int, progress: Callable[[str, int, int], None]) -> int:
    """The spin for so many threads on this machine, measured once and kept; 0 where it cannot be measured."""
    library = gomp_library()
    if num_threads == 1 or library is None:
        return 0

    def measure() -> int:
        progress("measuring how threads wait", 0, 0)
        return min(shortest_of(lambda spin: run_probe(library, num_threads, spin)) for _ in range(ROUNDS))

    try:
        return once("spin", num_threads, int, measure, SPINS.__contains__)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("how threads should wait cannot be measured: %s", error)
        return 0


def shortest_of(probe: Probe) -> int:
    """The shortest spin that is hardly slower than the best."""
    costs = {spin: sum(w * us for w, us in zip(WEIGHTS, probe(spin), strict=True)) for spin in SPINS}
    best = min(costs.values())
    return next(spin for spin, cost in costs.items() if cost <= max(TOLERATED * best, best + TOLERATED_US))


def run_probe(library: Path, num_threads: int, spin: int) -> list[float]:
    """Raises: OSError, ValueError, SubprocessError if the probe does not run."""
    program = Path(__file__).with_name("openmp_probe.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program), str(library), str(num_threads)],
        env=own_environment() | {"OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(spin)},
        capture_output=True,
        check=True,
        text=True,
        timeout=PROBE_S,
    )
    return [float(word) for word in done.stdout.split()]


def gomp_library() -> Path | None:
    """The OpenMP library that torch brings, without importing torch; None if it is another one."""
    found = importlib.util.find_spec("torch")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found is not None else []
    places = [place for folder in folders for place in (folder / "lib", folder.with_name("torch.libs"))]
    return next((path for place in places for path in sorted(place.glob("libgomp*.so*"))), None)
