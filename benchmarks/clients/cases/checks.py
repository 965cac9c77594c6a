"""What the scripts of the SDKs share: named checks, run one after another, and one line of JSON at the end."""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

Check = Callable[[], Mapping[str, Any] | None]  # may return figures


def run_checks(checks: Mapping[str, Check], packages: tuple[str, ...]) -> None:
    """Run every check and print which passed. A failure is told with its last line."""
    results, figures = {}, {}
    for name, check in checks.items():
        try:
            found = check()
            results[name] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {error}"[:400]
            continue
        if found is not None:
            figures[name] = found
    summary = {"versions": {name: version(name) for name in packages}, "checks": results}
    print(json.dumps(summary | ({"figures": figures} if figures else {})))


def arguments() -> tuple[str, str]:
    """The server's address and the model's name."""
    url, model = sys.argv[1:3]
    return url, model
