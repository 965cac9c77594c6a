"""The C library's heap, which libraries of other languages take their memory from: its size, and giving it back."""

import ctypes
import functools


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


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
