"""From a request's grammar to a matcher, which knows what may follow the tokens that it has consumed."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, assert_never

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.grammar.markers import after_gap, after_reasoning, with_markers
from overlap_spec.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

MAX_COMPILE_S = 10.0
MAX_COMPILED = 128  # grammars that are kept, the least recently used go first
LONGEST_REASON = 500  # characters of the library's message
# Between tokens of JSON, unless the schema has an `x-guidance` of its own. Without a bound a weak model may go on
# with white space until its length is used up.
WHITE_SPACE = r"[ \n\t]{0,20}"


class GrammarCompiler:
    """Compiles grammars, and keeps the last ones. May be called from any thread; releases the interpreter lock."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of the output. Raises: RequestError with the library's message."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        matcher = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer, limits = self.vocabulary.tokenizer(), LLParserLimits(verbose_errors=False)
        try:
            rules = self._rules(grammar)
            if grammar.thinking is not None:
                rules = after_gap(rules)
            elif grammar.reasoning is not None:
                rules = after_reasoning(rules, grammar.reasoning, grammar.is_reasoning, self.vocabulary.special_tokens)
            matcher = LLMatcher(tokenizer, rules, limits=limits, log_level=0)
        except Exception as error:
            raise _refused(grammar, str(error)) from error
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # that a language is empty is found here
        if first.is_error():
            raise _refused(grammar, first.get_error())
        return matcher

    def _rules(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own language."""
        from llguidance import LLMatcher, grammar_from

        from overlap_spec.grammar.structural_tag import tags_to_lark

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
    return {} if '"x-guidance"' in text else {"whitespace_pattern": WHITE_SPACE}


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
