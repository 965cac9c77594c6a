"""The C library's heap, which libraries of other languages take their memory from: its size, and giving it back.

Large values that come over a link again and again are kept once. A link carries values, not objects:
requests that share a grammar or a list of tokens each bring a copy.
"""

import asyncio
import ctypes
import functools
from collections import deque
from collections.abc import Hashable
from typing import TypeVar

GIVE_BACK_S = 1.0  # by then what took the memory has been done or refused, and more of it may have come


class _Sizes(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")] + [
        (name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def heap_bytes() -> int:
    """Bytes in use, large blocks with their spare room; 0 where it is not known. Takes 0.1 to 10 ms."""
    read = getattr(_library(), "mallinfo2", None)
    if read is None:
        return 0
    read.restype = _Sizes
    sizes = read()
    return int(sizes.uordblks + sizes.hblkhd)


def give_memory_back() -> None:
    """Let the allocator return what is free; glibc keeps it otherwise."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GivingBack:
    """Gives an event loop's memory back: a while after it was asked to, once however often, and in a thread.

    It takes 20 ms and more if much is free, in many places.
    """

    def __init__(self, delay_s: float = GIVE_BACK_S) -> None:
        self._delay_s = delay_s
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Some memory will be free. Needs a running loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._start)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


T = TypeVar("T")

MOST_KEPT = 8  # values of a kind: requests that share one come one after another


class Repeated:
    """The last distinct values of each kind."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, deque[object]] = {}

    def same(self, kind: Hashable, value: T) -> T:
        """The object that came before if it is equal to this, else this one."""
        kept = self._kept.setdefault(kind, deque(maxlen=MOST_KEPT))
        for known in kept:
            if known == value:
                assert isinstance(known, type(value))
                return known
        kept.append(value)
        return value
