"""The audit at the frontend: what it keeps of a request, and what it has run again."""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace
from support.fake_settings import fake_settings
from support.frontend_harness import LIMITS, Harness, serving
from support.small_tokenizers import smollm2

from overlap_spec.client.link import unpack_ids
from overlap_spec.config import AuditSettings
from overlap_spec.features.audit import Audit, frontend
from overlap_spec.frontend.hooks import Hooks
from overlap_spec.messages import (
    Abort,
    AuditReply,
    AuditReport,
    AuditRoom,
    Cancel,
    EngineLimits,
    Finish,
    FinishKind,
    GetAudit,
    Recover,
    Rejected,
)

IDS = smollm2().encode(" the sky is blue and so", False)


def run(scenario: Callable[[Harness], Awaitable[None]]) -> None:
    """A service that audits every request, one at a time."""

    async def main() -> None:
        async with serving(warm=False) as harness:
            settings = replace(fake_settings(), audit=AuditSettings(1.0))
            harness.service.attach(Hooks([frontend.attach(harness.service.parts(settings))]))
            harness.inbox.send(replace(LIMITS, extensions=(AuditRoom(5, 1, 2),)))
            await harness.settle()
            await scenario(harness)

    asyncio.run(main())


async def report(harness: Harness) -> AuditReport:
    harness.say(GetAudit("q"))
    return (await harness.heard(AuditReply)).report


def test_what_was_served_is_run_again_and_what_was_cut_off_is_not() -> None:
    async def scenario(harness: Harness) -> None:
        harness.generate("Hi", stop=("blue",))
        admit = await harness.admitted()
        harness.commit((admit.uid, IDS, None))
        assert (await harness.aborted()).uid == admit.uid
        audit = await harness.to_scheduler(Audit)
        assert audit.admit == admit and unpack_ids(audit.output) == IDS[:4] != IDS
        assert (await harness.clients.heard.get())[1].token_ids == [IDS[:4]]
        assert (await report(harness)).figures.backlog == 1

    run(scenario)


def test_a_request_that_was_ended_is_skipped() -> None:
    async def scenario(harness: Harness) -> None:
        harness.generate("Hi")
        uid = (await harness.admitted()).uid
        harness.commit((uid, IDS[:2], None))
        harness.say(Cancel("a"))
        await harness.to_scheduler(Abort)
        while not harness.clients.heard.empty():
            harness.clients.heard.get_nowait()
        assert list((await report(harness)).skipped_because.values()) == [1] and harness.nothing_more()

    run(scenario)


def test_audits_go_on_at_a_new_scheduler() -> None:
    async def scenario(harness: Harness) -> None:
        harness.service.renew = lambda generation: (harness.inbox, harness.scheduler)
        for name in "ab":
            harness.generate("Hi", name)
        uids = [(await harness.admitted()).uid for _ in range(2)]
        harness.commit(*((uid, IDS[:2], Finish(FinishKind.LENGTH)) for uid in uids))
        first = await harness.to_scheduler(Audit)
        harness.inbox.send(Recover(1, "worker", "killed", 0.0))
        assert (await harness.to_scheduler(Audit)).admit.uid == first.admit.uid + 1

    run(scenario)


def test_the_report_needs_the_operators_key() -> None:
    async def scenario(harness: Harness) -> None:
        harness.service._checks.admin_key = "secret"
        harness.say(GetAudit("q", "guess"))
        assert (await harness.heard(Rejected)).field == "api_key"
        harness.say(GetAudit("q", "secret"))
        assert (await harness.heard(AuditReply)).report.rate == 1.0

    run(scenario)


def test_nothing_is_chosen_where_the_engine_audits_nothing() -> None:
    async def scenario(harness: Harness) -> None:
        harness.inbox.send(EngineLimits(1000, 2000, 4, 49152))
        harness.generate("Hi")
        uid = (await harness.admitted()).uid
        request = harness.service._requests.by_uid(uid)
        assert request is not None and request.followers == ()

    run(scenario)
