"""Takes the API keys out of what other processes can read of this one, as soon as it has its own copy.

Linux shows the memory in which the kernel put the command line and the environment (`ps`, `/proc/PID/cmdline`,
`/proc/PID/environ`). Keys are overwritten there; Python reads its arguments and environment before, once. Until then,
for as long as an interpreter takes to start, the list of processes has shown them.
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

OWN = Path("/proc/self")
FLAGS = re.compile(rb"\0--(?:admin-)?api-key[=\0]([^\0]+)")
VARIABLES = re.compile(rb"(?:^|\0)OVERLAP_SPEC_(?:ADMIN_)?API_KEY=([^\0]+)")
ARGUMENTS_AT, ENVIRONMENT_AT = 45, 47  # the words of `stat` after the name: where each begins, and where it ends


def hide_keys() -> None:
    """Overwrite every key of the command line and of the environment. Elsewhere than on Linux: do nothing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _overwrite(FLAGS, "cmdline", ARGUMENTS_AT)
        _overwrite(VARIABLES, "environ", ENVIRONMENT_AT)


def _overwrite(keys: re.Pattern[bytes], name: str, words_at: int) -> None:
    spans = list(_spans(keys, (OWN / name).read_bytes()))
    if not spans:
        return
    words = (OWN / "stat").read_text().rpartition(")")[2].split()
    begin, end = (int(word) for word in words[words_at : words_at + 2])
    for start, stop in spans:
        if begin and begin + stop <= end:
            ctypes.memset(begin + start, ord("*"), stop - start)


def _spans(keys: re.Pattern[bytes], text: bytes) -> Iterator[tuple[int, int]]:
    return (match.span(1) for match in keys.finditer(text))
