"""The threads of a CPU's kernels: every item is done once, by whichever thread, before the loop returns."""

import ctypes
from pathlib import Path

import pytest
from overlap_spec_kernels import NoLibraryError
from overlap_spec_kernels.compiled_cpu import compiled_library
from overlap_spec_kernels.linear.grouped import SOURCE

PROGRAM = """
#include "{team}"
#include <set>
extern "C" int run(int64_t items, int threads, int item_us, int* times) {{
    std::mutex mutex;
    std::set<std::thread::id> seen;
    overlap_spec::Team::of_process().run(items, threads, [&](int64_t item) {{
        if (item_us) std::this_thread::sleep_for(std::chrono::microseconds(item_us * (1 + item % 3)));
        std::lock_guard<std::mutex> lock(mutex);
        times[item]++;
        seen.insert(std::this_thread::get_id());
    }});
    std::lock_guard<std::mutex> lock(mutex);
    return int(seen.size());
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.cpp").write_text(PROGRAM.format(team=SOURCE.parent / "team.h"))
    try:
        built = compiled_library(folder / "team.cpp", Path(folder))
    except NoLibraryError as error:
        pytest.skip(str(error))
    built.run.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return built


def loop(library: ctypes.CDLL, items: int, threads: int, item_us: int) -> int:
    """The number of threads that took part."""
    times = (ctypes.c_int * items)()
    num_threads = int(library.run(items, threads, item_us, times))
    assert list(times) == [1] * items
    assert 1 <= num_threads <= threads
    return num_threads


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize(("items", "threads"), [(2000, 4), (1, 3), (7, 1), (200_000, 2)])
def test_every_item_once(library: ctypes.CDLL, items: int, threads: int) -> None:
    for _ in range(5):
        loop(library, items, threads, item_us=0)


def test_a_slow_caller_leaves_items_to_helpers_and_waits_for_them(library: ctypes.CDLL) -> None:
    """On a machine that is busy they may come late."""
    assert max(loop(library, 7, 3, item_us=500) for _ in range(20)) > 1
