"""An extension is a feature's part of a message. The engine carries it without reading it.

A message that carries some is generic in their types. Its reader's decoder is built from the link's union and all types
that are attached (`carrying`), so that a bad payload still names the place: `at $[7][0][1]`.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Self, get_args

import msgspec
from typing_extensions import TypeVar


class Extension(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of what features send."""


class Rows(Extension, frozen=True):
    """Columns, one row for each slot of a step; a column that holds nothing for any slot is empty."""

    def take(self, rows: Sequence[int]) -> Self:
        """Some of the rows, in this order."""
        columns = (getattr(self, name) for name in self.__struct_fields__)
        return type(self)(*([column[row] for row in rows] if column else column for column in columns))


class PackedRows(Rows, frozen=True):
    """Rows of bytes, which the scheduler passes on to the frontend: of committed tokens, and of tokens of prompts.

    A column is empty where no request has any; else it has b"" for those that have none.
    """

    tokens: list[bytes] = []
    prompts: list[bytes] = []


Kind = TypeVar("Kind", bound=Extension)
Carried = TypeVar("Carried", bound=Extension, default=Extension, covariant=True)


def find(extensions: Sequence[Extension], kind: type[Kind]) -> Kind | None:
    """The extension of this type; None without one. A message has few, and one of each type at most."""
    for each in extensions:
        if isinstance(each, kind):
            return each
    return None


def carrying(union: Any, kinds: Sequence[type[Extension]]) -> Any:
    """The type of a link's decoder. Messages that carry extensions carry those of these types, and no others.

    In the union, those that are no rows of a message stand for `Extension`: they are messages of their own.
    """
    carried = reduce(or_, kinds) if kinds else None
    members: list[Any] = []
    for member in get_args(union) or (union,):
        if member is Extension:
            members += [kind for kind in kinds if not issubclass(kind, Rows)]
        else:
            members.append(member[carried] if kinds and getattr(member, "__parameters__", ()) else member)
    return reduce(or_, members)
