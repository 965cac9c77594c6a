"""Whether a row of an op has the same bits whatever rows are beside it."""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

COUNTS = (1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 24, 31, 33, 48, 64)
NEIGHBOURS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda rows: rows,
    "NaN": lambda rows: torch.full_like(rows, torch.nan),
    "largest": lambda rows: torch.full_like(rows, torch.finfo(rows.dtype).max),
}
Op = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def companies(rows: Tensor, seed: int, counts: tuple[int, ...] = COUNTS) -> Iterator[tuple[str, Tensor, int]]:
    """The first of `rows` among others, in batches of every size: what they are, the batch, and its place there."""
    rng = random.Random(seed)
    for count in counts:
        for kind, change in NEIGHBOURS.items():
            place = rng.randrange(count)
            others = torch.tensor(rng.choices(range(1, len(rows)), k=count))
            batch = change(rows[others])
            batch[place] = rows[0]
            yield f"place {place} of {count}, others {kind}", batch, place


def differences(op: Op, rows: Tensor, seed: int = 0, counts: tuple[int, ...] = COUNTS) -> list[str]:
    """Companies in which the first row has other bits than alone. Shapes: rows [N, ..]."""
    alone = _results(op(rows[:1].clone()), 0)
    found = companies(rows, seed, counts)
    return [what for what, batch, place in found if not _same(_results(op(batch), place), alone)]


def _results(found: Tensor | tuple[Tensor, ...], place: int) -> list[Tensor]:
    return [each[place].clone() for each in (found if isinstance(found, tuple) else (found,))]


def _same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(mine, theirs, strict=True))
