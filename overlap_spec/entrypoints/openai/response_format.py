"""The form of an answer that a body asks for, in OpenAI's, SGLang's and vLLM's spellings, as one grammar.

    response_format                                    OpenAI: text, json_object, json_schema, structural_tag
    json_schema, regex, ebnf, structural_tag, lark     SGLang's, and Lark
    structured_outputs                                 vLLM's: json, regex, choice, grammar, json_object, structural_tag
    guided_json, guided_regex, guided_decoding, ..     vLLM's older names

A body may ask once. What is wrong within a grammar, the frontend finds when it compiles it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.openai.prompts import need_tokenizer
from overlap_spec.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

ANY_OBJECT = '{"type":"object"}'
ANY_JSON = "$$ANY$$"  # SGLang's json_schema of any value
WHITE_SPACE_FIELDS = ("disable_any_whitespace", "whitespace_pattern")
BACKENDS = (None, "", "auto", "guidance", "llguidance")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")

PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw] | bool)

Read = Callable[[Any, str], Grammar]  # a value and the name to blame


class NamedSchema(msgspec.Struct, frozen=True):
    """`response_format.json_schema`. A schema is followed strictly, also with `strict` false."""

    name: str = ""
    schema: Json | bool | None = None
    strict: bool | None = None
    description: str = ""


class GrammarFields(msgspec.Struct, kw_only=True):
    """Fields of every endpoint. What a value must be is checked by its reader."""

    response_format: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    lark: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_decoding: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None

    @property
    def grammar_field(self) -> str:
        """The field that asks for a grammar; for messages about it."""
        return next(_asking(self), "grammar")

    def grammar(self, info: ServerInfo) -> Grammar | None:
        """The grammar that is asked for, if one is. Raises: Problem naming a field."""
        asking = list(_asking(self))
        if len(asking) > 1:
            text = f"{asking[0]} and {asking[1]} both constrain the answer: give one"
            raise Problem(400, text, asking[1], "invalid_value")
        _check_backend(self.guided_decoding_backend, "guided_decoding_backend")
        grammar = None
        for field in asking:
            need_tokenizer(field, info)
            grammar = READERS[field](getattr(self, field), field)
        if (pattern := self.guided_whitespace_pattern) not in (None, ""):
            return _with_white_space(grammar, {"whitespace_pattern": pattern}, "guided_whitespace_pattern")
        return grammar


GRAMMAR_FIELDS = frozenset(GrammarFields.__struct_fields__)


def _asking(fields: GrammarFields) -> Iterator[str]:
    for name in READERS:
        value = getattr(fields, name)
        is_schema = value == {} and READERS[name] is _json_schema  # an empty one is of any JSON
        if is_schema or (value not in (None, "", {}, [], {"type": "text"}) and value is not False):
            yield name


def _response_format(value: Any, field: str) -> Grammar:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "json_object":
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case "json_schema":
            return _json_schema(_named_schema(value.get("json_schema")), field)
        case "structural_tag":
            return _structural_tag(value, field)
    raise _bad(field, f'an object with a "type" of {", ".join(FORMATS)}')


def _named_schema(value: Any) -> Json | bool:
    try:
        schema = msgspec.convert(value, NamedSchema).schema
    except msgspec.ValidationError as error:
        raise _bad("response_format", f'a "json_schema" with name and schema ({error})') from None
    if schema is None:
        raise _bad("response_format", 'a "json_schema" with a schema')
    return schema


def _json_schema(value: Any, field: str) -> Grammar:
    if value == ANY_JSON or value is True:
        return Grammar(GrammarKind.JSON_SCHEMA, "{}")
    return Grammar(GrammarKind.JSON_SCHEMA, _as_json(value, field))


def _structural_tag(value: Any, field: str) -> Grammar:
    text = _as_json(value, field)
    parts = _parts(text, field)
    if isinstance(parts, bool) or "format" in parts:
        raise _bad(field, "structures and triggers; the other format of structural tags is not supported")
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def _choice(value: Any, field: str) -> Grammar:
    if not isinstance(value, list) or not value:
        raise _bad(field, "a list of strings, at least one")
    text = _sized(value, field)
    if not all(isinstance(each, str) for each in value):
        raise _bad(field, "a list of strings, at least one")
    return Grammar(GrammarKind.CHOICE, text)


def _any_object(value: Any, field: str) -> Grammar:
    if value is not True:
        raise _bad(field, "a boolean")
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)


def _text_of(kind: GrammarKind) -> Read:
    def read(value: Any, field: str) -> Grammar:
        if not isinstance(value, str):
            raise _bad(field, "a string")
        return Grammar(kind, value)

    return read


def _structured_outputs(value: Any, field: str) -> Grammar:
    if not isinstance(value, dict):
        raise _bad(field, "an object")
    given = {name: option for name, option in value.items() if option not in (None, "", [], False)}
    unknown = given.keys() - OUTPUTS.keys() - set(WHITE_SPACE_FIELDS)
    kinds = [name for name in given if name in OUTPUTS]
    if unknown or len(kinds) != 1:
        raise _bad(field, f"one of {', '.join(OUTPUTS)}, and at most {', '.join(WHITE_SPACE_FIELDS)} beside it")
    grammar = OUTPUTS[kinds[0]](given[kinds[0]], field)
    return _with_white_space(grammar, given, field) if given.keys() & set(WHITE_SPACE_FIELDS) else grammar


def _guided_decoding(value: Any, field: str) -> Grammar:
    """The same as structured_outputs, with the name of a library beside it."""
    if isinstance(value, dict) and "backend" in value:
        _check_backend(value["backend"], field)
        value = {name: option for name, option in value.items() if name != "backend"}
    return _structured_outputs(value, field)


def _check_backend(value: Any, field: str) -> None:
    """Raises: Problem for another library than the one that is used here."""
    if value not in BACKENDS:
        raise _bad(field, "auto, guidance or llguidance, which is the library of grammars here")


def _with_white_space(grammar: Grammar | None, given: Json, field: str) -> Grammar:
    """The same JSON schema with what may be between its tokens."""
    schema = _parts(grammar.text, field) if grammar and grammar.kind is GrammarKind.JSON_SCHEMA else None
    if grammar is None or not isinstance(schema, dict):
        raise _bad(field, f"a JSON schema where {' or '.join(WHITE_SPACE_FIELDS)} is given")
    pattern = given.get("whitespace_pattern")
    if not isinstance(pattern, str | None):
        raise _bad(field, "a regular expression as white space")
    options = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return Grammar(grammar.kind, msgspec.json.encode({"x-guidance": options, **schema}).decode())


def _as_json(value: Any, field: str) -> str:
    """JSON text of an object, or a boolean, that came as JSON or as a string of it."""
    text = _sized(value, field)
    _parts(text, field)
    return text


def _parts(text: str, field: str) -> dict[str, msgspec.Raw] | bool:
    """The values of a JSON object, which are looked at no further: that takes a tenth of the time."""
    try:
        parts: dict[str, msgspec.Raw] | bool = PARTS.decode(text)
        return parts
    except msgspec.ValidationError:
        raise _bad(field, "a JSON object") from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _bad(field, f"JSON ({error})") from None


def _sized(value: Any, field: str) -> str:
    """The text of a grammar. Raises: Problem for one that is far too long."""
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except (RecursionError, OverflowError, ValueError, TypeError) as error:
        raise _bad(field, f"JSON ({error})") from None
    if len(text) > MAX_GRAMMAR_BYTES:
        reason = f"{field} has {len(text)} bytes: at most {MAX_GRAMMAR_BYTES} are taken"
        raise Problem(400, reason, field, "invalid_value")
    return text


def _bad(field: str, expected: str) -> Problem:
    return Problem(400, f"{field}: expected {expected}", field, "invalid_value")


READERS: dict[str, Read] = {
    "response_format": _response_format,
    "json_schema": _json_schema,
    "regex": _text_of(GrammarKind.REGEX),
    "ebnf": _text_of(GrammarKind.EBNF),
    "lark": _text_of(GrammarKind.LARK),
    "structural_tag": _structural_tag,
    "structured_outputs": _structured_outputs,
    "guided_json": _json_schema,
    "guided_regex": _text_of(GrammarKind.REGEX),
    "guided_choice": _choice,
    "guided_grammar": _text_of(GrammarKind.EBNF),
    "guided_json_object": _any_object,
    "guided_decoding": _guided_decoding,
}
OUTPUTS: dict[str, Read] = {  # fields of vLLM's structured_outputs
    "json": _json_schema,
    "regex": _text_of(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _text_of(GrammarKind.EBNF),  # Lark is told from EBNF by its rules
    "json_object": _any_object,
    "structural_tag": _structural_tag,
}
