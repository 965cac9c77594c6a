"""Python's shared objects for bytes of one character: code that writes into `bytes` in place changes them for everyone.

Then tests fail that have nothing to do with it, in one process, from some moment on.
"""

import ctypes

_ALL = bytes(range(256))  # CPython shares bytes objects of one byte alone
_SHARED = tuple(_ALL[character : character + 1] for character in _ALL)  # `bytes([character])` would be a new object
_HEADER = bytes.__basicsize__ - 1  # bytes of an object before its characters, which a zero follows


def damaged() -> list[int]:
    """The characters that have become others. Takes 5 us."""
    if b"".join(_SHARED) == _ALL:
        return []
    return [character for character in _ALL if _SHARED[character][0] != character]


def mend(characters: list[int]) -> None:
    """Write the characters back."""
    for character in characters:
        write(character, character)


def write(character: int, value: int) -> None:
    """Make the shared object of a character another one, as code does that must not."""
    ctypes.memset(id(_SHARED[character]) + _HEADER, value, 1)
