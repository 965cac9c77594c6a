"""The records that processes make of their time (`runtime/tracing.py`)."""

import msgspec

Value = int | float | str


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span of one track's time; an instant where `end` is `begin`. Seconds. `step` 0: of no step."""

    track: str
    name: str
    begin: float
    end: float
    step: int = 0
    args: dict[str, Value] = {}
