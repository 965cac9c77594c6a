"""Whether a row of an op has the same bits whatever rows are beside it."""

import random
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor

COUNTS = (1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 24, 31, 33, 48, 64)
NEIGHBOURS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda rows: rows,
    "NaN": lambda rows: torch.full_like(rows, torch.nan),
    "largest": lambda rows: torch.full_like(rows, torch.finfo(rows.dtype).max),
}
SEEDS, PLACES = 4, 8
# Ops of which a row has other bits with more rows; none of them runs with --enable-deterministic-inference.
BY_ROWS = frozenset({"linears in 16 bits", "linears in fp8", "linears in int4", "decode attention", "paged attention"})
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


def bits_by_count(op: Op, rows: Tensor, counts: tuple[int, ...]) -> list[int]:
    """The numbers of rows with which the first row has other bits than with fewer. Shapes: rows [N, ..].

    Raises: AssertionError where neighbours or the place change a row's bits.
    """
    begins: list[int] = []
    known: list[list[Tensor]] = []
    for count in counts:
        found, tried = [], []
        for seed in range(SEEDS):
            rng, draws = random.Random(f"{count} {seed}"), torch.Generator(rows.device).manual_seed(1000 * count + seed)
            for place, kind in zip(rng.choices(range(count), k=PLACES), cycle(NEIGHBOURS), strict=False):
                others = torch.randint(1, len(rows), (count,), device=rows.device, generator=draws)
                batch = NEIGHBOURS[kind](rows[others])
                batch[place] = rows[0]
                found.append(_results(op(batch), place))
                tried.append(f"place {place}, neighbours {kind}")
        # One wait for all of them: another process may have the GPU at each.
        parts = [torch.stack(each).reshape(len(found), -1) for each in zip(*found, strict=True)]
        same = torch.stack([((each == each[0]) & ~each.isnan()).all(1) for each in parts]).all(0).tolist()
        assert all(same), f"{count} rows: {[what for what, is_same in zip(tried, same, strict=True) if not is_same]}"
        among = [each[0] for each in parts]
        if not any(all(map(torch.equal, among, other)) for other in known):
            begins.append(count)
            known.append(among)
    return begins


def judge(name: str, begins: list[list[int]]) -> None:
    """`begins`: of the op's cases. `BY_ROWS` says whether some of them has more than one order."""
    assert any(len(each) > 1 for each in begins) == (name in BY_ROWS), f"{name}: {begins}"


def _results(found: Tensor | tuple[Tensor, ...], place: int) -> list[Tensor]:
    return [each[place].clone() for each in (found if isinstance(found, tuple) else (found,))]


def _same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(mine, theirs, strict=True))
