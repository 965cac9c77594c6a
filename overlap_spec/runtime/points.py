"""Points at which features attach: of hooks that share a base, those that do something at a point."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Hook = TypeVar("Hook")


def overriding(hooks: Iterable[Hook], point: Callable[..., Any]) -> tuple[Hook, ...]:
    """Those that override a method of their base, in their order. The others cost nothing where it is called."""
    return tuple(hook for hook in hooks if getattr(type(hook), point.__name__) is not point)
