"""What ranks agree on before they are ready, and how a wait for another one becomes known."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from overlap_spec.messages import RankFacts
from overlap_spec.worker import ranks
from overlap_spec.worker.ranks import ALONE, Agreement, Waits

T = TypeVar("T")


def together(tmp_path: Path, ranks: int, work: Callable[[Agreement], T]) -> list[T]:
    """What each rank's work returns, all at once in threads."""
    with ThreadPoolExecutor(ranks) as threads:
        parts = [threads.submit(lambda rank: work(Agreement(rank, ranks, tmp_path / "ranks")), i) for i in range(ranks)]
        return [part.result(timeout=20) for part in parts]


def test_all_ranks_get_the_same_list_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    def work(agreement: Agreement) -> list[RankFacts]:
        time.sleep(0.05 * (2 - agreement.rank))  # the first rank comes last
        return agreement.gathered("facts", RankFacts(agreement.rank, "cpu", 1 << agreement.rank, 5), RankFacts)

    found = together(tmp_path, 3, work)
    assert found[0] == found[1] == found[2] == [RankFacts(rank, "cpu", 1 << rank, 5) for rank in range(3)]


def test_rank_0_decides_and_the_others_are_not_asked(tmp_path: Path) -> None:
    asked: list[int] = []

    def work(agreement: Agreement) -> float:
        def decide() -> float:
            asked.append(agreement.rank)
            return time.perf_counter()

        return agreement.of_first("seconds", decide, float)

    assert len(set(together(tmp_path, 4, work))) == 1
    assert asked == [0]


def test_names_are_apart(tmp_path: Path) -> None:
    def work(agreement: Agreement) -> tuple[list[int], list[int], int]:
        own = agreement.rank
        return (
            agreement.gathered("a", own, int),
            agreement.gathered("b", 10 * own, int),
            agreement.of_first("c", lambda: 7, int),
        )

    assert together(tmp_path, 2, work) == [([0, 1], [0, 10], 7)] * 2


def test_one_rank_alone_neither_waits_nor_writes() -> None:
    assert ALONE.is_first and ALONE.gathered("a", 3, int) == [3] and ALONE.of_first("b", lambda: 4, int) == 4


def test_a_rank_that_waits_for_a_file_notes_so(tmp_path: Path) -> None:
    waits = Waits()
    first, second = Agreement(0, 2, tmp_path / "ranks"), Agreement(1, 2, tmp_path / "ranks", waits)
    waiting = threading.Thread(target=lambda: second.of_first("a", lambda: 0, int), daemon=True)
    assert waits.seconds == 0.0
    waiting.start()
    time.sleep(0.1)
    assert 0.05 < waits.seconds < 5
    first.of_first("a", lambda: 1, int)
    waiting.join(5)
    assert waits.seconds == 0.0 and not waiting.is_alive()


def test_a_wait_that_lasts_is_told_from_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told_s = 0.1
    monkeypatch.setattr(ranks, "TOLD_S", told_s)
    waits, told, threads = Waits(), list[float](), set[int]()

    @contextlib.contextmanager
    def connect() -> Iterator[Callable[[float], None]]:
        threads.add(threading.get_ident())
        yield told.append
        threads.add(threading.get_ident())

    with waits.reported(connect):
        with waits:
            pass
        time.sleep(2.5 * told_s)
        assert told == [], "no wait is under way"
        deadline = time.monotonic() + 30
        with waits:
            while len(told) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert told == sorted(told) and told[0] >= told_s
        time.sleep(told_s)  # the thread may be at telling while the wait ends
        count = len(told)
        time.sleep(2.5 * told_s)
        assert len(told) == count
    assert len(threads) == 1 and threading.get_ident() not in threads
