"""Assembles a scheduler for a worker that is ready, and attaches features to it."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_spec import features
from overlap_spec.config import CacheSettings, SchedulerSettings, Settings
from overlap_spec.messages import WorkerReady
from overlap_spec.scheduler.hooks import Hooks, SchedulerHook
from overlap_spec.scheduler.ledger import Ledger
from overlap_spec.scheduler.limits import ChunkSizes, Limits
from overlap_spec.scheduler.loop import Links, Scheduler
from overlap_spec.scheduler.planner import Planner, Policies
from overlap_spec.scheduler.prefix_cache import NoPrefixCache, PagePool, PrefixCache
from overlap_spec.scheduler.queues import QUEUE_ORDERS, Admission, RequestQueues
from overlap_spec.scheduler.requests import NoStates, RequestPages
from overlap_spec.scheduler.snapshots import SnapshotCache, SnapshotStates
from overlap_spec.scheduler.stats import Counters, Reporter
from overlap_spec.scheduler.width import BatchWidths, WidthPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a feature may reach of a scheduler."""

    settings: Settings
    limits: Limits
    hooks: Hooks
    queues: RequestQueues
    planner: Planner
    links: Links
    reporter: Reporter


def attach_features(scheduler: Scheduler, settings: Settings) -> None:
    """Attach the features that are there, as far as the settings ask for them."""
    hooks = scheduler.hooks
    own = hooks, scheduler.queues, scheduler.planner, scheduler.links, scheduler.reporter
    parts = Parts(settings, scheduler.limits, *own)
    for module in features.modules(features.SCHEDULER, settings.features):
        hook: SchedulerHook | None = module.attach(parts)
        if hook is not None:
            hooks.add(features.name_of(module), hook)
    if scheduler.limits.step_costs.widths and type(scheduler.planner.widths.policy) is WidthPolicy:
        log.warning("every step is as wide as the window: the feature that chooses widths is not there")


def build_scheduler(
    ready: WorkerReady,
    settings: SchedulerSettings,
    cache: CacheSettings,
    links: Links,
    clock: Callable[[], float] = time.monotonic,
    own: Sequence[str] = (),
) -> Scheduler:
    """Assemble its parts; features attach later. The loop may be one of a feature, also of one's `own` packages.

    Raises: ConfigError if the worker's pool holds no request.
    """
    limits = Limits(ready, settings)
    memory = _memory(limits, cache, clock)
    chunks = ChunkSizes(limits, ready.prefill_costs, settings.max_gap_s, settings.windows_with_prompts, ready.two_parts)
    order = QUEUE_ORDERS[settings.schedule_policy](memory)
    hooks = Hooks()
    queues = RequestQueues(memory, limits.num_slots, order, hooks)
    counters = Counters(runs=[0] * (limits.width + 1))
    policies = Policies(BatchWidths(limits), chunks)
    admission = Admission(queues, limits)
    planner = Planner(queues, admission, limits, counters, policies, hooks)
    loop: type[Scheduler] = features.given(features.SCHEDULER, "loop", own, links) or Scheduler
    ledger = Ledger(queues, limits, counters, policies, hooks)
    reporter = Reporter(queues, limits, counters, clock, hooks)
    return loop(queues, planner, ledger, reporter, links, hooks)


def _memory(limits: Limits, cache: CacheSettings, clock: Callable[[], float]) -> RequestPages:
    """Pages with a prefix cache, or without one: the flag is given, or there is no room for a snapshot of the state."""
    pool = PagePool(limits.num_pages)
    sizes = pool, limits.page_size, limits.key_lookahead, clock
    if cache.prefix_cache and limits.num_snapshots:
        snapshots = SnapshotCache(*sizes, limits.num_snapshots)
        return RequestPages(pool, snapshots, limits, SnapshotStates(snapshots, limits, cache.snapshot_interval))
    is_on = cache.prefix_cache and limits.shares_prefixes
    if cache.prefix_cache and not is_on:
        log.info("the prefix cache is off: layers of the target have a recurrent state, and there is room for no copy")
    return RequestPages(pool, (PrefixCache if is_on else NoPrefixCache)(*sizes), limits, NoStates())
