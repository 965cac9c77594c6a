"""Tables of what is run against the server, and of what the server refuses."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from clients.reasons import REASONS

from overlap_spec.entrypoints.http.body_fields import LENGTHS, REFUSED, Length

Result = dict[str, Any]
CLIENTS = Path(__file__).parents[1] / "results/clients"


def _clients() -> str:
    results = [json.loads(path.read_text()) for path in sorted(CLIENTS.glob("*.json"))]
    rows = [(f"`{each['client']}`", _versions(each), each["what"], outcome(each)) for each in results]
    return "\n".join([table(("", "version", "what it does", "passed"), rows), "", *not_passed(results)])


def _versions(result: Result) -> str:
    if "tests_of" in result:
        return str(result["tests_of"]).replace("==", " ")
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def outcome(result: Result) -> str:
    """How much of it passed."""
    if "checks" in result:
        passed = sum(outcome == "ok" for outcome in result["checks"].values())
        return f"{passed} of {len(result['checks'])} checks"
    if "tests" in result:
        failed = sum(test_reason is None for test_reason in _reasons(result).values())
        others = len(result["not_passed"]) - failed
        return f"{result['passed']} of {result['tests']} tests; {others} are explained below, {failed} are not"
    return f"{result['succeeded']} of {result['succeeded'] + result['failed']} requests"


def not_passed(results: Sequence[Result]) -> list[str]:
    """A line for each reason for which something did not pass."""
    lines = []
    for result in results:
        client, why = result["client"], _reasons(result)
        known = Counter(reason for reason in why.values() if reason is not None)
        lines += [f"- `{client}`, {count}: {reason}" for reason, count in known.items()]
        lines += [f"- `{client}`, `{test}` fails: {result['not_passed'][test]}" for test in why if why[test] is None]
        checks = result.get("checks", {}).items()
        lines += [f"- `{client}`, `{check}` fails: {outcome}" for check, outcome in checks if outcome != "ok"]
    return lines


def _reasons(result: Result) -> dict[str, str | None]:
    """Of each test that did not pass; none if it failed."""
    known = REASONS.get(result["client"], {}).items()
    return {
        test: next((reason for pattern, reason in known if fnmatch(test, pattern)), None)
        for test in result.get("not_passed", {})
    }


def _refused() -> str:
    rows = [(", ".join(f"`{name}`" for name in fields), reason) for reason, fields in REFUSED.items()]
    return table(("parameter", "why"), rows)


def _lengths() -> str:
    groups: dict[Length, list[str]] = {}
    for name, length in LENGTHS.items():
        groups.setdefault(length, []).append(f"`{name}`")
    rows = [
        (", ".join(names), f"{each.items:,}" if each.items else "", f"{each.chars:,}" if each.chars else "")
        for each, names in groups.items()
    ]
    return table(("field", "items", "characters of the string, or of each"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


LISTS: dict[str, Callable[[], str]] = {"clients": _clients, "refused": _refused, "lengths": _lengths}
