"""Do two samples come from one distribution? (Mann and Whitney 1947, Ann. Math. Statist. 18.)"""

import math
from collections.abc import Sequence


def rank_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided, by the normal approximation: the chance of ranks that differ so much. Equal values share a rank."""
    both = sorted([*first, *second])
    at = {value: index for index, value in reversed(list(enumerate(both)))}
    ranks = sum(at[value] + (both.count(value) + 1) / 2 for value in first)
    n, m = len(first), len(second)
    expected, deviation = n * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(ranks - expected) / deviation / math.sqrt(2))
