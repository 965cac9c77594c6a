"""What steps of each width take on an H200: the 8B shape with EAGLE-3, widths of the default tree.

Steps take `SERVED`; what was measured at start, `START`, is not quite that.
"""

from bisect import bisect_left

from overlap_spec.messages import StepCosts

WIDTHS = (1, 2, 4, 8)
Table = dict[int, tuple[float, ...]]  # ms of each width, by rows
START: Table = {
    1: (3.75, 4.2, 4.45, 4.75),
    8: (3.88, 4.5, 4.75, 4.95),
    16: (4.0, 4.8, 5.2, 5.4),
    32: (4.28, 5.2, 6.0, 6.3),
    64: (4.9, 5.9, 8.9, 11.0),
    128: (6.2, 7.85, 14.9, 31.0),
    256: (8.54, 14.59, 28.74, 55.68),
}
SERVED: Table = {
    1: (3.77, 4.32, 4.5, 4.8),
    8: (3.91, 4.69, 4.8, 4.96),
    24: (4.23, 5.52, 5.7, 5.92),
    32: (4.34, 5.75, 6.0, 6.42),
    64: (5.1, 6.7, 9.3, 11.5),
    100: (5.93, 8.16, 13.4, 23.4),
    128: (6.35, 8.62, 16.5, 31.5),
    200: (8.22, 12.6, 24.0, 45.0),
    256: (9.08, 13.9, 29.3, 56.3),
}
# Guesses from one column of a tree's first path to the next one's, by tokens of a step: synthetic acceptance goes along
# that path, and a draft that guesses so well grows such a tree of seven guesses (`certainty`).
LEVELS = {1.3: (4, 3), 2.5: (1, 1, 2, 3), 3.5: (1, 1, 1, 1, 3)}


def costs_of(table: Table) -> StepCosts:
    return StepCosts(tuple(table), WIDTHS, tuple(tuple(ms / 1000 for ms in row) for row in table.values()))


def between(table: Table, batch_size: int) -> list[float]:
    """Milliseconds for a batch size between those of the table."""
    sizes = list(table)
    right = min(max(bisect_left(sizes, batch_size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    part = (batch_size - low) / (high - low)
    return [a + part * (b - a) for a, b in zip(table[low], table[high], strict=True)]
