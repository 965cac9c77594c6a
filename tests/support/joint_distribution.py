"""The probability of each run of tokens after a prompt, computed from the logits; and a G-test of counts."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.rows import chunk_rows
from support.tiny.models import CPU

PAGE_SIZE = 16  # tokens: the longest run, with its prompt
FEWEST = 5.0  # expected samples of a cell; rarer ones count together

Run = tuple[int, ...]


def joint(
    loaded: LoadedTarget, prompt: list[int], length: int, distribution: Callable[[list[float]], list[float]]
) -> dict[Run, float]:
    """The probability of every run that can come. `distribution`: what is drawn from, of a row of logits."""
    cache = KVCache.allocate(loaded.kv_shape, 2, PAGE_SIZE, torch.float64, CPU)
    target = loaded.attach(cache, 2 * PAGE_SIZE)

    def after(run: Run) -> list[float]:
        tokens = [*prompt, *run]
        ends, pages = torch.tensor([0, len(tokens)]), torch.tensor([[1]], dtype=torch.int32)
        positions = torch.arange(len(tokens))
        rows = chunk_rows(pages, torch.zeros_like(positions), positions, ends, len(tokens), PAGE_SIZE)
        hidden = target.forward(torch.tensor(tokens), rows).hidden[-1:]
        return distribution(target.logits(hidden).compute()[0].tolist())

    runs: dict[Run, float] = {(): 1.0}
    for _ in range(length):
        longer = ((run, p, enumerate(after(run))) for run, p in runs.items())
        runs = {(*run, token): p * q for run, p, following in longer for token, q in following if q > 0}
    return runs


def p_value(counts: Counter[Run], expected: dict[Run, float]) -> float:
    """The p-value of a G-test; 0 if a run of probability 0 was seen."""
    if counts.keys() - expected.keys():
        return 0.0
    num_samples = sum(counts.values())
    cells = [(counts[run], p * num_samples) for run, p in expected.items()]
    common = [cell for cell in cells if cell[1] >= FEWEST]
    rare = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < FEWEST), strict=True)]
    table: Tensor = torch.tensor([*common, *([rare] if rare else [])], dtype=torch.float64)
    g = 2 * torch.xlogy(table[:, 0], table[:, 0] / table[:, 1]).sum()
    half = torch.tensor((len(table) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, g / 2))
