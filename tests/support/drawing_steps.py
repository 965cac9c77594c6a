"""What a decode step draws, on the `meta` device: a judge part, and the draws of a draft, of a chain or of a tree."""

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from overlap_spec_kernels import Candidates, PublishedColumns, Verdict, neutral_rules
from torch import Tensor

from overlap_spec.features.grammar.window_masks import TokenMasks
from overlap_spec.features.log_probs.worker import LogProbOutput
from overlap_spec.features.penalties.worker import SlotLists
from overlap_spec.features.thinking.worker import BudgetColumns
from overlap_spec.sampling.context import SamplingWork, TokenPool
from overlap_spec.sampling.stages import LogitProcessors
from overlap_spec.speculative.drafts import NoProposer
from overlap_spec.speculative.interfaces import SlotBatch, SpecMethod, Window, level_context, window_context
from overlap_spec.speculative.proposers.tree import top_children
from overlap_spec.speculative.verifiers import ChainVerifier, draw_guess
from overlap_spec.worker.decode import DecodeStep, Forwarded
from overlap_spec.worker.slots import SlotRows
from support.given_logits import GivenLogits
from support.launches import META, launches

SLOTS, VOCAB, HOT, PAGES, PAGE_SIZE = 4, 3000, 700, 16, 16
TOPK, LEVELS = 2, 3


@dataclass(frozen=True)
class FakeTarget:
    """Logits alone."""

    rows: int
    vocab_size: int = VOCAB

    def logits(self, hidden: Any) -> GivenLogits:
        return GivenLogits(torch.empty(self.rows, VOCAB, device=META))


@dataclass(frozen=True)
class DrawingStep:
    """One of a kind of sampling."""

    work: SamplingWork
    width: int
    is_tree: bool

    def judge(self) -> Counter[str]:
        """Launches of the whole part: rows of slots, drawing, judging, log-probs."""
        forwarded = self._forwarded()
        step = self._step()
        return launches(lambda: step.decide(forwarded, self.work))

    def apply(self) -> Counter[str]:
        """Launches of the processors' first application to the target's rows."""
        slots, forwarded = self._slots(), self._forwarded()
        batch = forwarded.batch
        batch = SlotBatch(batch.slots, batch.lengths, batch.page_table, slots.sampling(batch.slots, self.work))
        logits, ids = torch.empty(SLOTS, self.width, VOCAB, device=META), torch.arange(VOCAB, device=META)
        context = window_context(forwarded.window, batch, ids)
        return launches(lambda: slots.processors.apply(logits, context))

    def draft(self) -> Counter[str]:
        """Launches of what draws a window's guesses, the draft model's own left out."""
        slots, batch, ids = self._slots(), self._forwarded().batch, torch.arange(HOT, device=META)
        draw = self._draw_tree if self.is_tree else self._draw_chain

        def run() -> None:
            drawing = slots.draft_sampling(batch.slots, self.work)
            draw(SlotBatch(batch.slots, batch.lengths, batch.page_table, drawing), ids)

        return launches(run)

    def _draw_chain(self, batch: SlotBatch, ids: Tensor) -> None:
        guesses: list[Tensor] = []
        for _ in range(self.width - 1):
            logits = GivenLogits(torch.empty(SLOTS, HOT, device=META))
            guesses.append(draw_guess(logits, batch, guesses, ids, None))

    def _draw_tree(self, batch: SlotBatch, ids: Tensor) -> None:
        grown, nodes = None, ints(SLOTS, 1)
        for level in range(LEVELS):
            logits = GivenLogits(torch.empty(nodes.numel(), HOT, device=META))
            top_children(logits, level_context(batch, grown, nodes, level, ids), TOPK)
            grown, nodes = Candidates.allocate(SLOTS, 10, torch.float32, META), ints(SLOTS, TOPK)

    def _slots(self) -> SlotRows:
        pool = TokenPool.allocate(PAGES, PAGE_SIZE, META)
        masks = TokenMasks.allocate(SLOTS + 1, self.width, -(-VOCAB // 32), META)
        lists = SlotLists.allocate(SLOTS + 1, VOCAB, META)
        neutral = neutral_rules(SLOTS + 1, VOCAB, META)
        slots = SlotRows(SLOTS, self.width, PAGES, LogitProcessors(VOCAB, pool, neutral))
        slots.draw_through((masks,), (LogProbOutput(SLOTS + 1, VOCAB, META),), (BudgetColumns(), lists))
        return slots

    def _step(self) -> DecodeStep:
        verifier = ChainVerifier(torch.arange(VOCAB, device=META))
        target: Any = FakeTarget(SLOTS * self.width)
        return DecodeStep(self._slots(), target, SpecMethod(NoProposer(), verifier), PAGE_SIZE)

    def _forwarded(self) -> Forwarded:
        slots = self._slots()
        table = torch.zeros(SLOTS, PAGES, dtype=torch.int32, device=META)
        batch = SlotBatch(ints(SLOTS), ints(SLOTS), table, slots.no_sampling)
        tokens = ints(SLOTS, self.width)
        window = Window(tokens, tokens.clone(), tokens.clone(), LEVELS) if self.is_tree else Window(tokens, tokens)
        longest = LEVELS + 1 if self.is_tree else self.width
        verdict = Verdict.allocate(SLOTS, PublishedColumns(longest, is_tree=self.is_tree), META)
        rows: Any = None
        output: Any = SimpleNamespace(final=None)
        return Forwarded(batch, window, rows, output, verdict)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)
