"""Admission, the waiting queue, the running batch and the requests that are leaving, with the slots.

Requests that run are ordered by age: by when they started first. A preempted one keeps its age, and comes back before
the others that wait. A slot and its pages are free only when their request is done *and* in no step in
flight:

    waiting --start--> running --leave--> leaving --(last step settles)--> gone, or waiting if preempted

A new request that a feature holds is queued when it is let go of (`hooks.py`).

**The waiting queue**: clients take turns, and within a client `--schedule-policy` chooses.

    returned   [r3 r7]                      preempted requests, oldest first: they have had their turn, and go first
    turns      alice: [a4 a5 a6 ..]         the client whose turn it is; when one of its requests starts, it goes last
               bob:   [b9]

A new client has its turn after one request of each client that waits already, however many requests those have. Whose
turn it is keeps it until its request fits, so a large request waits for no smaller one that came later.

**Admission**: a request is refused if it can never run, and waits if it would soon cause a preemption. The new-token
ratio estimates how much of `max_new_tokens` a request will really use: it decreases with every step and rises after a
preemption. What requests of a group have in common, prompt and lists of tokens, is kept once when they are admitted:

    Admit --(equal to one before)--> the same objects     tokens: shared until a request gets a slot, and writes there
"""

from array import array
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import islice
from operator import attrgetter
from typing import Protocol
from weakref import WeakValueDictionary

from msgspec.structs import replace

from overlap_spec.messages import LARGE_FIELDS, TOKEN_BYTES, Admit, SamplingParams
from overlap_spec.runtime.heap import Repeated
from overlap_spec.scheduler.hooks import Hooks
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.prefix_cache import Match, Node
from overlap_spec.scheduler.requests import Request, RequestPages, unpack_tokens

MOST_PASSED = 16  # requests that may go before the oldest one
MOST_MATCHED = 32  # requests that are looked up in the prefix cache: the oldest


class QueueOrder(Protocol):
    """Chooses from the waiting requests of one client."""

    def next(self, waiting: deque[Request]) -> Request:
        """The one whose turn it is. `waiting`: oldest first, and not empty."""


class FirstCome:
    """The oldest."""

    def __init__(self, memory: RequestPages) -> None: ...

    def next(self, waiting: deque[Request]) -> Request:
        return waiting[0]


class LongestPrefix:
    """The one with the longest cached prefix, but the oldest after it has been passed `MOST_PASSED` times."""

    def __init__(self, memory: RequestPages) -> None:
        self._memory = memory

    def next(self, waiting: deque[Request]) -> Request:
        oldest = waiting[0]
        if len(waiting) == 1 or oldest.passed >= MOST_PASSED:
            return oldest
        return max(islice(waiting, MOST_MATCHED), key=lambda request: len(self._memory.match(request).pages))


QUEUE_ORDERS: dict[str, Callable[[RequestPages], QueueOrder]] = {"fcfs": FirstCome, "lpm": LongestPrefix}


AGE = attrgetter("order")


class WaitingQueue:
    """Every request that waits for a slot. `order` chooses within a client."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.returned: list[Request] = []
        self.turns: OrderedDict[str, deque[Request]] = OrderedDict()
        self._num_new = 0

    def __len__(self) -> int:
        return self._num_new + len(self.returned)

    def __iter__(self) -> Iterator[Request]:
        """The returned ones, then client by client."""
        yield from self.returned
        for requests in self.turns.values():
            yield from requests

    def append(self, request: Request) -> None:
        """Add a new request, the last of its client."""
        requests = self.turns.get(request.admit.client)
        if requests is None:
            requests = self.turns[request.admit.client] = deque()
        requests.append(request)
        self._num_new += 1

    def put_back(self, request: Request) -> None:
        """Add a preempted request."""
        insort(self.returned, request, key=AGE)

    def next(self) -> Request:
        """The one whose turn it is. The queue must not be empty."""
        if self.returned:
            return self.returned[0]
        return self.order.next(next(iter(self.turns.values())))

    def start(self, request: Request) -> None:
        """Take out a request that has got its slot; it was that client's turn."""
        client = request.admit.client
        if not request.order:
            oldest = self.turns[client][0]
            if request is not oldest:
                oldest.passed += 1
            self.turns.move_to_end(client)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take out a request; a client's turn remains where it is."""
        if request.order:
            self.returned.remove(request)
            return
        client = request.admit.client
        requests = self.turns[client]
        requests.remove(request)
        self._num_new -= 1
        if not requests:
            del self.turns[client]


class RequestQueues:
    """Owner of the requests' states and of the slots."""

    def __init__(self, memory: RequestPages, num_slots: int, order: QueueOrder, hooks: Hooks) -> None:
        self.memory = memory
        self._hooks = hooks
        self.open: dict[int, Request] = {}  # by uid: everything that has not finished
        self.held: dict[int, Request] = {}  # by uid: those that hooks hold
        self._started: list[int] = []  # uids of requests that have got a slot
        self.waiting = WaitingQueue(order)
        self.running: list[Request] = []  # oldest first
        self.unfinished: list[Request] = []  # of the running ones, those whose prompts are; oldest first
        self.leaving: list[Request] = []  # still in flight; nothing more is planned
        self.most_growth = 0  # tokens that the running ones could add at most when they got their slots
        self.num_limited = 0  # of the running ones, those that limit their speculation
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._num_started = 0

    @property
    def idle(self) -> bool:
        """True if no request waits, runs or leaves. (One that leaves has a step in flight.)"""
        return not (self.waiting or self.running or self.leaving)

    @property
    def only_leaving(self) -> bool:
        """True if no request waits or runs, nor will one that leaves come back."""
        return not (self.waiting or self.running or self.victims_leaving)

    @property
    def victims_leaving(self) -> bool:
        """True while a preempted request has not come back to the queue."""
        return any(request.finish is None for request in self.leaving)

    def hold(self, request: Request) -> None:
        """Keep a new request that hooks hold."""
        self.open[request.uid] = self.held[request.uid] = request

    def release(self, request: Request) -> None:
        self.enqueue(self.held.pop(request.uid))

    def enqueue(self, request: Request) -> None:
        """Put a new request at the end of its client's queue."""
        self.open[request.uid] = request
        self.waiting.append(request)

    def start(self, request: Request, match: Match) -> Request:
        """Give a waiting request a slot and pages."""
        self.waiting.start(request)
        for started in self._hooks.started:
            started(request)
        if not request.order:
            self._num_started += 1
            request.order = self._num_started
        request.own_tokens()
        self.memory.place(request, match)
        request.slot = self.free_slots.pop()
        request.running = True
        self.num_limited += request.is_limited
        self.most_growth += request.committed_limit - request.target
        self._started.append(request.uid)
        insort(self.running, request, key=AGE)
        insort(self.unfinished, request, key=AGE)
        return request

    def leave(self, request: Request) -> None:
        """Plan nothing more for a running request; it is gone as soon as no step in flight involves it."""
        request.running = False
        self.num_limited -= request.is_limited
        self.most_growth -= request.committed_limit - request.target
        self.running.remove(request)
        if request.planned_len < request.target:
            self.unfinished.remove(request)
        self.leaving.append(request)
        self.step_settled(request)

    def close(self, request: Request) -> None:
        """End a request whose `finish` is set, wherever it is."""
        del self.open[request.uid]
        if request.running:
            self.leave(request)
        elif request.slot < 0:
            if self.held.pop(request.uid, None) is None:
                self.waiting.remove(request)
            self._hooks.close(request)

    def take_started(self) -> list[int]:
        """Requests that have got a slot since the last call."""
        if not self._started:
            return self._started
        started, self._started = self._started, []
        return started

    def step_settled(self, request: Request) -> None:
        """Free the slot and pages of a leaving request if that was its last step in flight."""
        if request.in_flight:
            return
        self.leaving.remove(request)
        self.free_slots.append(request.slot)
        self.memory.release(request)
        if request.finish is None:
            self.waiting.put_back(request)
        else:
            self._hooks.close(request)


INITIAL_RATIO = 0.7
MIN_RATIO = 0.14 * INITIAL_RATIO
DECAY_STEPS = 600  # decode steps from the initial ratio down to the least
MAX_GROWTH = 4096  # tokens: no running request is expected to add more than this soon
STEPS_AHEAD = 20  # after a preemption, every remaining request must have room for this many more tokens


def why_refused(admit: Admit, limits: Limits, features: Set[str] = frozenset()) -> str:
    """Say why a request can never run here; "" if it can. The frontend has checked all this before.

    `features`: those that are attached.
    """
    num_prompt, ragged = divmod(len(admit.prompt), TOKEN_BYTES)
    max_new = admit.sampling.max_new_tokens
    if ragged or num_prompt == 0:
        return "prompt must hold at least one token (int32)"
    if max_new is None or admit.sampling.seed is None:
        return "max_new_tokens and seed must be set before a request reaches the scheduler"
    for feature in admit.sampling.needs:
        if feature not in features:
            return f"the request needs a {feature}, and this engine has no feature for that"
    if admit.salt and not limits.keeps_salts_apart:
        return "cache_salt: this engine's method guesses from what all requests have said, whatever their salts"
    asked = f"{num_prompt} prompt tokens + max_new_tokens {max_new}"
    if num_prompt + max_new > limits.max_len:
        return f"{asked} exceeds the maximum context length of {limits.max_len} tokens"
    if num_prompt + max_new > limits.max_request_tokens:
        return (
            f"{asked} exceeds {limits.max_request_tokens} tokens, the most that one request may use of the KV pool "
            f"of {limits.pool_tokens} (max_total_tokens)"
        )
    return ""


class NewTokenRatio:
    """Share of its remaining tokens that a running request is expected to produce, with hysteresis."""

    def __init__(self) -> None:
        self.value = INITIAL_RATIO

    def decay(self) -> None:
        """Note a decode step without a preemption."""
        self.value = max(MIN_RATIO, self.value - (INITIAL_RATIO - MIN_RATIO) / DECAY_STEPS)

    def raise_after_preemption(self, remaining: Iterable[Request]) -> None:
        """Expect at least the share of their tokens that the remaining requests have used."""
        num_used, num_allowed = 0, 1
        for request in remaining:
            num_used += len(request.tokens) - request.prompt_len + STEPS_AHEAD
            num_allowed += request.committed_limit - request.prompt_len
        self.value = max(self.value, min(1.0, num_used / num_allowed))

    def reset(self) -> None:
        """Start over, as no request runs."""
        self.value = INITIAL_RATIO


class Admission:
    """Moves requests from the queue into slots when there is room; none passes the one whose turn it is."""

    def __init__(self, queues: RequestQueues, limits: Limits) -> None:
        self.ratio = NewTokenRatio()
        self._queues = queues
        self._limits = limits

    def admit_next(self) -> Request | None:
        """Start the waiting request whose turn it is; None if it does not fit now."""
        queues, memory = self._queues, self._queues.memory
        if not queues.waiting or not queues.free_slots or queues.victims_leaving:
            return None
        if not queues.running:
            self.ratio.reset()
        request = queues.waiting.next()
        match = memory.match(request)
        needed = memory.pages_to_start(request) - len(match.pages)
        spare = memory.num_available - match.num_evictable - needed
        if spare < 0 or (queues.running and self._outgrow(spare * self._limits.page_size, request)):
            return None
        return queues.start(request, match)

    def _outgrow(self, room: int, newcomer: Request) -> bool:
        """Whether the running requests and this one are expected to add more tokens than there is room for."""
        left = newcomer.committed_limit - len(newcomer.tokens)
        if room >= (left + self._queues.most_growth) * self.ratio.value:
            return False  # as a rule, known without a look at every request
        others = [each.committed_limit - len(each.tokens) for each in self._queues.running]
        return room < sum([min(most, MAX_GROWTH) for most in (left, *others)]) * self.ratio.value


LARGE = 1 << 10  # bytes, from which on a value is compared with those before


class Admitted:
    """Makes requests of Admits."""

    def __init__(self) -> None:
        self._repeated = Repeated()
        # By the id of the prompt's bytes, which the requests that have these tokens keep.
        self._tokens: WeakValueDictionary[int, array[int]] = WeakValueDictionary()

    def request(self, admit: Admit, root: Node) -> Request:
        """The request, with the objects of those before it where they are equal."""
        sampling, prompt = self._shared(admit.sampling), admit.prompt
        if len(prompt) > LARGE:
            prompt = self._repeated.same("prompt", prompt)
        if sampling is not admit.sampling or prompt is not admit.prompt:
            admit = replace(admit, prompt=prompt, sampling=sampling)
        if len(prompt) <= LARGE or admit.resumed is not None:
            return Request(admit, root)
        tokens = self._tokens.get(id(prompt))
        if tokens is None:
            tokens = self._tokens[id(prompt)] = unpack_tokens(prompt)
        return Request(admit, root, tokens)

    def _shared(self, sampling: SamplingParams) -> SamplingParams:
        given = {field: value for field in LARGE_FIELDS if (value := getattr(sampling, field))}
        if not given:
            return sampling  # as of most
        return replace(sampling, **{field: self._repeated.same(field, value) for field, value in given.items()})
