"""What n-gram guessing brings before caches exist: its limits, and the log of what all requests said.

The log is taken at load, as weights are, so that KV pages get what it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from overlap_spec_kernels import NgramLimits, NgramLog, allocate_log, with_slots
from torch import Tensor

from overlap_spec.config import NgramSettings
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.work import ForwardWork
from overlap_spec.spec.proposers.ngram import NgramMemory, NgramProposer, NgramWindows
from overlap_spec.spec.proposers.ngram_corpus import read_corpus
from overlap_spec.spec.types import TreeShape

if TYPE_CHECKING:
    from overlap_spec.spec.methods import EngineShape


@dataclass(frozen=True)
class NgramDraft:
    """Trees, or chains where no node may have two children."""

    limits: NgramLimits
    log: NgramLog
    num_guesses: int
    corpus: Tensor  # [n] i32
    kv_shape: KVShape = KVShape(0, 0, 0)
    work: ForwardWork = ForwardWork()
    extend_work: ForwardWork = ForwardWork()
    aux_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0  # guesses are not drawn at random
    token_bytes: int = torch.int32.itemsize  # of its pool

    @staticmethod
    def of(asked: NgramSettings, num_guesses: int, place: torch.device) -> NgramDraft:
        """Take the log's memory, and read what it begins with. Raises: ConfigError."""
        limits = NgramLimits(
            min_match=asked.min_match,
            max_match=asked.max_match,
            branch=asked.branch,
            min_breadth=asked.min_breadth,
            max_breadth=asked.max_breadth,
            by_frequency=asked.by_frequency,
        )
        corpus = torch.zeros(0, dtype=torch.int32)
        if asked.corpus is not None:
            assert asked.tokenizer_dir is not None, "resolve() lets no corpus through without a tokenizer"
            corpus = read_corpus(asked.corpus, asked.tokenizer_dir, asked.corpus_tokens)
        return NgramDraft(limits, allocate_log(asked.capacity, place), num_guesses, corpus.to(place))

    @property
    def num_bytes(self) -> int:
        """Of the log, and of what it begins with."""
        return self.log.num_bytes + self.corpus.numel() * self.corpus.element_size()

    @property
    def tree(self) -> TreeShape | None:
        """See `LoadedProposer`."""
        return None if self.limits.max_breadth == 1 else TreeShape(self.num_guesses)

    def attach(self, cache: KVCache, shape: EngineShape) -> NgramProposer:
        """Take the memory of requests' own tokens."""
        pool = torch.zeros(shape.scratch_start, dtype=torch.int32, device=shape.device)
        log = with_slots(self.log, shape.num_rows)
        memory = NgramMemory(self.limits, pool, log, shape.page_size, self.corpus)
        memory.enter_corpus()
        return NgramProposer(memory, NgramWindows.allocate(shape.num_rows, self.num_guesses, shape.device))
