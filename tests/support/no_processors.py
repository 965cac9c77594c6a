"""What engines have that process no logits but those of a request's own parameters."""

import torch
from overlap_spec_kernels import neutral_rules

from overlap_spec.sampling.context import TokenPool
from overlap_spec.sampling.stages import LogitProcessor, LogitProcessors

NUM_SLOTS = 400


def no_processors(
    vocab_size: int,
    num_pages: int = 64,
    page_size: int = 16,
    place: torch.device | str = "cpu",
    own: tuple[LogitProcessor, ...] = (),
) -> LogitProcessors:
    """With a token pool of some pages. `own`: but these."""
    pool = TokenPool.allocate(num_pages, page_size, torch.device(place))
    return LogitProcessors(vocab_size, pool, neutral_rules(NUM_SLOTS, vocab_size, place), own)
