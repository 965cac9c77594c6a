"""Tables of what is run against the server, and of what the server refuses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overlap_spec.server.unsupported import REFUSED

Result = dict[str, Any]
CLIENTS = Path(__file__).parents[1] / "results/clients"


def _clients() -> str:
    results = [json.loads(path.read_text()) for path in sorted(CLIENTS.glob("*.json"))]
    rows = [(f"`{each['client']}`", _versions(each), each["what"], _outcome(each)) for each in results]
    return "\n".join([_table(("", "version", "what it does", "passed"), rows), "", *_not_passed(results)])


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def _outcome(result: Result) -> str:
    """How much of it passed."""
    if "checks" in result:
        passed = sum(outcome == "ok" for outcome in result["checks"].values())
        return f"{passed} of {len(result['checks'])} checks"
    if "counts" in result:
        return f"{result['counts']['passed']} of {result['tests']} tests"
    return f"{result['succeeded']} of {result['succeeded'] + result['failed']} requests"


def _not_passed(results: Sequence[Result]) -> list[str]:
    """A line for each reason for which something did not pass."""
    lines = []
    for result in results:
        for reason, tests in result.get("not_passed", {}).items():
            lines.append(f"- `{result['client']}`, {len(tests)}: {reason}")
        for check, outcome in result.get("checks", {}).items():
            if outcome != "ok":
                lines.append(f"- `{result['client']}`, {check}: {outcome}")
    return lines


def _refused() -> str:
    rows = [(", ".join(f"`{name}`" for name in fields), reason) for reason, fields in REFUSED.items()]
    return _table(("parameter", "why"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


LISTS: dict[str, Callable[[], str]] = {"clients": _clients, "refused": _refused}
