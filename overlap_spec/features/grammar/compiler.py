"""From a request's grammar to a matcher, which knows what may follow the tokens that it has consumed."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.intersections import check_intersections
from overlap_spec.features.grammar.markers import after_gap, after_reasoning, with_markers
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import JSON_WHITE_SPACE, MAX_GRAMMAR_BYTES, Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 128  # grammars that are kept, the least recently used go first; `forget` bounds their bytes
MAX_FREE = 16  # matchers of a grammar that are kept without a request; one takes some 50 KiB
MOST_FORCED = 64 << 10  # bytes that an answer may have to begin with
MADE_IN_PYTHON = (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG, GrammarKind.CHOICE)  # rules in Lark
STEP_FUEL = 50_000  # regular expressions that one mask may derive: some 10 ms, and 10 MB
LONGEST_REASON = 500  # characters of the library's message


@dataclass(frozen=True)
class Compiled:
    """A grammar that is known to be valid."""

    rules: str  # in llguidance's own language
    free: list[LLMatcher] = field(default_factory=list)  # at the beginning of the output, in no request


class GrammarCompiler:
    """Compiles grammars, and keeps the last ones. May be called from any thread; releases the interpreter lock.

    A matcher is built for each request, or taken over from one that is gone. It is not copied: copies share a lexer and
    its lock, so threads would follow them one after another. A lexer that has been used knows the states it has met.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of the output. Raises: RequestError with the library's message."""
        found, free = self._known(grammar)
        if free is not None:
            return free
        if found is not None:
            return self._build(found.rules)
        rules, matcher = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = Compiled(rules)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def take(self, grammar: Grammar) -> LLMatcher | None:
        """A matcher that a request has given back, which takes no time; None if there is none."""
        return self._known(grammar)[1]

    def give_back(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Keep a matcher that no request uses any more for the next request with this grammar."""
        if matcher.is_error() or not matcher.reset():
            return
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None and len(found.free) < MAX_FREE:
                found.free.append(matcher)

    def check(self, grammar: Grammar) -> str:
        """Find out whether a grammar can be followed, whatever text it is followed along.

        Returns its rules in Lark, where it takes Python long to make them. Its compilation is bounded by nothing: a
        process that can be killed has to do it. Raises: RequestError.
        """
        found: list[str] = []

        def look(rules: str) -> None:
            found.append(rules)
            check_intersections(rules)

        _, matcher = self._compile(grammar, look)
        num_forced = len(matcher.compute_ff_bytes())
        if num_forced > MOST_FORCED:
            text = f"every answer begins with the same {num_forced} bytes, of at most {MOST_FORCED}"
            raise _refused(grammar, text)
        rules = found[0] if grammar.kind in MADE_IN_PYTHON else ""
        if len(rules.encode()) > MAX_GRAMMAR_BYTES:
            text = f"as rules in Lark it has {len(rules.encode())} bytes, of at most {MAX_GRAMMAR_BYTES}"
            raise _refused(grammar, text)
        return rules

    def forget(self) -> None:
        """Keep nothing of what no request uses."""
        with self._lock:
            self._compiled.clear()

    def _known(self, grammar: Grammar) -> tuple[Compiled | None, LLMatcher | None]:
        """What is known of a grammar, and one of its free matchers."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                return None, None
            self._compiled.move_to_end(grammar)
            return found, found.free.pop() if found.free else None

    def _compile(self, grammar: Grammar, check: Callable[[str], None] | None = None) -> tuple[str, LLMatcher]:
        """The rules of a grammar, and a matcher of them. `check`: looks at the rules first."""
        self.vocabulary.tokenizer()  # whose error is another
        try:
            rules = self._rules(grammar)
            if check is not None:
                check(rules)
            if grammar.thinking is not None:
                rules = after_gap(rules)
            elif grammar.reasoning is not None:
                rules = after_reasoning(rules, grammar.reasoning, grammar.is_reasoning, self.vocabulary.special_tokens)
            matcher = self._build(rules)
        except Exception as error:
            raise _refused(grammar, str(error)) from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # that a language is empty is found here
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return rules, matcher

    def _build(self, rules: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=STEP_FUEL)
        return LLMatcher(self.vocabulary.tokenizer(), rules, limits=limits, log_level=0)

    def _rules(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own language."""
        from llguidance import LLMatcher, grammar_from

        from overlap_spec.features.grammar.structural_tag import tags_to_lark

        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_json_options(grammar.text))
            case GrammarKind.STRUCTURAL_TAG:
                return tags_to_lark(grammar.text, self.vocabulary.special_tokens)
            case GrammarKind.CHOICE:
                return _choice(grammar.text)
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.EBNF:
                return grammar_from("ebnf", grammar.text)
            case GrammarKind.LARK:
                special = self.vocabulary.special_tokens if grammar.markers else {}
                return LLMatcher.grammar_from_lark(with_markers(grammar.text, grammar.markers, special))
            case _:
                assert_never(grammar.kind)


def _json_options(text: str) -> JsonCompileOptions:
    """Ours, unless the schema has its own."""
    return {} if '"x-guidance"' in text else {"whitespace_pattern": JSON_WHITE_SPACE}


def _choice(text: str) -> str:
    choices = msgspec.json.decode(text, type=list[str])
    if not choices:
        raise ValueError("at least one string is needed")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _refused(grammar: Grammar, reason: str) -> RequestError:
    kind = grammar.kind.value.replace("_", " ")
    text = " ".join(reason.replace("<non-verbose/>", "").split())[:LONGEST_REASON]
    if text.startswith("NoExtension"):
        text = "no text satisfies it"
    return RequestError("grammar", f"grammar: not a valid {kind}: {text}")
