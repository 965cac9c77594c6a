"""Times of a traced request, on a clock that a test sets."""

import asyncio

import pytest
from support.frontend_harness import serving
from support.small_tokenizers import smollm2

from overlap_spec.features.tracing import frontend
from overlap_spec.features.tracing.frontend import PhaseClock
from overlap_spec.frontend.open_requests import Gains, Run
from overlap_spec.frontend.output import Piece
from overlap_spec.messages import Finish, FinishKind, Phases, Started, Terms, TextDeltas

LENGTH = Finish(FinishKind.LENGTH)
IDS = smollm2().encode(" the sky is blue and so", False)


class Clock:
    """Time that goes on when a test says so."""

    now = 10.0

    def monotonic(self) -> float:
        return self.now


def row(clock: PhaseClock, finish: Finish | None = None) -> TextDeltas:
    reply = TextDeltas(["a"], [""], [[1]], [finish], [])
    clock.gained(Gains(1, {}, {}, {}, {}), Run([1], finish, []), Piece("", [1], finish), reply)
    return reply


def test_phases_follow_one_another_and_text_is_timed_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    monkeypatch.setattr(frontend, "time", time)
    clock = PhaseClock("a", 9.0)
    time.now = 12.0
    clock.started()
    time.now = 13.0
    clock.started()  # at a new scheduler
    for at, took in ((15.0, 0.25), (17.0, 0.5)):
        time.now = at
        clock.arrived()
        time.now += took
        reply = row(clock, LENGTH if at == 17.0 else None)
        assert bool(reply.phases) == (at == 17.0)
    assert reply.phases == {"a": Phases(9.0, 10.0, 12.0, 15.0, 17.0, 17.5, 0.75)}


@pytest.mark.parametrize("is_traced", [False, True])
def test_only_a_request_that_is_traced_tells_its_phases(is_traced: bool) -> None:
    async def scenario() -> None:
        async with serving() as harness:
            harness.generate("Hi", terms=Terms(is_traced=is_traced))
            admit = await harness.admitted()
            harness.inbox.send(Started([admit.uid]))
            harness.commit((admit.uid, IDS[:2], None))
            assert not (await harness.heard(TextDeltas)).phases
            harness.commit((admit.uid, IDS[2:], LENGTH))
            phases = (await harness.heard(TextDeltas)).phases
            assert list(phases) == (["a"] if is_traced else [])
            if is_traced:
                times = [getattr(phases["a"], name) for name in Phases.__struct_fields__[:6]]
                assert times == sorted(times) and times[0] == admit.arrived_at

    asyncio.run(scenario())
