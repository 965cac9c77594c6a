"""Every spelling of a grammar reaches the engine as one struct."""

import json
from typing import Any

import msgspec
import pytest
from support.fake_engine_client import INFO, FakeClient, ask
from support.least_time import least_time

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.openai.response_format import GrammarFields
from overlap_spec.messages import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, "[0-9]+")
EBNF = Grammar(GrammarKind.EBNF, 'root ::= "a"')
CHOICE = Grammar(GrammarKind.CHOICE, '["a", "b"]')
OF_TAG = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG))
NAMED = {"name": "a", "schema": SCHEMA, "strict": True}

SPELLINGS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, OF_SCHEMA),
    ({"response_format": {"type": "structural_tag", **TAG}}, None),
    ({"json_schema": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"json_schema": SCHEMA}, OF_SCHEMA),
    ({"json_schema": {}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    ({"json_schema": "$$ANY$$"}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    ({"regex": "[0-9]+"}, REGEX),
    ({"ebnf": EBNF.text}, EBNF),
    ({"lark": "start: A"}, Grammar(GrammarKind.LARK, "start: A")),
    ({"structural_tag": json.dumps(TAG)}, OF_TAG),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"regex": "[0-9]+", "json": None}}, REGEX),
    ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE),
    ({"structured_outputs": {"grammar": EBNF.text}}, EBNF),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, OF_TAG),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": {}, "structured_outputs": {}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    ({"guided_regex": "[0-9]+"}, REGEX),
    ({"guided_choice": ["a", "b"]}, CHOICE),
    ({"guided_grammar": EBNF.text}, EBNF),
    ({"guided_json_object": True}, OBJECT),
    ({"guided_decoding": {"json": SCHEMA, "backend": "guidance"}, "guided_decoding_backend": "auto"}, OF_SCHEMA),
    ({"guided_json_object": False, "regex": "", "json_schema": "", "guided_choice": []}, None),
    ({"response_format": {}, "guided_json": []}, None),
]
PATHS = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}, "/v1/completions": {"prompt": "x"}}


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize(("fields", "expected"), SPELLINGS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", [*PATHS, "/generate"])
def test_spelling(path: str, fields: dict[str, Any], expected: Grammar | None) -> None:
    body = {**PATHS[path], **fields} if path in PATHS else {"text": "x", "sampling_params": fields}
    client = FakeClient()
    response = ask(client, "POST", path, json=body)
    assert response.status_code == 200, response.text
    found = client.asked[0][2].grammar
    if "response_format" in fields and "structures" in fields["response_format"]:
        assert found is not None and found.kind is GrammarKind.STRUCTURAL_TAG
        expected = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(fields["response_format"]))
    assert read(found) == read(expected)


def read(grammar: Grammar | None) -> tuple[GrammarKind, Any] | None:
    """A grammar, and what its text says if it is JSON: spaces do not matter there."""
    if grammar is None or grammar.kind in (GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.LARK):
        return grammar and (grammar.kind, grammar.text)
    return grammar.kind, json.loads(grammar.text)


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": '{"a":[' + "[]," * 86_000 + "0]}"},
        {"structured_outputs": {"json": '{"a":[' + "0," * 130_000 + "0]}", "whitespace_pattern": " "}},
        {"structural_tag": '{"structures":[' + "{}," * 86_000 + "{}]}"},
        {"guided_choice": ["a"] * 60_000},
        {"guided_choice": ["a"] * 1_000_000},
        {"json_schema": '{"a":' * 50_000},
        {"json_schema": '{"a":' * 20_000 + "1" + "}" * 20_000},
    ],
    ids=range(7),
)
def test_large_grammars_are_read_in_little_time(fields: dict[str, Any]) -> None:
    asked = GrammarFields(**fields)

    def read() -> None:
        try:
            asked.grammar(INFO)
        except Problem as problem:
            assert problem.status == 400

    assert least_time(read, 0.02) < 0.02


def test_white_space_goes_with_the_schema() -> None:
    for options, guidance in (
        ({"disable_any_whitespace": True}, {"whitespace_flexible": False}),
        ({"whitespace_pattern": "[ ]?"}, {"whitespace_pattern": "[ ]?"}),
    ):
        client = FakeClient()
        body = {"prompt": "x", "structured_outputs": {"json": SCHEMA, **options}}
        assert ask(client, "POST", "/v1/completions", json=body).status_code == 200
        grammar = client.asked[0][2].grammar
        assert grammar is not None and json.loads(grammar.text) == {"x-guidance": guidance, **SCHEMA}


def test_vllms_older_names_of_white_space_and_library() -> None:
    client = FakeClient()
    asked = {"prompt": "x", "guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}
    assert ask(client, "POST", "/v1/completions", json=asked).status_code == 200
    grammar = client.asked[0][2].grammar
    assert grammar is not None and json.loads(grammar.text) == {"x-guidance": {"whitespace_pattern": " ?"}, **SCHEMA}
    for field, fields in (
        ("guided_whitespace_pattern", {"guided_whitespace_pattern": " "}),  # of no schema
        ("guided_whitespace_pattern", {"guided_whitespace_pattern": " ", "regex": "a"}),
        ("guided_whitespace_pattern", {"guided_whitespace_pattern": 5, "guided_json": SCHEMA}),
        ("guided_decoding_backend", {"guided_decoding_backend": "xgrammar", "guided_json": SCHEMA}),
        ("guided_decoding", {"guided_decoding": {"json": SCHEMA, "backend": ["auto"]}}),
    ):
        response = ask(FakeClient(), "POST", "/v1/completions", json={"prompt": "x", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_a_grammar_needs_a_tokenizer() -> None:
    info = msgspec.structs.replace(INFO, skip_tokenizer_init=True)
    response = ask(FakeClient(), "POST", "/v1/completions", info, json={"prompt": [1], "regex": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "regex")


def test_each_prompt_of_a_batch_has_its_own() -> None:
    client = FakeClient()
    ask(client, "POST", "/generate", json={"text": ["a", "b"], "sampling_params": [{"regex": "[0-9]+"}, {}]})
    assert [sampling.grammar for _, _, sampling in client.asked] == [REGEX, None]
