"""Rules for markers, which may be special tokens, and for the reasoning before what a grammar is of."""

import json
import re
from collections.abc import Mapping, Sequence

from overlap_spec.messages import Reasoning

ANSWER = "answer"  # a grammar within a grammar


def with_markers(rules: str, markers: Sequence[str], special_tokens: Mapping[str, int]) -> str:
    """Add `marker_0`, `marker_1`, .. to rules in Lark."""
    added = (f"marker_{index}: {_marker(marker, special_tokens)}" for index, marker in enumerate(markers))
    return "\n".join((rules, *added))


def after_reasoning(rules: str, reasoning: Reasoning, is_reasoning: bool, special_tokens: Mapping[str, int]) -> str:
    """The same grammar for what follows the reasoning.

    An output that does not begin inside the reasoning may also begin with the answer.
    """
    begins = "" if reasoning.is_implicit or is_reasoning else "marker_0 gap "
    thought = f"{begins}thought gap"
    outer = [
        f"start: {thought if is_reasoning else f'({thought})?'} @{ANSWER}",
        r"gap: /\s*/",
        _thought(reasoning.closing, special_tokens),
    ]
    return _around(with_markers("\n".join(outer), (reasoning.opening,), special_tokens), rules)


def after_gap(rules: str) -> str:
    """The same grammar, with white space before it: for an answer whose reasoning something else follows."""
    return _around(f"start: gap @{ANSWER}\ngap: /\\s*/", rules)


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
    return f"<[{special_tokens[marker]}]>" if marker in special_tokens else json.dumps(marker, ensure_ascii=False)
