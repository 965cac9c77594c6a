"""Expressions that hold for one place are counted there, and nowhere else."""

import json
from typing import Any

import pytest

from overlap_spec.features.grammar.intersections import check_intersections


def pattern(index: int) -> dict[str, Any]:
    return {"pattern": f"^[a-{chr(98 + index)}]{{2,}}.[0-{index}]$"}  # of 2.3 bits


MANY = [pattern(index) for index in range(9)]
REFS = [{"$ref": f"#/$defs/d{index}"} for index in range(9)]
DEFS = {f"d{index}": schema for index, schema in enumerate(MANY)}
TOGETHER = [  # schemas in which all nine hold for one place
    {"allOf": MANY},
    {"allOf": [MANY[0], {"allOf": [*MANY[1:4], {"anyOf": [{}, {"allOf": MANY[4:]}]}]}]},
    {"allOf": [{"anyOf": [{"type": "null"}, each]} for each in MANY]},
    {"allOf": MANY[:5], "oneOf": [{"type": "null"}, {"allOf": MANY[5:]}]},
    {"$defs": DEFS, "allOf": REFS},
    {"$defs": {key: {"$anchor": f"a{key}", **each} for key, each in DEFS.items()}}
    | {"allOf": [{"$ref": f"#ad{index}"} for index in range(9)]},
    {"$defs": {key: {"$id": f"http://x/{key}", **each} for key, each in DEFS.items()}}
    | {"allOf": [{"$ref": f"http://x/d{index}"} for index in range(9)]},
    {"$defs": {"a/b~c": {"allOf": MANY}}, "items": {"$ref": "#/$defs/a~1b~0c"}},
    {"allOf": [{"properties": {"x": each}} for each in MANY]},
    {"allOf": [{"properties": {"x": {"properties": {"y": each}}}} for each in MANY]},
    {"allOf": [{"additionalProperties": each} for each in MANY]},
    {"allOf": [{"properties": {"x": MANY[0]}}, *({"additionalProperties": each} for each in MANY[1:])]},
    {"allOf": [{"patternProperties": {"x": each}} for each in MANY]},
    {"allOf": [{"items": each} for each in MANY]},
    {"allOf": [{"prefixItems": [{}, each]} for each in MANY]},
    {"allOf": [{"prefixItems": [{}, MANY[0]]}, *({"items": each} for each in MANY[1:])]},
    {"allOf": [{"items": [], "additionalItems": each} for each in MANY]},
    {"type": ["array"], "items": {"anyOf": [{"not-known": 1}, {"allOf": MANY}]}},
    {"$defs": {"n": {"allOf": [{"properties": {"c": {"$ref": "#/$defs/n"}}}, {"allOf": MANY}]}}}
    | {"properties": {"first": {"$ref": "#/$defs/n"}}},
    {"allOf": [{"pattern": f"{index}" + "abcdefghijklmnopqrstuvwxyz"} for index in range(5)]},
    {"allOf": [{"format": f"f{index}"} for index in range(6)]},
]
APART = [
    {"properties": {f"k{index}": each for index, each in enumerate(MANY)}},
    {"anyOf": MANY},
    {"allOf": MANY[:4], "properties": {"x": {"allOf": MANY[4:]}}},
    {"allOf": [{"properties": {f"k{index}": each}} for index, each in enumerate(MANY)]},
    {"allOf": [{"prefixItems": [*[{}] * index, each]} for index, each in enumerate(MANY)]},
    {"allOf": [{"pattern": "abcdefghijklmnopqrstuvwxyz0123456789"}] * 20},  # the same
    {"pattern": "".join(map(chr, range(0x100, 0x400)))},  # one is never refused
    {"$defs": DEFS, "properties": {f"k{index}": each for index, each in enumerate(REFS)}},
    {"$defs": {"n": {"allOf": [{"properties": {"c": {"$ref": "#/$defs/n"}, "a": MANY[0]}}, {"properties": DEFS}]}}}
    | {"$ref": "#/$defs/n"},
    {"enum": MANY},
    True,
    {
        "properties": [],
        "allOf": {},
        "anyOf": 3,
        "$ref": 5,
        "pattern": 4,
        "items": 1,
        **{f"x{i}": m for i, m in enumerate(MANY)},
    },
]


def check(schema: Any) -> None:
    check_intersections(json.dumps({"grammars": [{"json_schema": schema, "lark_grammar": None}]}))


@pytest.mark.parametrize("schema", TOGETHER, ids=lambda schema: json.dumps(schema)[:50])
def test_patterns_that_hold_together_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"intersection of \d patterns and formats may cost 2\^"):
        check(schema)


@pytest.mark.parametrize("schema", APART, ids=lambda schema: json.dumps(schema)[:50])
def test_patterns_of_different_places_are_not(schema: Any) -> None:
    check(schema)


def test_a_reference_that_is_not_in_the_schema_is_named() -> None:
    with pytest.raises(ValueError, match="#/x/y"):
        check({"$defs": DEFS, "properties": {"a": {"$ref": "#/x/y"}}})


def test_schemas_that_hold_together_in_too_many_ways_are_refused() -> None:
    defs = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"x": {}, **MANY[i % 9]}]} for i in range(30)}
    with pytest.raises(ValueError, match="more than 200000 steps"):
        check({"$defs": defs | {"a30": {}}, "allOf": [{"$ref": f"#/$defs/a{i}"} for i in range(6)]})


LARK = [  # rules, and whether nine expressions or more are intersected
    ("start: A\nA: " + " & ".join(f"/.*[a-{'bcdefghij'[i]}]/" for i in range(9)), True),
    (
        "start: A\nA: " + " & ".join(f"B{i}" for i in range(9)) + "".join(f"\nB{i}: /.*a{i}[b-c]/" for i in range(9)),
        True,
    ),
    ("start: B0\n" + "\n".join(f"B{i}: /.*a{i}/ & B{i + 1}" for i in range(9)) + "\nB9: /x/", True),
    ("start: A\nA: /a+/ & /[ab]+/ & ~/.*c/", False),
    ("start: " + " ".join(f"A{i}" for i in range(40)) + "".join(f"\nA{i}: /{i}.*/ & /.*b/" for i in range(40)), False),
    ('start: "&&&&&&&&&&&&&&&&&&&&&&abcdefgh" /&&&&&&&&&&&&&&&&&&&&xyz/  // &&&&&&&&&& abcdefg', False),
    ("start: %json " + json.dumps({"allOf": MANY}), True),
    ('start: "x" %json\n ' + json.dumps({"allOf": MANY[:2]}) + " /a&b/", False),
    ('start: "%json nothing of it"', False),
]


@pytest.mark.parametrize(("rules", "is_refused"), LARK, ids=range(len(LARK)))
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_intersections_in_lark(rules: str, is_refused: bool, is_wrapped: bool) -> None:
    if is_wrapped:
        rules = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}, {"lark_grammar": rules}]})
    if not is_refused:
        return check_intersections(rules)
    with pytest.raises(ValueError, match="may cost"):
        check_intersections(rules)
