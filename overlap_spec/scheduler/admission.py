"""Admission: a request is refused if it can never run, and waits if it would soon cause a preemption.

The new-token ratio estimates how much of `max_new_tokens` a request will really use: it decreases with every step
and rises after a preemption.

What requests of a group have in common, prompt and lists of tokens, is kept once when they are admitted:

Admit --(equal to one before)--> the same objects     tokens: shared until a request gets a slot, and writes there
"""

from array import array
from collections.abc import Iterable, Set
from weakref import WeakValueDictionary

from msgspec.structs import replace

from overlap_spec.messages import LARGE_FIELDS, TOKEN_BYTES, Admit, SamplingParams
from overlap_spec.runtime.heap import Repeated
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.prefix_cache import Node
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.requests import Request, unpack_tokens

INITIAL_RATIO = 0.7
MIN_RATIO = 0.14 * INITIAL_RATIO
DECAY_STEPS = 600  # decode steps from the initial ratio down to the least
MAX_GROWTH = 4096  # tokens: no running request is expected to add more than this soon
STEPS_AHEAD = 20  # after a preemption, every remaining request must have room for this many more tokens


def why_refused(admit: Admit, limits: Limits, features: Set[str] = frozenset()) -> str:
    """Say why a request can never run here; "" if it can. The tokenizer has checked all this before.

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
