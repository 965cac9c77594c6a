"""What n-gram guessing brings before caches exist: its limits, and the log of what all requests said.

The log is taken at load, as weights are, so that KV pages get what it leaves.
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import NgramLimits, NgramLog, allocate_log, with_slots
from torch import Tensor

from overlap_spec.config import NgramSettings
from overlap_spec.models.interfaces import DraftProfile, TreeShape
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.spec.drafts import EngineShape
from overlap_spec.spec.proposers.ngram import NgramMemory, NgramProposer, NgramWindows
from overlap_spec.spec.proposers.ngram_corpus import read_corpus


@dataclass(frozen=True)
class NgramDraft:
    """Trees, or chains where no node may have two children."""

    limits: NgramLimits
    log: NgramLog
    num_guesses: int
    corpus: Tensor  # [n] i32

    @staticmethod
    def of(asked: NgramSettings, num_guesses: int, place: torch.device) -> "NgramDraft":
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
    def profile(self) -> DraftProfile:
        """Guesses are not drawn at random. What is taken at load is the log, and what it begins with."""
        num_bytes = self.log.num_bytes + self.corpus.numel() * self.corpus.element_size()
        return DraftProfile(
            num_bytes=num_bytes,
            log_bytes=num_bytes,
            tree=None if self.limits.max_breadth == 1 else TreeShape(self.num_guesses),
        )

    def attach(self, cache: KVCache, shape: EngineShape) -> NgramProposer:
        log = with_slots(self.log, shape.num_rows)
        memory = NgramMemory(self.limits, shape.token_pool, log, self.corpus)
        memory.enter_corpus()
        return NgramProposer(memory, NgramWindows.allocate(shape.num_rows, self.num_guesses, shape.device))
