"""What the frontend does when scheduler and worker are started again: the test plays both, before and after."""

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace
from support.frontend_harness import LIMITS, Harness, serving
from support.installed import needs_feature
from support.memory_link import MemoryLink
from support.small_tokenizers import smollm2

from overlap_spec.client.link import pack_ids
from overlap_spec.config import RecoverySettings
from overlap_spec.features.recovery.frontend import RecoveryHook, Replay
from overlap_spec.messages import (
    Cancel,
    Continued,
    ErrorCode,
    Finish,
    FinishKind,
    Flush,
    FlushCache,
    FlushDone,
    Flushed,
    Generate,
    GetStats,
    LogProbParams,
    LogProbRows,
    Memo,
    Recover,
    Rejected,
    Resumed,
    SamplingParams,
    Started,
    Stats,
    StatsReply,
    TextDeltas,
    TextPrompt,
    ToFrontend,
    TokenDeltas,
    ToScheduler,
)
from overlap_spec.runtime.transport import BatchOutlet, Inbox

LENGTH = Finish(FinishKind.LENGTH)
IDS = smollm2().encode(" the sky is blue and", False)


def run(scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as harness:
            harness.attach(recovery=RecoverySettings(enabled=True))

            def renew(generation: int) -> tuple[Inbox[ToFrontend], BatchOutlet[ToScheduler]]:
                harness.inbox, harness.scheduler = MemoryLink(ToFrontend), MemoryLink(ToScheduler)
                return harness.inbox, harness.scheduler

            harness.service.renew = renew
            await scenario(harness)

    asyncio.run(main())


async def die(harness: Harness, actor: str = "worker", generation: int = 1) -> None:
    """An actor dies. What its scheduler has sent by then, and was not read, is of no account."""
    harness.inbox.send(Recover(generation, actor, f"{actor}: was killed", time.monotonic()))
    await harness.settle()


async def open_one(harness: Harness, request_id: str = "a", started: bool = True, **sampling: object) -> int:
    """Returns the uid of a request that has a slot, unless it is not `started`."""
    harness.generate(request_id=request_id, **sampling)
    uid = (await harness.admitted()).uid
    if started:
        harness.inbox.send(Started([uid]))
        await harness.settle()
    return uid


def test_a_request_goes_on_at_the_next_token() -> None:
    async def scenario(harness: Harness) -> None:
        harness.generate("Well,", seed=7, max_new_tokens=8, stop=("blue",), min_p=0.5)
        first = await harness.admitted()
        assert first.resumed is None
        harness.inbox.send(TokenDeltas([first.uid], [IDS[:2]], [None], [1], cached_tokens={first.uid: 4}))
        text = "".join((await harness.heard(TextDeltas)).texts)
        old = harness.inbox
        await die(harness)
        old.send(TokenDeltas([first.uid], [[9, 9]], [None], [2]))
        again = await harness.admitted()
        resumed = Resumed(pack_ids(IDS[:2]), cached_tokens=4, verify_steps=1)
        assert again == replace(first, resumed=resumed)
        harness.commit((first.uid, IDS[2:], None))
        last = await harness.heard(TextDeltas)
        assert (text + last.texts[0], last.token_ids[0]) == (" the sky is ", IDS[2 : 2 + len(last.token_ids[0])])
        assert last.finishes == [Finish(FinishKind.STOP, "blue")]
        assert last.usages[0].completion_tokens == 2 + len(last.token_ids[0])
        await harness.aborted()
        assert harness.nothing_more()

    run(scenario)


@needs_feature("log_probs")
def test_a_request_without_a_token_begins_again_with_all_its_prompt_log_probs() -> None:
    async def scenario(harness: Harness) -> None:
        asked = LogProbParams(prompt_from=0)
        harness.generate([5, 6, 7], log_probs=asked)
        admit = await harness.admitted()
        records = [struct.pack("<2d", -1.0, float(token)) for token in (6, 7)]
        uid = admit.uid
        harness.inbox.send(TokenDeltas([], [], [], [], extensions=[LogProbRows([], [records[0]])], extended=[uid]))
        part = (await harness.heard(TextDeltas)).prompt_log_probs["a"]
        assert (part.first, len(part.records)) == (0, 2 * len(records[0]))
        await die(harness)
        assert await harness.admitted() == admit
        of_step = LogProbRows([struct.pack("<2d", -2.0, float(IDS[0]))], [b"".join(records)])
        harness.inbox.send(TokenDeltas([uid], [IDS[:1]], [LENGTH], [0], 1, extensions=[of_step], extended=[uid]))
        part = (await harness.heard(TextDeltas)).prompt_log_probs["a"]
        assert (part.first, len(part.records)) == (0, 3 * len(records[0])), "one for each token of the prompt"
        row = await harness.heard(TextDeltas)
        assert row.token_ids == [IDS[:1]] and not row.prompt_log_probs

    run(scenario)


def test_whoever_is_gone_or_held_back_is_not_admitted_twice() -> None:
    async def scenario(harness: Harness) -> None:
        uids = [await open_one(harness, request_id) for request_id in "ab"]
        harness.say(Cancel("a"))
        await harness.aborted()
        await harness.heard(TextDeltas)
        await die(harness)
        assert (await harness.admitted()).uid == uids[1]
        harness.say(Cancel("b"))
        await harness.heard(TextDeltas)
        assert (await harness.aborted()).uid == uids[1]
        assert harness.nothing_more()

    run(scenario)


def test_new_requests_wait_behind_those_that_go_on() -> None:
    async def scenario(harness: Harness) -> None:
        uids = [await open_one(harness, request_id) for request_id in "ab"]
        await die(harness)
        harness.generate(request_id="c")
        admitted = [(await harness.admitted()).uid for _ in range(3)]
        assert admitted[:2] == uids and admitted[2] not in uids

    run(scenario)


@pytest.mark.parametrize(
    ("deaths", "started", "ended"),
    [
        (["worker", "worker"], True, True),
        (["worker-1", "worker-3"], True, True),
        (["worker", "scheduler"], True, False),
        (["scheduler", "worker"], True, False),
        (["worker", "worker"], False, False),
    ],
)
def test_a_request_is_ended_that_was_in_the_batch_at_two_deaths_of_the_worker(
    deaths: list[str], started: bool, ended: bool
) -> None:
    async def scenario(harness: Harness) -> None:
        uid = await open_one(harness, "poison", started)
        for generation, actor in enumerate(deaths, 1):
            await die(harness, actor, generation)
            if generation < len(deaths) or not ended:
                assert (await harness.admitted()).uid == uid
                harness.inbox.send(Started([uid] if started else []))
                await harness.settle()
        if ended:
            reply = await harness.heard(Rejected)
            assert reply.code is ErrorCode.FAILED
            assert "'poison'" in reply.message and "worker" in reply.message
        assert harness.nothing_more()
        harness.say(GetStats("s"))
        stats = (await harness.heard(StatsReply)).stats
        assert (stats.recoveries_total, stats.poisonous_total) == (2, ended)
        assert stats.replayed_total == 2 - ended

    run(scenario)


def test_flushes_are_asked_for_again_and_figures_go_on() -> None:
    async def scenario(harness: Harness) -> None:
        harness.inbox.send(Stats(num_running=3, steps_total=10, accepted_per_position_total=(4, 2)))
        harness.say(Flush("f"))
        await harness.to_scheduler(FlushCache)
        await die(harness)
        await harness.to_scheduler(FlushCache)
        harness.inbox.send(LIMITS)
        harness.inbox.send(Stats(num_running=1, steps_total=5, accepted_per_position_total=(1, 1)))
        harness.inbox.send(Flushed(True))
        assert (await harness.heard(FlushDone)).success
        harness.say(GetStats("s"))
        stats = (await harness.heard(StatsReply)).stats
        assert (stats.num_running, stats.steps_total) == (1, 15)
        assert stats.accepted_per_position_total == (5, 3)
        assert stats.recoveries_total == 1 and stats.last_recovery > 0

    run(scenario)


def test_figures_of_all_schedulers_add_up() -> None:
    async def scenario(harness: Harness) -> None:
        for generation in (1, 2):
            harness.inbox.send(Stats(steps_total=10))
            await harness.settle()
            await die(harness, generation=generation)
        harness.inbox.send(Stats(steps_total=1))
        await harness.settle()
        harness.say(GetStats("s"))
        assert (await harness.heard(StatsReply)).stats.steps_total == 21

    run(scenario)


def test_another_frontend_counts_on_from_what_the_scheduler_has_kept() -> None:
    """Two schedulers are gone, and then the frontend: the third scheduler stays, with its own figures."""
    told: list[Memo] = []

    async def before(harness: Harness) -> None:
        for generation in (1, 2):
            await open_one(harness, str(generation), started=False)
            harness.inbox.send(Stats(steps_total=10, accepted_per_position_total=(2, 1)))
            await harness.settle()
            await die(harness, generation=generation)
        harness.inbox.send(LIMITS)
        await harness.settle()
        told.extend(each for each in harness.scheduler.drain() if isinstance(each, Memo))

    async def after(harness: Harness) -> None:
        hook = next(hook for hook in harness.service.hooks.all if isinstance(hook, RecoveryHook))
        hook.recoveries.count(3)
        for message in (told[-1], LIMITS):
            harness.inbox.send(message)
        harness.inbox.send(Stats(steps_total=5, accepted_per_position_total=(1, 1)))
        await harness.settle()
        harness.say(GetStats("s"))
        stats = (await harness.heard(StatsReply)).stats
        assert (stats.steps_total, stats.accepted_per_position_total) == (25, (5, 3))
        assert (stats.recoveries_total, stats.replayed_total) == (3, 3) and stats.last_recovery > 0
        assert not harness.scheduler.drain(), "nothing is new"
        harness.say(Generate("a", TextPrompt("Hi"), SamplingParams(), continued=Continued(pack_ids(IDS[:1]), 0, 0, 0)))
        await harness.admitted()
        harness.inbox.send(Stats())
        assert (await harness.to_scheduler(Memo)).feature == "recovery"

    run(before)
    run(after)


def test_a_request_goes_on_behind_what_was_served() -> None:
    """A run may be longer than the request; what is cut off is no output."""

    async def scenario(harness: Harness) -> None:
        uid = await open_one(harness, max_new_tokens=3)
        replay = harness.service._requests.by_uid(uid).follower(Replay)
        harness.commit((uid, IDS, None))
        await harness.settle()
        assert replay.output.tolist() == IDS[:3] != IDS

    run(scenario)


def test_without_recovery_nothing_is_kept() -> None:
    async def scenario(harness: Harness) -> None:
        harness.attach()
        harness.generate()
        uid = (await harness.admitted()).uid
        request = harness.service._requests.by_uid(uid)
        assert request is not None and request.followers == ()

    run(scenario)
