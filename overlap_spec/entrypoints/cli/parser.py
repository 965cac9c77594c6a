"""argparse that raises instead of exiting and never guesses an abbreviated flag."""

import argparse
import difflib
from typing import Any, NoReturn

from overlap_spec.entrypoints.cli.foreign_flags import instead_of
from overlap_spec.errors import OverlapSpecError


class UsageError(OverlapSpecError):
    """The command line cannot be understood."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises: UsageError."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UsageError(self._explain(unknown[0], getattr(parsed, "command", None)))
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def _explain(self, word: str, command: str | None) -> str:
        if not word.startswith("-"):
            return f"unknown argument {word!r}"
        flag = word.partition("=")[0]
        if instead := instead_of(flag):
            return f"{flag}: {instead}"
        near = difflib.get_close_matches(flag, self._flags(command), n=1)
        return f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else "")

    def _flags(self, command: str | None) -> list[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                return list(action.choices[command]._option_string_actions)
        return list(self._option_string_actions)
