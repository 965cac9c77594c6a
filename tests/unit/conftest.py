"""Small slot batches for the tests of speculation."""

from collections.abc import Callable

import pytest
import torch
from support.no_processors import no_processors

from overlap_spec.sampling.context import Sampling, SamplingWork
from overlap_spec.speculative.interfaces import SlotBatch


@pytest.fixture
def make_batch() -> Callable[..., SlotBatch]:
    """A batch of slots 0..B-1 at given lengths, all sampled alike, with pages in order."""

    def make(lengths: list[int], temperature: float = 0.0, pages: int = 8) -> SlotBatch:
        size = len(lengths)
        doubles = torch.ones(size, dtype=torch.float64)
        sampling = Sampling(
            temperature=doubles * temperature,
            top_k=torch.full((size,), 1 << 62),
            top_p=doubles,
            min_p=doubles * 0,
            seed=torch.arange(size),
            stop_from=torch.zeros(size, dtype=torch.int64),
            stop_ids=torch.full((size, 1), -1),
            output_from=torch.zeros(size, dtype=torch.int64),
            slots=torch.arange(size),
            work=SamplingWork(temperature > 0, False, False),
            processors=no_processors(200, num_pages=size * pages + 1),
        )
        table = torch.arange(1, size * pages + 1, dtype=torch.int32).view(size, pages)
        return SlotBatch(torch.arange(size), torch.tensor(lengths), table, sampling)

    return make
