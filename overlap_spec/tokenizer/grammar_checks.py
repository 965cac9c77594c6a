"""Checks a request's grammar by compiling it, in a thread, before the request is admitted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from overlap_spec.errors import RequestError
from overlap_spec.grammar import MAX_COMPILE_S, GrammarCompiler, GrammarVocabulary
from overlap_spec.messages import Grammar

THREADS = 2  # compile at once; further grammars wait, and their time runs


class GrammarChecks:
    """The grammars of one engine."""

    def __init__(self, vocabulary: GrammarVocabulary, timeout_s: float = MAX_COMPILE_S) -> None:
        self._vocabulary = vocabulary
        self._compiler = GrammarCompiler(vocabulary)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "grammar")

    def prepare(self) -> None:
        """Build the vocabulary now, in a thread, for the first grammar to find."""
        if not self._vocabulary.why_not:
            self._threads.submit(self._vocabulary.tokenizer)

    async def check(self, grammar: Grammar) -> None:
        """Raises: RequestError with the library's message, or if it takes too long.

        Cancellation: the thread finishes, its answer is dropped; the library bounds what a grammar may take.
        """
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.check, grammar)
        try:
            await asyncio.wait_for(compiling, self._timeout_s)
        except TimeoutError:
            reason = f"grammar took more than {self._timeout_s:g} s to compile: make it smaller"
            raise RequestError("grammar", reason) from None
