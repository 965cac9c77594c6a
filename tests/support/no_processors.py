"""What engines have that process no logits but those of a request's own parameters."""

import torch

from overlap_spec.sampling.processors import LogitProcessors
from overlap_spec.sampling.slot_lists import SlotLists
from overlap_spec.sampling.token_pool import TokenPool
from overlap_spec.worker.packed_lists import WORDS

NUM_SLOTS = 400


def no_processors(
    vocab_size: int, num_pages: int = 64, page_size: int = 16, place: torch.device | str = "cpu"
) -> LogitProcessors:
    """With a token pool of some pages."""
    pool = TokenPool.allocate(num_pages, page_size, torch.device(place))
    return LogitProcessors(vocab_size, pool, no_lists(vocab_size, place))


def no_lists(vocab_size: int, place: torch.device | str = "cpu") -> SlotLists:
    """Of slots that list nothing."""
    return SlotLists.allocate(NUM_SLOTS, vocab_size, WORDS, torch.device(place))
