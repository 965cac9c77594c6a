"""The oracle of requests with a grammar: plain constrained decoding, all of it computed again for every token.

The logits are those of a prefill of prompt and output. A new matcher consumes the whole output, and what its mask
leaves is drawn from in plain Python. So nothing is kept from token to token, and no code of the worker's is used.
"""

from array import array

import msgspec

from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import Grammar, ResetSlot, SamplingParams
from support.plain_oracle import Expected, PlainOracle, masked
from support.plans import SlotPart, plan_of
from support.ring_links import Answer
from support.tiny.grammars import tiny_grammar_vocabulary


class GrammarOracle(PlainOracle):
    """`num_forbidden` counts tokens that would have been others without the grammar."""

    def __init__(self, seed: int, codec: Codec, **model: str) -> None:
        super().__init__(seed, codec, **model)
        self._compiler = GrammarCompiler(tiny_grammar_vocabulary(self._target.vocab_size))
        self._known: dict[bytes, Expected] = {}

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """As for other requests; one that was aborted while its grammar was compiled has no counts yet."""
        if answer.usage is None or answer.usage.prompt_tokens or answer.token_ids:
            super().check(prompt, sampling, answer, what)

    def expected(self, prompt: list[int], sampling: SamplingParams) -> Expected:
        """Decode until the request ends, token by token."""
        if sampling.grammar is None:
            return super().expected(prompt, sampling)
        key = msgspec.json.encode((prompt, sampling))
        if key not in self._known:
            self._known[key] = self._constrained(prompt, sampling, sampling.grammar)
        return self._known[key]

    def _constrained(self, prompt: list[int], sampling: SamplingParams, grammar: Grammar) -> Expected:
        tokens: list[int] = []
        while not tokens or (finish := self._endings.finish(tokens, sampling)) is None:
            logits = self._logits_after(prompt + tokens)
            forbidden = self.forbidden(grammar, tokens)
            token = self._chosen(masked(logits, forbidden), sampling, len(prompt) + len(tokens))
            self.num_forbidden += self._chosen(logits, sampling, len(prompt) + len(tokens)) in forbidden
            tokens.append(token)
        return Expected(tokens, self._endings.text(tokens, finish, sampling), finish)

    def forbidden(self, grammar: Grammar, tokens: list[int]) -> set[int]:
        """What may not follow these tokens of an output."""
        matcher = self._compiler.compile(grammar)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        return {token for token in range(self._target.vocab_size) if not allowed >> token & 1}

    def _logits_after(self, tokens: list[int]) -> list[float]:
        greedy = SamplingParams(temperature=0, seed=0)
        reset = ResetSlot(greedy, len(tokens), (), len(tokens), len(tokens))
        pages = list(range(1, self._geometry.num_page_columns + 1))
        work = SlotPart(slot=0, new_pages=pages, tokens=array("i", tokens).tobytes(), reset=reset)
        self._executor.launch(plan_of(0, [work], 1)).wait()
        return self._target.logits()
