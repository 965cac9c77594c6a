"""The grammars of requests, on the host: what each has consumed, and which tokens it allows after each guess.

A grammar is compiled when its request is queued and kept until the request is gone, whichever slots it has had: a
preempted request finds it as far as its output is. A grammar has one task at a time, in the worker's loop or a thread:

    tokens of step N are on the host  ->  advance: consume them, find the tokens that must follow
    window of step N + 1 is there     ->  fill: a mask for the token after each column, children after their parents
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from overlap_spec.grammar import GrammarCompiler, GrammarVocabulary
from overlap_spec.grammar.reasoned import Matcher, ReasonedMatcher
from overlap_spec.messages import DropGrammar, GrammarFailed, GrammarReady, PrepareGrammar

MAX_THREADS = 8
MAX_FORCED = 64  # tokens that are looked at: more than a window has


class RequestGrammar:
    """One request's grammar. Only one thread at a time may use it."""

    def __init__(self, matcher: Matcher, eos_token_ids: frozenset[int], mask_bytes: int) -> None:
        self.forced: list[int] = []  # what must follow, as far as it is known
        self.failure = ""  # why it cannot go on
        self._matcher = matcher
        self._eos = eos_token_ids
        self._mask_bytes = mask_bytes
        self._ended = False  # EOS was drawn: what follows is cut off
        self._find_forced()

    def restart(self) -> None:
        """Go back to the beginning of the output."""
        self.failure = ""
        self._ended = False
        self._matcher.reset()
        self._find_forced()

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume committed tokens."""
        for token in tokens:
            self._ended = self._ended or token in self._eos
            if self._ended or self.failure:
                break
            if self._matcher.try_consume_tokens([token]) != 1:
                self.failure = self._matcher.get_error() or f"token {token} was drawn, which it does not allow"
        self._find_forced()

    def fill(self, tokens: Sequence[int], parents: Sequence[int] | None, masks: Tensor) -> None:
        """Write the mask of the token after each column of a window; rows that no draw can reach are left as they are.

        Shapes: tokens, parents (of trees) [w]; masks [w, n] i32 on the host.
        """
        if self._ended or self.failure:
            return
        children: list[list[int]] = [[] for _ in tokens]
        for column in range(1, len(tokens)):
            if tokens[column] >= 0:
                children[column - 1 if parents is None else parents[column]].append(column)
        self._fill_below(0, tokens, children, masks)
        if self._matcher.is_error():
            self.failure = self._matcher.get_error()

    def _fill_below(self, column: int, tokens: Sequence[int], children: list[list[int]], masks: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(masks[column].data_ptr(), self._mask_bytes)
        for child in children[column]:
            # The end is not consumed: nothing after it counts. A token that is not allowed is not drawn.
            if tokens[child] not in self._eos and self._matcher.try_consume_tokens([tokens[child]]) == 1:
                self._fill_below(child, tokens, children, masks)
                self._matcher.rollback(1)

    def _find_forced(self) -> None:
        going = not (self._ended or self.failure or self._matcher.is_stopped())
        self.forced = self._matcher.compute_ff_tokens()[:MAX_FORCED] if going else []


class Grammars:
    """Every grammar of the worker, by its request's uid, and the threads that they are followed in."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = GrammarCompiler(vocabulary)
        self._eos = frozenset(vocabulary.eos_token_ids)
        self._by_uid: dict[int, Future[RequestGrammar]] = {}
        self._compiling: deque[int] = deque()
        self._told: set[int] = set()  # of whose failure the scheduler knows
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 2) // 2)), "grammar")
        self._compile_threads = ThreadPoolExecutor(1, "compile")

    def __len__(self) -> int:
        return len(self._by_uid)

    @property
    def compiling(self) -> bool:
        """Whether `replies` will have something."""
        return bool(self._compiling)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask, an even number: masks travel as 64-bit integers."""
        return mask_words(self.vocabulary.vocab_size)

    def build_vocabulary(self) -> None:
        """Build it now, in a thread, for the first grammar to find."""
        self._compile_threads.submit(self.vocabulary.tokenizer)

    def prepare(self, message: PrepareGrammar) -> None:
        """Compile a request's grammar; `replies` tells the end of it."""
        self._by_uid[message.uid] = self._compile_threads.submit(self._compiled, message)
        self._compiling.append(message.uid)

    def drop(self, message: DropGrammar) -> None:
        """Forget a request's grammar. No step in flight has it."""
        del self._by_uid[message.uid]
        self._told.discard(message.uid)

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

    def failures(self, uids: Sequence[int]) -> list[GrammarFailed]:
        """Those of these requests whose grammars cannot go on; each once."""
        found = []
        for uid in uids:
            failure = self.of(uid).failure
            if failure and uid not in self._told:
                self._told.add(uid)
                found.append(GrammarFailed(uid, f"grammar: it can be followed no further: {failure}"))
        return found

    def of(self, uid: int) -> RequestGrammar:
        """A grammar that is ready."""
        return self._by_uid[uid].result()

    def restart(self, uid: int) -> None:
        """Follow a grammar from the beginning again. No step in flight has it."""
        self.of(uid).restart()
        self._told.discard(uid)

    def run(self, task: Callable[[], None]) -> Future[None]:
        """Run a task of one grammar in a thread."""
        return self._threads.submit(task)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
        self._compile_threads.shutdown(cancel_futures=True)

    def _compiled(self, message: PrepareGrammar) -> RequestGrammar:
        matcher: Matcher = self._compiler.compile(message.grammar)
        if (thinking := message.grammar.thinking) is not None:
            matcher = ReasonedMatcher(matcher, thinking, self._eos, self.vocabulary.vocab_size)
        return RequestGrammar(matcher, self._eos, 4 * -(-self.vocabulary.vocab_size // 32))


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over a vocabulary, rounded up to 64 bits."""
    return 2 * -(-vocab_size // 64)
