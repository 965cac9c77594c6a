"""What the scripts of the SDKs share: named checks, run one after another, and one line of JSON at the end."""

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

Check = Callable[[], None]


def run_checks(checks: dict[str, Check], packages: tuple[str, ...]) -> None:
    """Run every check and print which passed. A failure is told with its last line."""
    results = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {error}"[:400]
    print(json.dumps({"versions": {name: version(name) for name in packages}, "checks": results}))


def arguments() -> tuple[str, str]:
    """The server's address and the model's name."""
    url, model = sys.argv[1:3]
    return url, model
