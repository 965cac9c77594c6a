"""From a request's grammar to a matcher, which knows what may follow the tokens that it has consumed.

A structural tag is free text in which a trigger begins a part that follows a JSON schema (SGLang's first format). Rules
are added for markers, which may be special tokens, and for the reasoning before what a grammar is of. The frontend
has a grammar checked in a process of its own (`checker`).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

import msgspec
from llguidance import StructTag

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.intersections import check_intersections
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import JSON_WHITE_SPACE, MAX_GRAMMAR_BYTES, Grammar, GrammarKind, Reasoning

ANSWER = "answer"  # a grammar within a grammar
GAP = f"gap: /{JSON_WHITE_SPACE}/"  # before it; without a bound, a weak model may never begin


def with_markers(rules: str, markers: Sequence[str], special_tokens: Mapping[str, int]) -> str:
    """Add `marker_0`, `marker_1`, .. to rules in Lark."""
    added = (f"marker_{index}: {_marker(marker, special_tokens)}" for index, marker in enumerate(markers))
    return "\n".join((rules, *added))


def after_reasoning(rules: str, reasoning: Reasoning, is_reasoning: bool, special_tokens: Mapping[str, int]) -> str:
    """The same grammar for what follows the reasoning.

    An output that does not begin inside the reasoning may also begin with the answer.
    """
    begins = "" if reasoning.is_implicit or is_reasoning else "opening gap "
    thought = f"{begins}thought {'bridge' if reasoning.bridge else 'gap'}"
    outer = [
        f"start: {thought if is_reasoning else f'({thought})?'}{' header' if reasoning.header else ''} @{ANSWER}",
        GAP,
        _thought(reasoning.closing, special_tokens),
        f"opening: {_marker(reasoning.opening, special_tokens)}",
        *_between(reasoning, special_tokens),
    ]
    return _around("\n".join(outer), rules)


def after_gap(rules: str, reasoning: Reasoning | None, special_tokens: Mapping[str, int]) -> str:
    """The same grammar, with white space before it: for an answer whose reasoning something else follows.

    What a model writes instead of white space may follow, or the reasoning has been left out.
    """
    if reasoning is None or not reasoning.bridge:
        return _around(f"start: gap @{ANSWER}\n{GAP}", rules)
    start = f"start: bridge?{' header' if reasoning.header else ''} @{ANSWER}"
    return _around("\n".join((start, *_between(reasoning, special_tokens))), rules)


def _between(reasoning: Reasoning, special_tokens: Mapping[str, int]) -> Iterator[str]:
    for name, text in (("bridge", reasoning.bridge), ("header", reasoning.header)):
        if text:
            yield f"{name}: {_marker(text, special_tokens)}"


def _around(lark: str, rules: str) -> str:
    """Two grammars as one: `lark`, in which `@answer` is `rules`."""
    inner = json.loads(rules)["grammars"] if rules.startswith("{") else [{"lark_grammar": rules}]
    inner[0]["name"] = ANSWER
    return json.dumps({"grammars": [{"lark_grammar": lark}, *inner]})


def _thought(closing: str, special_tokens: Mapping[str, int]) -> str:
    """Any text, up to the first closing marker and with it."""
    if closing in special_tokens:
        return rf"thought: /(.|\n)*/ {_marker(closing, special_tokens)}"
    escaped = re.escape(closing).replace("/", r"\/")
    return rf"thought[lazy]: /(.|\n)*{escaped}/"


def _marker(marker: str, special_tokens: Mapping[str, int]) -> str:
    """Text as it is written in Lark. What is a special token in it is that token, which no text is encoded to."""
    if marker in special_tokens:
        return f"<[{special_tokens[marker]}]>"
    inside = sorted((token for token in special_tokens if token and token in marker), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, inside))})", marker) if inside else [marker]
    return " ".join(
        _marker(part, special_tokens) if part in special_tokens else _quoted(part) for part in parts if part
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constrained part: its beginning, which starts with a trigger, the schema of what follows, and its end."""

    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct, frozen=True):
    """The text of a grammar of this kind."""

    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def tags_to_lark(text: str, special_tokens: Collection[str]) -> str:
    """The tag as a Lark grammar. Raises: ValueError, or msgspec's error, saying what is wrong.

    `special_tokens`: triggers that are single tokens, which no text is encoded to.
    """
    tag = msgspec.json.decode(text, type=StructuralTag)
    tags = [_tag(structure, tag.triggers) for structure in tag.structures]
    if not tags:
        raise ValueError("structures: at least one is needed")
    special = {each.trigger in special_tokens for each in tags}
    if len(special) > 1:
        raise ValueError("triggers: all or none must be special tokens")
    return StructTag.to_grammar(tags, assume_special=special.pop())


def _tag(structure: Structure, triggers: list[str]) -> StructTag:
    trigger = next((each for each in triggers if each and structure.begin.startswith(each)), None)
    if trigger is None:
        raise ValueError(f"structures: begin {structure.begin!r} starts with none of the triggers {triggers}")
    schema = structure.schema if isinstance(structure.schema, dict) else {}
    return StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end)


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
                rules = after_gap(rules, grammar.reasoning, self.vocabulary.special_tokens)
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
    return RequestError("grammar", f"grammar: not a valid {kind}: `{text}`")  # it may quote the client: no log has it


CHECKER = f"{__name__}:checker"
WARM_UP = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """`error`: why a grammar is refused. `rules`: the same in Lark, where it takes Python long to make them."""

    error: str = ""
    rules: str = ""


def vocabulary_text(vocabulary: GrammarVocabulary) -> str:
    """What `checker` builds the same vocabulary from."""
    return json.dumps([vocabulary.directory, vocabulary.vocab_size, list(vocabulary.eos_token_ids)])


def checker(text: str) -> Callable[[bytes], bytes]:
    """Load a vocabulary. The function takes an encoded grammar, and returns what is `Checked`, encoded."""
    directory, vocab_size, eos_token_ids = json.loads(text)
    vocabulary = GrammarVocabulary(directory, vocab_size, tuple(eos_token_ids))
    compiler = GrammarCompiler(vocabulary)

    def check(payload: bytes) -> bytes:
        try:
            checked = Checked(rules=compiler.check(msgspec.msgpack.decode(payload, type=Grammar)))
        except RequestError as error:
            checked = Checked(error=str(error).encode(errors="replace").decode())
        return msgspec.msgpack.encode(checked)

    if not msgspec.msgpack.decode(check(msgspec.msgpack.encode(WARM_UP)), type=Checked).error:
        len(vocabulary.special_tokens)  # read once, for all checks
    return check
