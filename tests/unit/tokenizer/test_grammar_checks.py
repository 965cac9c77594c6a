"""A bad grammar is refused before the request is admitted, and one that takes too long does not hold up others."""

import asyncio
import time

import pytest
from support.small_tokenizers import SMOLLM2

from overlap_spec.errors import RequestError
from overlap_spec.grammar import GrammarVocabulary
from overlap_spec.messages import EngineLimits, Grammar, GrammarKind
from overlap_spec.tokenizer.grammar_checks import GrammarChecks
from overlap_spec.tokenizer.request_checks import RequestChecks

GOOD, BAD = Grammar(GrammarKind.REGEX, "[0-9]+"), Grammar(GrammarKind.REGEX, "(a")


def checks(**options: float) -> RequestChecks:
    rules = RequestChecks((2,), 9, 0, GrammarChecks(GrammarVocabulary(str(SMOLLM2), 49152, (2,)), **options))
    rules.limits = EngineLimits(100, 100, 4, 49152)
    return rules


def test_bad_ones_are_refused() -> None:
    async def check() -> None:
        rules = checks()
        await rules.check_grammar(None)
        await rules.check_grammar(GOOD)
        with pytest.raises(RequestError, match="unclosed group"):
            await rules.check_grammar(BAD)
        with pytest.raises(RequestError, match="follows no grammars"):
            await RequestChecks((2,), 9, 0).check_grammar(GOOD)

    asyncio.run(check())


def test_the_time_that_a_grammar_may_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        rules = checks(timeout_s=0.1)
        monkeypatch.setattr(rules._grammars._compiler, "compile", lambda grammar: time.sleep(0.3))
        ticks = 0
        checking = asyncio.create_task(rules.check_grammar(GOOD))
        while not checking.done():
            await asyncio.sleep(0.005)
            ticks += 1
        with pytest.raises(RequestError, match=r"grammar took more than 0.1 s to compile"):
            checking.result()
        assert ticks >= 2, "the loop was held up"

    asyncio.run(check())
