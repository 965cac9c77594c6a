"""What measures which rows, on which engine or server, and for how long on an H200."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from rows import measure, servers
from rows.measure import Bench
from rows.results import Cell
from rows.setups import Flags, Scale


@dataclass(frozen=True)
class EnginePart:
    """Measured on the engine of that name (`setups.ENGINES`). `seconds`: without its start."""

    rows: tuple[int, ...]
    setup: str
    seconds: int
    cells: Callable[[Bench], AsyncIterator[Cell]]


@dataclass(frozen=True)
class ServerPart:
    """Starts servers of its own, with the flags of that name (`setups.SERVERS`). `seconds`: with their starts."""

    rows: tuple[int, ...]
    setup: str
    seconds: int
    cells: Callable[[Flags, Scale, servers.Introduce], AsyncIterator[Cell]]


START_S = {  # with kernels in their cache
    "8B": 25, "8B fp8 KV": 25, "8B plain": 15, "SmolLM2": 15, "SmolLM2 plain": 12,
    "8B fp8": 15, "8B fp8 plain": 10, "8B int4": 15, "8B int4 plain": 10,
    "1B": 13, "1B plain": 9, "3B": 15, "3B plain": 10,
}  # fmt: skip
Part = EnginePart | ServerPart


def _starts(model: str) -> Callable[[Flags, Scale, servers.Introduce], AsyncIterator[Cell]]:
    return lambda flags, _, introduce: servers.start_times(model, flags, introduce)


PARTS: tuple[Part, ...] = (
    EnginePart((1,), "8B", 40, measure.sampled_steps),
    EnginePart((1,), "8B plain", 30, measure.sampled_steps),
    EnginePart((2, 6), "8B", 28, measure.long_contexts),
    EnginePart((16,), "8B fp8 KV", 28, measure.long_contexts_in_8_bits),
    EnginePart((17,), "8B fp8", 5, measure.narrow_steps("fp8")),
    EnginePart((17,), "8B fp8 plain", 6, measure.narrow_steps("fp8")),
    EnginePart((17,), "8B int4", 5, measure.narrow_steps("int4")),
    EnginePart((17,), "8B int4 plain", 6, measure.narrow_steps("int4")),
    EnginePart((7,), "8B", 7, measure.turn_of_a_conversation),
    EnginePart((15,), "8B", 2, measure.new_prompts("8B")),
    EnginePart((15,), "SmolLM2", 2, measure.new_prompts("SmolLM2")),
    EnginePart((10,), "SmolLM2", 4, measure.crowded_steps),
    EnginePart((10,), "SmolLM2 plain", 5, measure.crowded_steps),
    EnginePart((12,), "1B", 3, measure.efficiency("1B")),
    EnginePart((12,), "1B plain", 3, measure.efficiency("1B")),
    EnginePart((12,), "3B", 3, measure.efficiency("3B")),
    EnginePart((12,), "3B plain", 4, measure.efficiency("3B")),
    ServerPart((11,), "SmolLM2 crowd", 30, servers.crowds),
    ServerPart((13,), "SmolLM2", 42, _starts("SmolLM2")),
    ServerPart((13,), "8B", 65, _starts("8B")),
)
ROWS = tuple(sorted({row for part in PARTS for row in part.rows}))


def chosen(rows: list[int]) -> dict[str, list[Part]]:
    """Parts that measure any of these rows, by engine; a server's part is alone. Rows come in the order of `rows`."""
    wanted = [part for row in rows for part in PARTS if row in part.rows]
    groups: dict[str, list[Part]] = {}
    for part in dict.fromkeys(wanted):
        name = f"{part.setup} engine" if isinstance(part, EnginePart) else f"{part.setup} server"
        groups.setdefault(name, []).append(part)
    return groups


def seconds(parts: list[Part]) -> int:
    """Expected time of parts that share an engine, its start included."""
    start = START_S[parts[0].setup] if isinstance(parts[0], EnginePart) else 0
    return start + sum(part.seconds for part in parts)
