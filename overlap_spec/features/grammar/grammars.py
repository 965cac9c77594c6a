"""The grammars of requests, on the host: what each has consumed, and which tokens it allows after each guess.

A grammar is compiled when its request is queued and kept until the request is gone, whichever slots it has had: a
preempted request finds it as far as its output is. A grammar has one task at a time, in the worker's loop or a thread:

    tokens of step N are on the host  ->  advance: consume them, find the tokens that must follow
    window of step N + 1 is there     ->  masks of the token after each column (`window_masks.py`)

**Memory** that grammars take in the worker is bounded. A lexer grows with the texts that it sees, and
llguidance does not tell by how much. But growth takes time: 64 MiB take it some 0.3 s. So when grammars have taken
LOOK_S of time, the heap's growth since the first of them is looked at:

    within MOST_IDLE, and MOST_EACH for every request with one     nothing is done
    beyond, for the first time                                     what no request uses is forgotten
    beyond it still                                                the request whose grammar took most time fails
"""

from __future__ import annotations

import enum
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace
from torch import Tensor

from overlap_spec.features.grammar import DropGrammar, GrammarFailed, GrammarReady, PrepareGrammar
from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.features.grammar.reasoned import Matcher, ReasonedMatcher
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.features.grammar.window_masks import HostWindow, WindowMasks
from overlap_spec.runtime.heap import Repeated, give_memory_back, heap_bytes

LOOK_S = 0.1
MOST_IDLE = 64 << 20
MOST_EACH = 2 << 20


class Judgement(enum.Enum):
    """What is to be done about the memory of grammars."""

    FITS = "fits"
    FORGET = "forget"  # what no request uses
    FAIL = "fail"  # the request whose grammar has grown most


class GrammarMemory:
    """Watches the heap of this process, as a function of the time that grammars take."""

    def __init__(self, heap: Callable[[], int] = heap_bytes) -> None:
        self._heap = heap
        self._base: int | None = None  # its size without grammars
        self._spent_s = 0.0
        self._forgot = False

    def begin(self) -> None:
        """The first grammar is about to come."""
        if self._base is None:
            self._base = self._heap()

    def spend(self, seconds: float) -> None:
        """Grammars took this time. Any thread may tell it: it matters little if two do at once."""
        self._spent_s += seconds

    @property
    def is_due(self) -> bool:
        return self._spent_s >= LOOK_S

    def judge(self, num_open: int) -> Judgement:
        """Look at the heap. `num_open`: requests with a grammar."""
        self._spent_s = 0.0
        assert self._base is not None
        if self._heap() - self._base <= MOST_IDLE + num_open * MOST_EACH:
            self._forgot = False
            return Judgement.FITS
        self._forgot = not self._forgot
        return Judgement.FORGET if self._forgot else Judgement.FAIL

    def accept(self) -> None:
        """What has grown is not grammars'."""
        self._base = self._heap()


if TYPE_CHECKING:
    from llguidance import LLMatcher

Result = TypeVar("Result")

MAX_THREADS = 8
LARGE = 1 << 10  # characters of a grammar, from which on its text is kept once
MAX_FORCED = 64  # tokens that are looked at: more than a window has
FORCING_STEPS = 3  # that a mean of what must follow goes over
MOST_KEPT_S = 1.0  # of time that a matcher has taken that is kept for the next request: its lexer has not grown much
GROWN_S = 0.1  # of time that a grammar takes at least to grow by some MiB
TOO_LARGE = "its lexer takes too much memory for this text"


class RequestGrammar:
    """One request's grammar. Only one thread at a time may use it."""

    def __init__(self, matcher: Matcher, eos_token_ids: frozenset[int], release: Callable[[], None]) -> None:
        self.matcher = matcher
        self.release = release  # to be called once no request uses it any more
        self.forced: list[int] = []  # what must follow, as far as it is known
        self.forcing = 1.0  # how many tokens must follow: a moving mean of the last steps
        self.failure = ""  # why it cannot go on
        self.seconds = 0.0  # that it has taken, about
        self.is_slow = False  # it took too long for the worker's loop: it is followed in a thread
        self._eos = eos_token_ids
        self._ended = False  # EOS was drawn: what follows is cut off
        self._find_forced()

    def restart(self) -> None:
        """Go back to the beginning of the output."""
        self.failure = ""
        self._ended = False
        self.matcher.reset()
        self._find_forced()

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume committed tokens, up to the end, and find out what must follow."""
        if self._ended or self.failure:
            return
        known = list(tokens)
        if not self._eos.isdisjoint(known):
            known = list(takewhile(lambda token: token not in self._eos, known))
            self._ended = True
        count = self.matcher.try_consume_tokens(known) if known else 0
        if count < len(known):
            self.failure = self.matcher.get_error() or f"token {known[count]} was drawn, which it does not allow"
        self._find_forced()
        self.forcing += (len(self.forced) - self.forcing) / FORCING_STEPS

    def check(self) -> None:
        """Note whether the library has given up on a window."""
        if self.matcher.is_error() and not (self._ended or self.failure):
            self.failure = self.matcher.get_error()

    def _find_forced(self) -> None:
        going = not (self._ended or self.failure or self.matcher.is_stopped())
        self.forced = self.matcher.compute_ff_tokens()[:MAX_FORCED] if going else []


class Grammars:
    """Every grammar of the worker, by its request's uid, and the threads that they are followed in."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = GrammarCompiler(vocabulary)
        self._eos = frozenset(vocabulary.eos_token_ids)
        self._texts = Repeated()  # of large grammars, which requests keep
        self._by_uid: dict[int, Future[RequestGrammar]] = {}
        self._ready: dict[int, RequestGrammar] = {}  # those that were asked for
        self._compiling: deque[int] = deque()
        self._told: set[int] = set()  # of whose failure the scheduler knows
        num_threads = min(MAX_THREADS, max(1, (os.cpu_count() or 2) // 2))
        self.memory = GrammarMemory()
        self.keep_going = False  # one that is too large is followed until its request ends, as on other ranks
        self.window_masks = WindowMasks(vocabulary.vocab_size, self._eos, num_threads)
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._compile_threads = {slow: ThreadPoolExecutor(1, "compile") for slow in (False, True)}

    def __len__(self) -> int:
        return len(self._by_uid)

    @property
    def compiling(self) -> bool:
        """Whether `replies` will have something."""
        return bool(self._compiling)

    def build_vocabulary(self) -> None:
        """Build it now, in a thread, for the first grammar to find."""
        self._compile_threads[False].submit(self.vocabulary.tokenizer)

    def prepare(self, message: PrepareGrammar) -> None:
        """Compile a request's grammar; `replies` tells the end of it.

        Where another request has left a matcher, that is at once, so that requests that come together stay together.
        """
        if len(message.grammar.text) > LARGE:
            text = self._texts.same("text", message.grammar.text)
            message = replace(message, grammar=replace(message.grammar, text=text))
        self.memory.begin()
        free = self._compiler.take(message.grammar)
        if free is None:
            threads = self._compile_threads[message.grammar.is_slow]
            self._by_uid[message.uid] = threads.submit(self._compiled, message)
        else:
            self._by_uid[message.uid] = done = Future[RequestGrammar]()
            done.set_result(self._followed(message, free))
        self._compiling.append(message.uid)

    def drop(self, message: DropGrammar, is_busy: bool) -> None:
        """Forget a request's grammar. No step in flight has it. `is_busy`: a thread has."""
        future = self._by_uid.pop(message.uid)
        self._ready.pop(message.uid, None)
        self._told.discard(message.uid)
        if not future.done() or future.exception() is not None:
            return
        grammar = future.result()
        if grammar.seconds > MOST_KEPT_S:
            self.run(give_memory_back)
        elif not is_busy:
            grammar.release()

    def replies(self) -> list[GrammarReady | GrammarFailed]:
        """What the scheduler has not been told: grammars that are ready, and those that failed."""
        found: list[GrammarReady | GrammarFailed] = []
        for _ in range(len(self._compiling)):
            uid = self._compiling.popleft()
            future = self._by_uid.get(uid)
            if future is not None and not future.done():
                self._compiling.append(uid)
            elif future is not None:
                error = future.exception()
                found.append(GrammarReady(uid) if error is None else GrammarFailed(uid, str(error)))
        return found

    def failed(self, uid: int, why: str = "") -> list[GrammarFailed]:
        """Why a request's grammar cannot go on, which is told once. `why`: if it could."""
        if uid in self._told:
            return []
        self._told.add(uid)
        return [GrammarFailed(uid, f"grammar: it can be followed no further: {why or self.of(uid).failure}")]

    def bound_memory(self) -> list[GrammarFailed]:
        """Look at what grammars take, where they have taken time since; returns those that have grown too large."""
        if not self.memory.is_due:
            return []
        match self.memory.judge(len(self._by_uid)):
            case Judgement.FITS:
                return []
            case Judgement.FORGET:
                self._compile_threads[True].submit(self._forget)
                return []
            case Judgement.FAIL:
                uid = max(self._ready, key=lambda uid: self._ready[uid].seconds, default=0)
                largest = self._ready.get(uid)
                if largest is None or largest.seconds < GROWN_S or largest.failure:
                    self.memory.accept()
                    return []
                if not self.keep_going:
                    largest.failure = TOO_LARGE
                return self.failed(uid, TOO_LARGE)

    def _forget(self) -> None:
        self._compiler.forget()
        give_memory_back()

    def of(self, uid: int) -> RequestGrammar:
        found = self._ready.get(uid)
        if found is None:
            found = self._ready[uid] = self._by_uid[uid].result()
        return found

    def restart(self, uid: int) -> None:
        """Follow a grammar from the beginning again. No step in flight has it."""
        self.of(uid).restart()
        self._told.discard(uid)

    def masks(
        self,
        grammars: Sequence[RequestGrammar],
        windows: Sequence[HostWindow],
        memory: Tensor,
        places: Sequence[int],
    ) -> None:
        """Write masks of windows of the same width. Arguments: as of `WindowMasks.compute`."""
        self.window_masks.compute([grammar.matcher for grammar in grammars], windows, memory, places)
        for grammar in grammars:
            grammar.check()

    def run(self, task: Callable[[], Result]) -> Future[Result]:
        """Run a task of one grammar in a thread. Tasks begin in the order of these calls."""
        return self._threads.submit(task)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
        for threads in self._compile_threads.values():
            threads.shutdown(cancel_futures=True)

    def _compiled(self, message: PrepareGrammar) -> RequestGrammar:
        begun = time.perf_counter()
        matcher = self._compiler.compile(message.grammar)
        grammar = self._followed(message, matcher)
        matcher.compute_bitmask()  # which is kept: a lexer that has met no text takes longest for its first mask
        grammar.seconds = time.perf_counter() - begun
        self.memory.spend(grammar.seconds)
        return grammar

    def _followed(self, message: PrepareGrammar, compiled: LLMatcher) -> RequestGrammar:
        matcher: Matcher = compiled
        if (thinking := message.grammar.thinking) is not None:
            matcher = ReasonedMatcher(compiled, thinking, self._eos, self.vocabulary.vocab_size)
        grammar = RequestGrammar(matcher, self._eos, partial(self._compiler.give_back, message.grammar, compiled))
        if message.output:
            grammar.advance(array("i", message.output))
        return grammar
