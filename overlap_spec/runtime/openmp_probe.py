"""Measures how long an OpenMP region takes after pauses of several lengths: a program of its own, without torch.

A process reads GOMP_SPINCOUNT when it loads the library, so each value needs a process; this one starts in a few
hundredths of a second.

    GOMP_SPINCOUNT=1000 python -I -S openmp_probe.py LIBGOMP NUM_THREADS    -> one line, microseconds for each pause

A pause is a number of turns of a loop, like the time between two linears, so a slow machine's pauses are longer.
"""

import ctypes
import sys
import time
from collections.abc import Callable

PAUSES = (500, 2000, 6000)  # turns of a loop: a few operations of torch, a dozen, attention with all around it
REPEATS = 31
SETTLE_S = 0.01  # until the threads are on cores of their own


def main() -> None:
    """Measure and print."""
    library, num_threads = sys.argv[1], int(sys.argv[2])
    parallel = ctypes.CDLL(library).GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL) is a call that does nothing
    settled = time.perf_counter() + SETTLE_S
    while time.perf_counter() < settled:
        parallel(nothing, None, num_threads, 0)
    print(*(median_us(lambda: parallel(nothing, None, num_threads, 0), pause) for pause in PAUSES))


def median_us(work: Callable[[], object], pause: int) -> float:
    """Microseconds that `work` takes after such a pause."""
    taken = []
    for _ in range(REPEATS):
        for _ in range(pause):
            pass
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return round(1e6 * sorted(taken)[REPEATS // 2], 2)


if __name__ == "__main__":
    main()
