"""What engines have that process no logits but those of a request's own parameters."""

import torch

from overlap_spec.sampling.processors import LogitProcessors
from overlap_spec.sampling.token_pool import TokenPool


def no_processors(
    vocab_size: int, num_pages: int = 64, page_size: int = 16, place: torch.device | str = "cpu"
) -> LogitProcessors:
    """With a token pool of some pages."""
    return LogitProcessors(vocab_size, TokenPool.allocate(num_pages, page_size, torch.device(place)))
