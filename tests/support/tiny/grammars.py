"""Grammars that tiny models can follow to their end, and the vocabulary that they are followed in."""

import atexit
import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_spec.messages import Grammar, GrammarKind
from support.tiny.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from overlap_spec.features.grammar.frontend import GrammarChecks
    from overlap_spec.features.grammar.vocabulary import GrammarVocabulary

END = 2  # </s>

COLOUR = {"enum": ["red", "green", "blue"]}
SHORT = {"type": "string", "pattern": "^[a-z]{1,4}$"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def schema(flexible: bool, **properties: object) -> Grammar:
    """An object with these keys, all required; `flexible`: with white space."""
    guidance = {} if flexible else {"x-guidance": {"whitespace_flexible": False}}
    fields = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**guidance, **fields}))


STRUCTURE = {"begin": "<f>", "schema": {"type": "object", "maxProperties": 1}, "end": "</f>"}
TAG = {"structures": [STRUCTURE], "triggers": ["<f>"]}
TINY_GRAMMARS = {
    "compact schema": schema(False, name=SHORT, age=NUMBER, colour=COLOUR),
    "schema": schema(True, colour=COLOUR, tags={"type": "array", "items": SHORT, "maxItems": 3}),
    "any object": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    "regex": Grammar(GrammarKind.REGEX, r"[0-9]{3}-[a-f]{2,20}!"),
    "ebnf": Grammar(GrammarKind.EBNF, 'root ::= "x" ("ab" | "cd" root | "long way")'),
    "lark": Grammar(GrammarKind.LARK, 'start: "a" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/'),
    "choice": Grammar(GrammarKind.CHOICE, '["yes, it is", "no, it is not", "yes, it was"]'),
    "structural tag": Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)),
}


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tag(begin: str = "<f=a>", triggers: tuple[str, ...] = ("<f=",), schema: Any = OBJECT) -> str:
    structure = {"begin": begin, "schema": schema, "end": "</f>"}
    return json.dumps({"structures": [structure], "triggers": triggers})


BAD_GRAMMARS = [  # a grammar and a part of the message
    (GrammarKind.JSON_SCHEMA, '{"type": "objekt"}', "objekt"),
    (GrammarKind.JSON_SCHEMA, "{", "EOF"),
    (GrammarKind.JSON_SCHEMA, "[1]", "object"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no text satisfies it"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "http://a/b"}', "http"),
    (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
    (GrammarKind.JSON_SCHEMA, "false", "object"),
    (GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * 500 + "{}" + "}" * 500, "recursion"),
    (GrammarKind.REGEX, "(a", "unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", "look-around"),
    (GrammarKind.REGEX, "(" * 5000 + ")" * 5000, "regex"),
    (GrammarKind.EBNF, "root := x", "::="),
    (GrammarKind.EBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "ebnf"),
    (GrammarKind.LARK, "start: b", "unknown name"),
    (GrammarKind.LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    (GrammarKind.CHOICE, "[]", "at least one"),
    (GrammarKind.CHOICE, "[1]", "str"),
    (GrammarKind.STRUCTURAL_TAG, tag(triggers=()), "triggers"),
    (GrammarKind.STRUCTURAL_TAG, tag(schema={"type": "objekt"}), "objekt"),
    (GrammarKind.STRUCTURAL_TAG, '{"structures": [], "triggers": []}', "at least one"),
    (GrammarKind.STRUCTURAL_TAG, "{}", "structures"),
]


@functools.cache
def tiny_tokenizer_dir(vocab_size: int, markers: tuple[str, ...] = ()) -> str:
    """Where the tiny tokenizer is, with no more tokens than the model has columns, and these special tokens."""
    return str(write_tokenizer(Path(tempfile.mkdtemp()), min(vocab_size, 128), markers=markers))


@functools.cache
def tiny_grammar_vocabulary(vocab_size: int, markers: tuple[str, ...] = ()) -> "GrammarVocabulary":
    """Of the tiny tokenizer, and as many columns as the model has."""
    from overlap_spec.features.grammar.vocabulary import GrammarVocabulary

    return GrammarVocabulary(tiny_tokenizer_dir(vocab_size, markers), vocab_size, (END,))


@functools.cache
def grammar_checks(vocab_size: int, markers: tuple[str, ...] = ()) -> "GrammarChecks":
    """Checks that all engines of a test run share, with the process that they are done in."""
    from overlap_spec.features.grammar.frontend import GrammarChecks

    checks = GrammarChecks(tiny_grammar_vocabulary(vocab_size, markers))
    atexit.register(checks.close)
    return checks
