"""The scheduler's invariants after every event, checked from scratch: it costs far more than a step.

Each function recomputes one account from its sources.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from overlap_spec.scheduler.loop import Scheduler
from overlap_spec.scheduler.prefix_cache import Node, PrefixCache
from overlap_spec.scheduler.queues import MOST_PASSED, LongestPrefix, WaitingQueue
from overlap_spec.scheduler.requests import Request, Step
from overlap_spec.scheduler.snapshots import SnapshotCache
from support.plans import is_audit
from support.scheduler_features import audits_of


def check_invariants(scheduler: Scheduler, device_lengths: Mapping[int, int]) -> None:
    """Check everything. `device_lengths`: by slot, how many tokens the device has committed, as far as it got.

    Raises: AssertionError.
    """
    placed = scheduler.queues.running + scheduler.queues.leaving
    check_queues(scheduler, placed)
    check_steps(scheduler, placed)
    check_pages(scheduler, placed)
    check_cache(scheduler, placed)
    if isinstance(cache := scheduler.queues.memory.cache, SnapshotCache):
        check_snapshots(scheduler, cache, placed)
    if "audit" in scheduler.hooks.by_name:
        check_audits(scheduler)
    for request in placed:
        check_request(scheduler, request)
        if request.prefilled_len == request.target:
            length = device_lengths.get(request.slot, len(request.tokens))
            assert len(request.tokens) <= length, f"{len(request.tokens)} tokens committed, the device knows {length}"
            dropped = request.finish is not None or request.is_broken  # late results are, and the bound
            assert dropped or length <= request.reserved_len, f"device length {length} > {request.reserved_len}"


def check_queues(scheduler: Scheduler, placed: list[Request]) -> None:
    """Every request is in one queue, in order of arrival; slots have one owner; work is never left waiting."""
    queues = scheduler.queues
    slots = [request.slot for request in placed] + queues.free_slots
    assert sorted(slots) == list(range(scheduler.limits.num_slots)), f"slots lost or shared: {slots}"
    assert all(a.order < b.order for a, b in pairwise(queues.running)), "running out of order"
    assert queues.most_growth == sum(each.committed_limit - each.target for each in queues.running)
    check_waiting(queues.waiting)
    check_order(scheduler)
    unfinished = [request for request in queues.running if request.planned_len < request.target]
    assert queues.unfinished == unfinished, "a prompt is not known to be unfinished, or is finished"
    assert all(request.running and request.finish is None for request in queues.running)
    assert all(not request.running and request.in_flight for request in queues.leaving), "left, but not let go of"
    assert all(not request.pages and request.slot < 0 and not request.in_flight for request in queues.waiting)
    unfinished = [
        request.uid for request in [*placed, *queues.waiting, *queues.held.values()] if request.finish is None
    ]
    assert sorted(unfinished) == sorted(queues.open), "a request was lost"


def check_waiting(waiting: WaitingQueue) -> None:
    """Clients have requests that have never run. Their order is not checked here: threads encode long prompts."""
    assert len(waiting) == len(list(waiting)), "waiting requests are miscounted"
    assert all(waiting.turns.values()), "a client that waits for nothing has a turn"
    assert all(a.order < b.order for a, b in pairwise(waiting.returned)), "returned out of order"
    for client, requests in waiting.turns.items():
        assert all(not request.order and request.admit.client == client for request in requests), "in another's queue"


def check_order(scheduler: Scheduler) -> None:
    """No request passes one that has begun before. With `lpm` a longer cached prefix begins first, bounded times."""
    queues = scheduler.queues
    assert all(request.passed <= MOST_PASSED for request in queues.open.values()), "passed too often"
    if not isinstance(queues.waiting.order, LongestPrefix):
        assert not any(request.passed for request in queues.open.values()), "one that came later has begun before"
    if scheduler.planner.counters.computed_again:
        return  # any request may have begun again, not the youngest alone
    if queues.running and queues.waiting.returned:
        assert queues.running[-1].order < queues.waiting.returned[0].order, "a younger request runs before an older one"
    for victim in queues.leaving:
        passed = victim.finish is None and any(request.order > victim.order for request in queues.running)
        assert not passed, "a younger request passed a preempted one"


def check_steps(scheduler: Scheduler, placed: list[Request]) -> None:
    """The counts of requests are those of the steps in flight."""
    assert len(scheduler.inflight) <= scheduler.limits.depth
    steps: Counter[int] = Counter()
    least: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for windows, chunks, width in parts_in_flight(scheduler):
        steps.update([request.uid for request in windows] + [request.uid for request, _ in chunks])
        first = [request.uid for request, end in chunks if end == request.target]
        for uid, tokens in [*((request.uid, width) for request in windows), *((uid, 1) for uid in first)]:
            least[uid] += 1
            most[uid] += tokens
    for request in placed:
        known = (request.in_flight, request.pending_min, request.pending_max)
        assert known == (steps[request.uid], least[request.uid], most[request.uid]), f"steps in flight: {known}"
    assert steps.keys() <= {request.uid for request in placed}, "a step in flight holds a request without a slot"


def parts_in_flight(scheduler: Scheduler) -> list[tuple[list[Request], list[tuple[Request, int]], int]]:
    """Windows, chunks and the windows' width of each step in flight; no windows if their result has been settled."""
    steps = [(step.windows, step.chunks, step.plan.width) for step in scheduler.inflight]
    if scheduler.ledger.awaits_prompts:
        assert steps[0][0] and steps[0][1], "a step of one part is halfway"
        steps[0] = ([], *steps[0][1:])
    return steps


def check_request(scheduler: Scheduler, request: Request) -> None:
    """Lengths are in order, and pages cover what steps in flight may write."""
    limits = scheduler.limits
    assert request.cached_len <= request.prefilled_len <= request.planned_len <= request.target <= len(request.tokens)
    assert request.cached_len % limits.page_size == 0 and request.cached_len < request.target
    assert len(request.pages) <= limits.max_table_pages, "more pages than the worker's table has columns"
    if request.finish is None:
        assert len(request.tokens) < request.committed_limit, "ran past its length"
        sure = len(request.tokens) + request.pending_min
        assert sure <= request.committed_limit, "a step is planned for a request that its steps in flight finish"
        widths = [width for step in scheduler.inflight for width in widths_of(step, request)]
        written = request.reserved_len + widths[-1] if request.pending_max else request.planned_len
        assert limits.pages_for(written) <= len(request.pages), f"{written} positions in {len(request.pages)} pages"


def widths_of(step: Step, request: Request) -> list[int]:
    """The width of the windows that a step proposes for a request; none if it has no part in it."""
    if request in step.windows:
        return [step.plan.width]
    prompts = step.plan.first_width or step.plan.width
    return [prompts for each, _ in step.chunks if each is request]


def check_pages(scheduler: Scheduler, placed: list[Request]) -> None:
    """Allocated + cached + free = total; every page has the holders that the pool counts."""
    pool, cache = scheduler.queues.memory.pool, scheduler.queues.memory.cache
    held = [page for request in placed for page in request.pages]
    lent = lent_pages(scheduler)
    assert len(lent) == len(set(lent)) and not set(lent) & set(held), "a lent page is another's too"
    held += lent
    cached = [page for node in cache.nodes() for page in node.pages]
    owned, kept, free = set(held), set(cached), set(pool.free)
    assert len(cached) == len(kept) == cache.num_pages, "a page is cached twice"
    counts = [0] * len(pool.holders)
    for page in (*held, *cached):
        counts[page] += 1
    assert counts == list(pool.holders), "holders miscounted"
    assert not (owned | kept) & free and 0 not in owned | kept | free
    assert len(pool.free) == len(free), "a page is free twice"
    cached_only = len(kept - owned)
    assert len(owned) + cached_only + len(free) == pool.num_total, "pages leaked"
    assert cached_only == cache.num_evictable, "a cached page is locked without a request, or evictable in use"
    tables = Counter(page for request in placed for page in request.pages[request.num_shared :])
    assert not tables.keys() & kept and all(count == 1 for count in tables.values()), "a private page is shared"


def lent_pages(scheduler: Scheduler) -> list[int]:
    """Pages that audits have."""
    if "audit" not in scheduler.hooks.by_name:
        return []
    return [page for run in audits_of(scheduler).running for page in run.pages]


def check_audits(scheduler: Scheduler) -> None:
    """Audits have slots of their own, all their pages at once, and at most one step in flight."""
    audits, limits = audits_of(scheduler), scheduler.limits
    slots = [run.slot for run in audits.running] + audits.free_slots
    room = audits.room
    own = range(room.first_slot, room.first_slot + room.num_slots)
    assert sorted(slots) == list(own), f"slots of audits lost or shared: {slots}"
    assert room.first_slot > limits.num_slots, "audits have a slot of requests, or the dummy"
    assert sum(is_audit(step.plan) for step in scheduler.inflight) <= 1
    for run in audits.running:
        assert len(run.pages) == limits.pages_for(len(run.tokens)) <= limits.max_table_pages
        assert run.request.prompt_len <= len(run.tokens) and run.planned_len < len(run.tokens)
        assert len(run.drawn) == len(run.margins) <= max(run.planned_len - run.request.prompt_len + 1, 0)
    assert all(not run.pages and run.slot < 0 and not run.planned_len for run in audits.waiting)
    known = {run.request.uid for run in [*audits.running, *audits.waiting] if run.audit.admit.sampling.grammar}
    assert known <= audits.held.keys(), "its grammar was forgotten"
    assert not known & {request.uid for request in audits._ended}, "its grammar was forgotten"


def check_cache(scheduler: Scheduler, placed: list[Request]) -> None:
    """Locks are those of the requests; a request's shared pages are those of the path it locks."""
    cache = scheduler.queues.memory.cache
    locks: Counter[int] = Counter()
    for request in placed:
        path = _path(request.node)
        locks.update(id(node) for node in path)
        shared = [page for node in reversed(path) for page in node.pages]
        assert shared == request.pages[: request.num_shared], "locks pages that it does not use"
        check_salts(path, request, scheduler.limits.key_lookahead, scheduler.limits.page_size)
    for node in cache.nodes():
        assert node.locks == locks[id(node)], "lock leaked"
        assert bool(node.pages) != bool(node.salt), "a node is of pages, or of a salt"
        assert not node.salt or not any(above.salt for above in _path(node)[1:]), "a salt below a salt"
        assert node.parent is not None and node.queued | bool(node.children) | bool(node.locks)
        assert not node.salt or node.children or node.locks, "a salt is kept of which nothing is cached"
    check_shares(cache)


def check_snapshots(scheduler: Scheduler, cache: SnapshotCache, placed: list[Request]) -> None:
    """Each is free, of a node where it may be, or of a request; whoever waits for one locks the path to it."""
    limits, waiting = scheduler.limits, [each for each in placed if each.restored >= 0]
    attached = {node.snapshot: node for node in cache.nodes() if node.snapshot >= 0}
    kept = [snapshot for request in placed for _, snapshot in request.kept]
    everywhere = sorted([*cache.free, *attached, *kept])
    assert everywhere == list(range(limits.num_snapshots)), f"snapshots lost, or twice somewhere: {everywhere}"
    assert attached == dict(cache.places), "a snapshot is not where it is looked for"
    for node in attached.values():
        length = sum(len(above.pages) for above in _path(node)) * limits.page_size
        assert length and length % limits.state_chunk == 0, f"a snapshot after {length} positions"
    assert +cache.readers == Counter(request.restored for request in waiting), "readers miscounted"
    for request in waiting:
        assert request.node.snapshot == request.restored and request.planned_len == request.cached_len
    for request in placed:
        assert all(request.cached_len < position <= request.planned_len for position, _ in request.kept)


def check_salts(path: list[Node], request: Request, lookahead: int, page_size: int) -> None:
    """Above its salt's node a request has the public pages of its prompt, and below it all others."""
    admit = request.admit
    num_public = max(0, admit.public_len - lookahead) // page_size if admit.salt else request.num_shared
    at = next((i for i, node in enumerate(path) if node.salt), 0)
    salts = [node.salt for node in path if node.salt]
    assert salts == [admit.salt] or (not salts and request.num_shared <= num_public), "uses pages of another salt"
    assert sum(len(node.pages) for node in path[at:]) == min(num_public, request.num_shared), "shares what is private"


def check_shares(cache: PrefixCache) -> None:
    """Pages and salts are counted for the name in the salt; shares without any are forgotten."""
    pages, salts = Counter[str](), Counter[str]()
    for node in cache.nodes():
        salt = next((above.salt for above in _path(node) if above.salt), "")
        name = salt.partition("\0")[0] if "\0" in salt else ""
        assert node.share is cache.shares[name], "in another's share"
        pages[name] += len(node.pages)
        salts[name] += bool(node.salt)
    assert {name: (each.num_pages, each.num_salts) for name, each in cache.shares.items()} == {
        name: (pages[name], salts[name]) for name in {"", *pages}
    }


def _path(node: Node) -> list[Node]:
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path
