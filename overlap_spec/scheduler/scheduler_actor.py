"""The scheduler process: waits for the worker, sends the frontend the engine's limits, then runs the loop.

The frontend drains: it holds Shutdown back until its requests are done.
"""

from overlap_spec import features
from overlap_spec.messages import LivenessProbe, SchedulerFacts, Shutdown, Stats, ToScheduler, WorkerReady
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.scheduler.build import attach_features, build_scheduler
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.loop import Links

STEPS_OF_A_GENERATION = 10**12  # more than one scheduler plans: what requests report of their steps stays unambiguous


async def main(context: ActorContext) -> None:
    """Schedule until told to stop."""
    links = Links(
        context.step_inbox(features.link(ToScheduler, context.settings.features)),
        context.outlet_of_workers(),
        context.queued_outlet("frontend"),
        context.trace,
        lambda report: context.report_alive(draft=report.draft_state),
        lambda generation: context.queued_outlet("frontend", generation),
    )
    ready, early = await _worker_ready(links)
    if ready is None:
        return
    settings = context.settings
    scheduler = build_scheduler(ready, settings.scheduler, settings.cache, links, own=settings.features)
    attach_features(scheduler, settings)
    scheduler.tells_started = settings.recovery.enabled or settings.server.otlp is not None
    scheduler.planner.number_from(context.generation * STEPS_OF_A_GENERATION)
    scheduler.greet()
    scheduler.send_replies()
    context.ready(_facts(scheduler.limits, settings.cache.prefix_cache))
    for message in early:
        scheduler.dispatch(message)
    await scheduler.run()


async def _worker_ready(links: Links) -> tuple[WorkerReady | None, list[ToScheduler]]:
    """Wait for the worker. Returns None for it if the engine stops first, and what else arrived meanwhile."""
    early: list[ToScheduler] = []
    while True:
        message = await links.inbox.recv()
        match message:
            case WorkerReady():
                return message, early
            case LivenessProbe():
                links.report_alive(Stats())
            case Shutdown():
                return None, early
            case _:
                early.append(message)


def _facts(limits: Limits, prefix_cache: bool) -> SchedulerFacts:
    return SchedulerFacts(
        max_total_tokens=limits.pool_tokens,
        max_running_requests=limits.num_slots,
        context_length=limits.max_len,
        chunked_prefill_size=limits.chunk_tokens,
        steps_in_flight=limits.depth,
        prefix_cache_keys=limits.key_lookahead + 1 if prefix_cache and limits.shares_prefixes else 0,
    )
