"""Checks a request's grammar before the request is admitted, in a process that is killed at its limits.

    answered before       at once, from what is kept of earlier answers
    else                  a turn among clients, up to QUICK_S of CPU time
    what takes longer     a turn among clients' long ones, up to SLOW_S

So long compilations of a client delay no short ones. Requests with the same grammar wait for one check.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.compiler import CHECKER, Checked, vocabulary_text
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.frontend.hooks import Parts, Preparing, RequestHook
from overlap_spec.frontend.request_checks import check_ids
from overlap_spec.messages import Grammar, GrammarKind, SamplingParams
from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, WorkFailed
from overlap_spec.runtime.turns import Turns

QUICK_S = 0.25
SLOW_S = 3.0
MOST_BYTES = 64 << 20  # that a compilation may take
QUICK_AT_ONCE, SLOW_AT_ONCE = 2, 1
MOST_KEPT = 8 << 20  # bytes of grammars whose answers are kept
ENTRY_BYTES = 512  # of one, beside its text


def attach(parts: Parts) -> RequestHook:
    """Any request may have a grammar; one that the model's tokenizer cannot follow is refused."""
    settings, files = parts.settings, parts.settings.model.files
    directory = None if settings.skip_tokenizer_init else files.tokenizer_dir
    checks = GrammarChecks(GrammarVocabulary(directory, files.vocab_size, files.eos_token_ids))
    if settings.model.device == "cuda" or parts.generation:
        checks.prepare()  # while the worker loads; or for requests with grammars that go on after a death
    return GrammarHook(checks)


class GrammarHook(RequestHook):
    """Checks the grammars of requests, beside other requests."""

    fields = ("grammar",)

    def __init__(self, checks: "GrammarChecks") -> None:
        self._checks = checks

    def takes_long(self, asked: SamplingParams) -> bool:
        """A grammar is checked in another process."""
        return True

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """The same with what the check tells of the grammar.

        Raises: RequestError if the grammar cannot be followed. Cancellation: as `GrammarChecks.checked`.
        """
        assert sampling.grammar is not None
        if (thinking := sampling.grammar.thinking) is not None:  # as of a request's own
            check_ids("thinking", (*thinking.opening, *thinking.closing), preparing.limits.vocab_size)
        checked = await self._checks.checked(sampling.grammar, preparing.request.owner)
        return sampling if checked is sampling.grammar else msgspec.structs.replace(sampling, grammar=checked)

    def close(self) -> None:
        """End the process that grammars are checked in."""
        self._checks.close()


@dataclass(frozen=True)
class Verdict:
    """What a check has found: `error` is empty for a valid grammar."""

    error: str
    rules: str = ""  # in Lark, of a grammar in another language that Python would take long to read again
    is_slow: bool = False


class Verdicts:
    """The last verdicts, bounded by the bytes of what they are about."""

    def __init__(self, most_bytes: int = MOST_KEPT) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Grammar, Verdict] = OrderedDict()

    def get(self, grammar: Grammar) -> Verdict | None:
        found = self._kept.get(grammar)
        if found is not None:
            self._kept.move_to_end(grammar)
        return found

    def put(self, grammar: Grammar, verdict: Verdict) -> None:
        """Keep a new verdict; those that were not asked for longest go."""
        self._kept[grammar] = verdict
        self._num_bytes += _size(grammar, verdict)
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= _size(*self._kept.popitem(last=False))


class GrammarChecks:
    """The grammars of one engine."""

    def __init__(
        self, vocabulary: GrammarVocabulary, quick_s: float = QUICK_S, slow_s: float = SLOW_S, most: int = MOST_BYTES
    ) -> None:
        self._why_not = vocabulary.why_not
        self._isolated = Isolated(CHECKER, vocabulary_text(vocabulary), most_bytes=most)
        self._quick, self._slow = Turns[str](QUICK_AT_ONCE), Turns[str](SLOW_AT_ONCE)
        self._quick_s, self._slow_s, self._most = quick_s, slow_s, most
        self._verdicts = Verdicts()
        self._running: dict[Grammar, _Running] = {}

    def prepare(self) -> None:
        """Start the process that loads the vocabulary now, for the first grammar to find."""
        if not self._why_not:
            self._isolated.start()

    def close(self) -> None:
        """End that process."""
        self._isolated.close()

    async def checked(self, grammar: Grammar, owner: str) -> Grammar:
        """The grammar as the worker is to have it: with `is_slow`, and in Lark. `owner`: whose turn it takes.

        Raises: RequestError with the library's message, or if it takes too much.
        Cancellation: the process is killed, unless other requests wait for it.
        """
        if self._why_not:
            raise RequestError("grammar", f"grammar: {self._why_not}")
        key = _key(grammar)
        verdict = self._verdicts.get(key) or await self._join(key, owner)
        if verdict.error:
            raise RequestError("grammar", verdict.error)
        if verdict.rules:
            grammar = msgspec.structs.replace(grammar, kind=GrammarKind.LARK, text=verdict.rules)
        if grammar.is_slow == verdict.is_slow:
            return grammar
        return msgspec.structs.replace(grammar, is_slow=verdict.is_slow)

    async def _join(self, grammar: Grammar, owner: str) -> Verdict:
        """Wait for the check of a grammar, which may be under way."""
        running = self._running.get(grammar)
        if running is None:
            running = self._running[grammar] = _Running(asyncio.create_task(self._find(grammar, owner)))
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                self._running.pop(grammar, None)
                running.task.cancel()  # has no effect on one that is done

    async def _find(self, grammar: Grammar, owner: str) -> Verdict:
        payload, is_slow = msgspec.msgpack.encode(grammar), False
        try:
            try:
                async with self._quick.turn(owner):
                    answer = await self._isolated.run(payload, self._quick_s)
            except TooLong:
                is_slow = True
                async with self._slow.turn(owner):
                    answer = await self._isolated.run(payload, self._slow_s)
            checked = msgspec.msgpack.decode(answer, type=Checked)
            verdict = Verdict(checked.error, checked.rules, is_slow)
        except TooLong:
            verdict = Verdict(f"grammar took more than {self._slow_s:g} s to compile: make it smaller")
        except TooLarge:
            verdict = Verdict(f"grammar took more than {self._most >> 20} MiB to compile: make it smaller")
        except WorkFailed as failed:
            return Verdict(f"grammar: it could not be compiled: {failed}")  # may be another matter than the grammar
        self._verdicts.put(grammar, verdict)
        return verdict


@dataclass
class _Running:
    """A check that is under way, and how many requests wait for it."""

    task: asyncio.Task[Verdict]
    num_waiting: int = 0


def _key(grammar: Grammar) -> Grammar:
    """The same for all budgets of reasoning and their markers, of which only that there is one matters here."""
    thinking = grammar.thinking
    if thinking is not None:
        thinking = msgspec.structs.replace(thinking, budget=0, is_open=False, opening=(), closing=(0,))
    elif not grammar.is_slow:
        return grammar
    return msgspec.structs.replace(grammar, thinking=thinking, is_slow=False)


def _size(grammar: Grammar, verdict: Verdict) -> int:
    texts = (grammar.text, verdict.error, verdict.rules, *grammar.markers)
    return ENTRY_BYTES + sum(len(text.encode()) for text in texts)
