"""The links between the actors of a ring in one process; they check the messages that pass.

Whenever the scheduler reads its inbox, its invariants are checked from scratch, against the lengths that the device
has by then: it may be ahead of what the scheduler knows, and must not be ahead of what the scheduler reserved.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from overlap_spec import features
from overlap_spec.client.link import Arrival
from overlap_spec.client.log_probs import TokenLogProb, read_log_probs
from overlap_spec.messages import (
    Finish,
    Phase,
    Rejected,
    StepPlan,
    StepResult,
    TextDeltas,
    ToClient,
    ToScheduler,
    ToWorker,
    TreePaths,
    Usage,
    Verified,
    find,
)
from overlap_spec.scheduler.loop import Scheduler
from support.memory_link import MemoryLink
from support.plans import is_audit, parts_of
from support.scheduler_invariants import check_invariants

CLIENT = 1
DeviceLengths = Callable[[], dict[int, int]]  # by slot, tokens that the device has committed


@dataclass
class Answer:
    """The answer that a client was sent for one request."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    parts_of_prompt: list[TokenLogProb] = field(default_factory=list)  # before the first row with tokens
    text: str = ""
    finish: Finish | None = None
    usage: Usage | None = None
    verified: list[tuple[Verified, int]] = field(default_factory=list)  # by step, with the tokens that it added
    rejected: Rejected | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    grew: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryClients:
    """The client link of a ring: one client, whose requests are kept by id.

    What answers no request of `answers` waits in `others`: a test may speak through a client of its own.
    """

    def __init__(self) -> None:
        self.said: asyncio.Queue[tuple[int, Arrival]] = asyncio.Queue()
        self.answers: dict[str, Answer] = {}
        self.others: asyncio.Queue[ToClient] = asyncio.Queue()

    def send(self, client: int, message: ToClient) -> None:
        if not self.answers:
            self.others.put_nowait(message)
            return
        match message:
            case TextDeltas():
                rows = zip(
                    message.request_ids, message.texts, message.token_ids, message.finishes, message.usages, strict=True
                )
                for request_id, text, ids, finish, usage in rows:
                    if request_id in message.verified:
                        self.answers[request_id].verified.append((message.verified[request_id], len(ids)))
                    self._add(self.answers[request_id], text, ids, finish, usage)
                for request_id, packed in message.log_probs.items():
                    self.answers[request_id].log_probs += read_log_probs(packed)
                for request_id, packed in message.prompt_log_probs.items():
                    answer = self.answers[request_id]
                    del answer.parts_of_prompt[packed.first :]
                    assert len(answer.parts_of_prompt) == packed.first and not answer.prompt_log_probs
                    answer.parts_of_prompt += read_log_probs(packed)
                for request_id in message.log_probs:
                    answer = self.answers[request_id]
                    answer.prompt_log_probs += answer.parts_of_prompt
                    answer.parts_of_prompt.clear()
            case Rejected():
                answer = self.answers[message.request_id]
                answer.rejected = message
                answer.done.set()
                answer.grew.set()

    def _add(self, answer: Answer, text: str, ids: list[int], finish: Finish | None, usage: Usage) -> None:
        assert not answer.done.is_set(), "a row after the last one"
        answer.text += text
        answer.token_ids += ids
        answer.usage = usage
        answer.finish = finish
        answer.grew.set()
        if finish is not None:
            answer.done.set()

    async def recv(self) -> tuple[int, Arrival]:
        return await self.said.get()

    @property
    def more_bytes(self) -> int:
        return self.said.qsize()


class SentLengths:
    """By slot, how many tokens the device has committed by the results that the worker has sent."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.left_out = 0  # slots of decode steps that committed nothing
        self._parts: dict[int, deque[StepPlan]] = {}  # by step: those without a result
        self.catch_ups: Counter[bool] = Counter()  # at width 1, and wider

    def planned(self, plan: StepPlan) -> None:
        """A plan leaves for the worker."""
        self._parts[plan.step_id] = deque(plan.parts())

    def sent(self, result: StepResult) -> None:
        """A result leaves the worker. Audits commit nothing."""
        parts = self._parts[result.step_id]
        plan = parts.popleft()
        assert result.is_last == (not parts), "a step has a result for each part"
        if result.is_last:
            del self._parts[result.step_id]
        if is_audit(plan):
            return
        for work, tokens in zip(parts_of(plan), result.tokens, strict=True):
            before = self.lengths[work.slot] if work.reset is None else work.reset.prompt_len
            self.lengths[work.slot] = before + len(tokens)
            self.left_out += not (tokens or work.tokens)
        if result.caught_up:
            self.catch_ups[plan.width > 1] += 1


class WatchedInbox:
    """The scheduler's inbox; checks its invariants whenever it reads.

    `on_device` reads lengths off the device; None where that would wait for it: then they are those of results sent.
    """

    def __init__(self, link: MemoryLink[ToScheduler], on_device: DeviceLengths | None) -> None:
        self._link = link
        self._on_device = on_device
        self.scheduler: Scheduler | None = None
        self.sent = SentLengths()
        self.times_ahead = 0  # how often a request had more tokens on the device than the scheduler knew

    def drain(self) -> list[ToScheduler]:
        self._check()
        return [self._noted(message) for message in self._link.drain()]

    async def recv(self) -> ToScheduler:
        self._check()
        return self._noted(await self._link.recv())

    def close(self) -> None:
        self._link.close()

    def _noted(self, message: ToScheduler) -> ToScheduler:
        if isinstance(message, StepResult) and (trees := find(message.extensions, TreePaths)) is not None:
            for path, last_guess, tokens in zip(trees.paths, trees.last_guesses, message.tokens, strict=True):
                assert not tokens or len(path) == len(tokens) - 1, "a column for each token but the bonus"
                assert path == sorted(set(path)) and all(0 < column <= last_guess for column in path)
        return message

    def _check(self) -> None:
        """Lengths are read first: whatever the device does meanwhile was planned before."""
        if self.scheduler is None:
            return
        sent = dict(self.sent.lengths)
        lengths = sent if self._on_device is None else self._on_device()
        check_invariants(self.scheduler, lengths)
        for request in self.scheduler.queues.running:
            if request.prefilled_len == request.target:
                assert len(request.tokens) <= sent[request.slot] <= lengths[request.slot]
                self.times_ahead += lengths[request.slot] > len(request.tokens)


class PlanQueue:
    """Plans for a worker that runs in a thread of its own. They pass the codec, so types are checked."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(features.link(ToWorker))
        self._ready: deque[ToWorker] = deque()
        self._arrived = threading.Event()

    def send(self, message: ToWorker) -> None:
        self._ready.append(self._decoder.decode(self._encoder.encode(message)))
        self._arrived.set()

    def poll(self) -> list[ToWorker]:
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def wait(self, timeout_s: float | None) -> None:
        self._arrived.wait(timeout_s)
        self._arrived.clear()

    def close(self) -> None:
        self._ready.clear()


class FromThread:
    """The worker's link back into the event loop."""

    def __init__(self, link: MemoryLink[ToScheduler], lengths: SentLengths) -> None:
        self._link = link
        self._lengths = lengths
        self._loop = asyncio.get_running_loop()

    def send(self, message: ToScheduler) -> None:
        if isinstance(message, StepResult):
            self._lengths.sent(message)
        self._loop.call_soon_threadsafe(self._link.send, message)

    def close(self) -> None:
        self._link.close()


class WatchedPlans:
    """The link to the worker; counts what random schedules must have seen."""

    def __init__(self, link: PlanQueue, lengths: SentLengths) -> None:
        self._link = link
        self._lengths = lengths
        self.sent: list[int] = []
        self.chunk_splits = 0
        self.audits: Counter[Phase] = Counter()  # steps
        self.audits_between = 0  # steps of requests that follow an audit's
        self._last_audit = False
        self.widths: Counter[int] = Counter()  # of decode steps
        self.rests: list[bool] = []  # each decode step

    def send(self, message: ToWorker) -> None:
        if isinstance(message, StepPlan):
            self.sent.append(message.step_id)
            self._lengths.planned(message)
            audits = is_audit(message)
            self.audits_between += not audits and self._last_audit
            self._last_audit = audits
            if audits:
                self.audits[message.phase] += 1
            else:
                self._count(message)
        self._link.send(message)

    def _count(self, plan: StepPlan) -> None:
        self.chunk_splits += sum(chunk.next_token >= 0 for chunk in plan.chunks)
        if plan.slots:
            self.widths[plan.width] += 1
            self.rests.append(not plan.drafts)

    def close(self) -> None:
        self._link.close()
