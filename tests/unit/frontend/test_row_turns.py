"""Rows that take long: they come after other requests' rows, owners take turns, and nothing is lost or doubled."""

import asyncio
import itertools
import random
import struct
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import pytest
from support.frontend_harness import Harness, serving
from support.installed import needs_feature
from support.memory_link import MemoryLink
from support.small_tokenizers import smollm2

from overlap_spec.config import RecoverySettings
from overlap_spec.features.log_probs.frontend import PART_PAIRS
from overlap_spec.frontend import rows
from overlap_spec.frontend.open_requests import Gains, Part, Run
from overlap_spec.frontend.rows import SLICE, TURN_S, LateRow, RowTurns, Waiting
from overlap_spec.frontend.stop_automaton import Automaton, Move, State
from overlap_spec.messages import (
    Cancel,
    ErrorCode,
    Finish,
    FinishKind,
    LogProbParams,
    LogProbRows,
    Recover,
    Rejected,
    Terms,
    TextDeltas,
    ToFrontend,
    TokenDeltas,
    ToScheduler,
    Verified,
)
from overlap_spec.runtime.transport import BatchOutlet, Inbox

LENGTH = Finish(FinishKind.LENGTH)
MAX_TOP = 20
IDS = smollm2().encode(" the sky is blue and so is the sea, says the bird", False)


class Clock:
    """CPU time that moves when it is asked for."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def thread_time(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search takes a turn's time."""
    monkeypatch.setattr(rows, "time", Clock(TURN_S))


def gained(step_id: int, *tokens: int, uid: int = 1, finish: Finish | None = None) -> Gains:
    """What one step has added to one request."""
    return Gains(step_id, {uid: Run(list(tokens), finish, [Part(step_id, len(tokens), step_id)])}, {}, {}, {})


def runs_of(found: Iterable[Waiting]) -> list[tuple[int, list[int]]]:
    return [(uid, run.tokens) for each in found if isinstance(each, Gains) for uid, run in each.runs.items()]


def one_turn(waiting: RowTurns) -> list[tuple[int, list[int]]]:
    waiting.begin_turn()
    return runs_of(waiting.turn())


def test_owners_take_turns_and_so_do_the_requests_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "time", Clock(TURN_S / 4))
    waiting = RowTurns()
    for uid in (1, 2, 3):
        waiting.put("many", uid, gained(1, uid, uid, uid, uid=uid))
        waiting.put("many", uid, gained(2, uid, uid=uid, finish=LENGTH))
    waiting.put("one", 9, gained(1, 9, uid=9))
    assert one_turn(waiting) == [(1, [1, 1, 1]), (9, [9]), (2, [2, 2, 2]), (3, [3, 3, 3])]
    assert one_turn(waiting) == [(1, [1]), (2, [2]), (3, [3])]
    assert not waiting and one_turn(waiting) == []


def test_a_turn_ends_by_its_time_and_makes_progress(slow: None) -> None:
    waiting = RowTurns()
    for uid in (1, 2):
        waiting.put("a", uid, gained(1, uid, uid=uid))
    waiting.begin_turn()
    assert runs_of(waiting.turn()) == [(1, [1])]
    assert list(waiting.turn()) == [], "its time is over"
    assert one_turn(waiting) == [(2, [2])]


def test_runs_that_wait_are_joined_and_cut_where_a_step_ends() -> None:
    waiting = RowTurns()
    steps = [gained(step_id, *range(10 * step_id, 10 * step_id + size)) for step_id, size in enumerate((1, 2, 5, 1))]
    steps[0].cached_tokens[1], steps[-1].runs[1].finish = 7, LENGTH
    for each in steps:
        waiting.put("a", 1, each)
    found: list[Gains] = []
    while waiting:
        waiting.begin_turn()
        found += waiting.turn()
    runs = [each.runs[1] for each in found]
    assert [run.tokens for run in runs] == [[0, 10, 11], [20, 21, 22, 23, 24], [30]]
    assert [[part.step_id for part in run.parts] for run in runs] == [[0, 1], [2], [3]]
    assert [run.finish for run in runs] == [None, None, LENGTH]
    assert [each.cached_tokens for each in found] == [{1: 7}, {}, {}]
    assert [each.step_id for each in found] == [1, 2, 3]
    assert all(len(run.tokens) >= SLICE for run in runs[:-1])


@pytest.mark.parametrize("column", ["verified", "packed"])
def test_what_is_reported_for_each_step_is_joined_to_nothing(column: str) -> None:
    waiting = RowTurns()
    for step_id in range(3):
        gains = gained(step_id, step_id)
        if step_id == 1:
            getattr(gains, column)[1] = Verified(step_id, 3, 0) if column == "verified" else b"record"
        waiting.put("a", 1, gains)
    found = list(waiting.turn())
    assert runs_of(found) == [(1, [0]), (1, [1]), (1, [2])]
    assert [bool(getattr(each, column)) for each in found] == [False, True, False]


def test_what_one_request_gained_has_no_columns_of_others() -> None:
    runs = {uid: Run([uid], None, [Part(1, 1, 1)]) for uid in (1, 2)}
    gains = Gains(1, runs, {2: Verified(1, 3, 0)}, {1: b"one", 2: b"two"}, {1: 4, 2: 5})
    assert gains.of(1) == Gains(1, {1: runs[1]}, {}, {1: b"one"}, {1: 4})


def test_what_a_request_gains_waits_behind_its_prompt(slow: None) -> None:
    waiting = RowTurns()
    first, second = (LateRow(1, partial(TextDeltas, [name], [""], [[]], [None], [])) for name in "ab")
    for piece in (first, second):
        waiting.put("a", 1, piece)
    assert waiting.has("a", 1) and not waiting.has("a", 2) and not waiting.has("b", 1)
    waiting.put("a", 1, gained(1, 5))
    waiting.put("a", 2, gained(1, 6, uid=2))
    found: list[Waiting] = []
    while waiting:
        waiting.begin_turn()
        found += waiting.turn()
    in_order = [each if isinstance(each, LateRow) else runs_of([each])[0] for each in found]
    assert in_order == [first, (2, [6]), second, (1, [5])]


# --- in the service ---


def run(scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as harness:
            await scenario(harness)

    asyncio.run(main())


async def opened(harness: Harness, request_id: str, owner: str = "a", **sampling: object) -> int:
    harness.generate("Hi", request_id, terms=Terms(client=owner), **{"max_new_tokens": 90, **sampling})
    return (await harness.admitted()).uid


async def heard(harness: Harness) -> list[list[str]]:
    """Whose rows came, message by message."""
    await harness.settle()
    found = []
    while not harness.clients.heard.empty():
        _, message = harness.clients.heard.get_nowait()
        assert isinstance(message, TextDeltas)
        found.append(message.request_ids)
    return found


def test_rows_of_other_requests_never_wait_for_a_search(slow: None) -> None:
    async def scenario(harness: Harness) -> None:
        searching = [await opened(harness, f"s{i}", stop_regex=("x.*y",)) for i in range(2)]
        other = await opened(harness, "other", owner="b", stop_regex=("x",))
        plain = await opened(harness, "plain", stop=("END",))
        harness.commit(*((uid, IDS[:1], None) for uid in (*searching, other, plain)))
        assert await heard(harness) == [["plain", "s0"], ["other"], ["s1"]]
        for token in IDS[1:4]:
            harness.commit(*((uid, [token], None) for uid in (*searching, plain)))
        rows = list(itertools.chain.from_iterable(await heard(harness)))
        assert "plain" not in rows[3:], "at most one search before each of its rows"
        assert rows.count("s0") == rows.count("s1") == 2, "three steps, joined and cut in two"

    run(scenario)


PARTS, PER_PART = 6, PART_PAIRS // (1 + MAX_TOP) - 1


def scored_chunk() -> bytes:
    """What a chunk of a prompt has scored, of the first of `PARTS` parts to the last."""
    token = b"".join(struct.pack("<2d", -1.0, float(id_)) for id_ in range(1 + MAX_TOP))
    return token * (PARTS * PER_PART)


def test_log_probs_of_a_prompt_leave_between_other_requests_rows(slow: None) -> None:
    """A chunk's log-probs are named part by part. Rows of others go first, the request's own come after all parts."""

    async def scenario(harness: Harness) -> None:
        scored = await opened(harness, "scored", log_probs=LogProbParams(top=MAX_TOP, prompt_from=0))
        other = await opened(harness, "other", owner="b")
        of_prompt = [LogProbRows([], [scored_chunk()])]
        harness.inbox.send(TokenDeltas([other], [IDS[:1]], [None], [1], extensions=of_prompt, extended=[scored]))
        own = [LogProbRows([struct.pack("<2d", -1.0, float(IDS[0])) * (1 + MAX_TOP), b""])]
        rows = [scored, other], [IDS[:1], IDS[1:2]], [LENGTH, None], [1, 1]
        harness.inbox.send(TokenDeltas(*rows, extensions=own, extended=[scored, other]))
        for token in IDS[2:4]:
            await asyncio.sleep(0)
            harness.commit((other, [token], None))
        found = await heard(harness)
        assert found[0] == ["other"] and found.count(["scored"]) == PARTS + 1
        assert sum(names == ["other"] for names in found[: -len(found) // 2]) >= 2, found
        assert found[-1] == ["scored"]

    run(scenario)


def test_a_request_that_has_ended_has_no_more_rows(slow: None) -> None:
    async def scenario(harness: Harness) -> None:
        uids = [await opened(harness, f"s{i}", stop_regex=("x.*y",)) for i in range(3)]
        harness.commit(*((uid, IDS, LENGTH) for uid in uids))
        harness.say(Cancel("s2"))
        await harness.settle()
        assert not harness.service._requests and not harness.service.rows.turns
        rows = await heard(harness)
        assert sorted(itertools.chain.from_iterable(rows)) == ["s0", "s1", "s2"]

    run(scenario)


@needs_feature("recovery")
def test_a_new_scheduler_makes_again_what_has_not_left(slow: None) -> None:
    async def scenario(harness: Harness) -> None:
        harness.attach(recovery=RecoverySettings(enabled=True))

        def renew(generation: int) -> tuple[Inbox[ToFrontend], BatchOutlet[ToScheduler]]:
            harness.inbox, harness.scheduler = MemoryLink(ToFrontend), MemoryLink(ToScheduler)
            return harness.inbox, harness.scheduler

        harness.service.renew = renew
        uids = [await opened(harness, f"s{i}", stop_regex=("z.*y",)) for i in range(2)]
        harness.commit(*((uid, IDS[:3], None) for uid in uids))
        harness.inbox.send(Recover(1, "worker", "killed", 0.0))
        await harness.settle()
        left = {
            uid: 0 if admit.resumed is None else 3
            for uid, admit in [(each.uid, each) for each in (await harness.admitted(), await harness.admitted())]
        }
        assert sorted(left.values()) == [0, 3]
        harness.commit(*((uid, IDS[left[uid] :], LENGTH) for uid in uids))
        await harness.settle()
        texts = {"s0": "", "s1": ""}
        while not harness.clients.heard.empty():
            _, message = harness.clients.heard.get_nowait()
            assert isinstance(message, TextDeltas)
            for request_id, text in zip(message.request_ids, message.texts, strict=True):
                texts[request_id] += text
        whole = smollm2().decode(IDS, True)
        assert texts == {"s0": whole, "s1": whole}

    run(scenario)


def test_a_stopped_service_ends_requests_whose_search_waits(slow: None) -> None:
    async def scenario(harness: Harness) -> None:
        for index in range(3):
            uid = await opened(harness, f"s{index}", stop_regex=("x.*y",))
            harness.inbox.send(TokenDeltas([uid], [IDS], [None], [1]))

    run(scenario)


def test_a_search_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(automaton: Automaton, state: State, char: str) -> Move:
        raise IndexError("a fault")

    async def scenario(harness: Harness) -> None:
        uid = await opened(harness, "failing", stop_regex=("x.*y",))
        plain = await opened(harness, "plain")
        monkeypatch.setattr(Automaton, "move", fail)
        harness.commit((uid, IDS[:1], None), (plain, IDS[:1], None))
        rejected = await harness.heard(Rejected)
        assert (rejected.request_id, rejected.code) == ("failing", ErrorCode.FAILED)
        assert (await harness.heard(TextDeltas)).request_ids == ["plain"]
        assert (await harness.aborted()).uid == uid

    run(scenario)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("seed", range(5))
def test_answers_do_not_depend_on_turns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random steps, with turns that end after every search: texts, ids and counts as without."""

    async def scenario(harness: Harness) -> None:
        draw = random.Random(seed)
        asked = {"p": {"stop_regex": (r"s\w+s",)}, "q": {"stop_regex": ("bird$",)}, "r": {"stop": ("q",) * 5}}
        uids = {name: await opened(harness, name, owner=name, **each) for name, each in asked.items()}
        left = {name: list(IDS) for name in asked}
        while any(left.values()):
            rows = []
            for name, ids in left.items():
                cut = draw.randint(0, 3)
                if ids[:cut]:
                    rows.append((uids[name], ids[:cut], None if ids[cut:] else LENGTH))
                left[name] = ids[cut:]
            harness.commit(*rows)
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        await harness.settle()
        while not harness.clients.heard.empty():
            _, message = harness.clients.heard.get_nowait()
            assert isinstance(message, TextDeltas)
            for index, name in enumerate(message.request_ids):
                text, ids, _, _ = found.setdefault(name, ("", [], None, None))
                found[name] = (
                    text + message.texts[index],
                    ids + message.token_ids[index],
                    message.finishes[index],
                    message.usages[index].completion_tokens,
                )
            assert len(set(message.request_ids)) == len(message.request_ids)

    found: dict[str, tuple[str, list[int], Finish | None, int | None]] = {}
    run(scenario)
    expected, found = found, {}
    monkeypatch.setattr(rows, "time", Clock(TURN_S))
    run(scenario)
    assert found == expected
    assert expected["q"][0] == " the sky is blue and so is the sea, says the "
    assert {name: each[2] is not None for name, each in expected.items()} == dict.fromkeys("pqr", True)
