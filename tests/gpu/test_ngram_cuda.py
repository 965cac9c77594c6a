"""The operations on n-grams on a GPU, against their references on the CPU: in steps, captured, without a wait."""

import pytest
import torch
from overlap_spec_kernels import (
    BANDS,
    PublishedColumns,
    allocate_log,
    ngram_absorb,
    ngram_lookahead,
    ngram_match,
    ngram_merge,
    store_tokens,
    with_slots,
)
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.ngram_inputs import CASES, LIMITS, NgramCase, NgramOps, in_bands
from support.no_processors import no_processors

from overlap_spec.features.ngram.worker import NgramMemory, NgramProposer, NgramWindows
from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.sampling.context import SAMPLING_WORK, Sampling, TokenPool
from overlap_spec.speculative.interfaces import Guesses, SlotBatch, Verdict

OPS = NgramOps(store_tokens, ngram_absorb, ngram_match, ngram_merge, ngram_lookahead)
LONG = NgramCase(LIMITS["by recency"], capacity=1 << 20, most=9000, num_steps=5, num_guesses=15)
PAGE_SIZE, NUM_PAGES, WIDTH = 16, 130, 12


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", [*CASES.values(), LONG], ids=[*CASES, "long histories"])
def test_kernels_play_as_their_references_do(case: NgramCase, seed: int) -> None:
    played = zip(case.play(OPS, "cuda", seed), case.play(OPS, "cpu", seed), strict=True)
    for number, (actual, expected) in enumerate(played):
        assert torch.equal(actual, expected), f"output {number}"


class Steps:
    """Decode steps of a proposer, with tokens that are given."""

    def __init__(self, place: str, batch_size: int, is_divided: bool = False, **limits: int) -> None:
        """`is_divided`: among three owners, in bands of their own."""
        self.place, self.batch_size = torch.device(place), batch_size
        log = with_slots(allocate_log(1 << 16, self.place), batch_size + 1)
        if is_divided:
            owners = torch.arange(batch_size + 1, device=place) % 3
            bands = torch.tensor([in_bands(*range(3, 8)), in_bands(0), in_bands(12, 14)], device=place)
            log.owner.copy_(owners)
            log.bands.copy_(bands[owners])
            log.stride.fill_(BANDS)
        self.pool = TokenPool.allocate(batch_size * NUM_PAGES + 1, PAGE_SIZE, self.place)
        chosen = LIMITS["by recency"]._replace(**limits)
        corpus = torch.zeros(0, dtype=torch.int32, device=place)
        newest = torch.zeros(batch_size + 1, dtype=torch.int64, device=place)
        memory = NgramMemory(chosen, self.pool, log, corpus, newest)
        self.proposer = NgramProposer(memory, NgramWindows.allocate(batch_size + 1, WIDTH - 1, self.place))
        self.slots = torch.arange(batch_size, device=place)
        pages = 1 + torch.arange(batch_size * NUM_PAGES, device=place, dtype=torch.int32)
        self.table = pages.view(batch_size, NUM_PAGES).contiguous()
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=place)
        self.committed = torch.zeros(batch_size, WIDTH, dtype=torch.int64, device=place)
        self.accept_len = torch.zeros(batch_size, dtype=torch.int64, device=place)

    def batch(self, lengths: torch.Tensor) -> SlotBatch:
        none = torch.zeros(0, device=self.place)
        return SlotBatch(self.slots, lengths, self.table, Sampling(*[none] * 9, SAMPLING_WORK[0], no_processors(1)))

    def step(self) -> tuple[Guesses, torch.Tensor]:
        """Absorb what is committed, guess, move on."""
        columns = PublishedColumns(WIDTH, is_self_drafting=True)
        verdict = Verdict.allocate(self.batch_size, columns, self.place)
        after = self.lengths + self.accept_len + 1
        verdict = verdict._replace(tokens=self.committed, accept_len=self.accept_len, next_positions=after[None])
        before, nothing = self.batch(self.lengths), self.committed[:0]
        lookahead = verdict.published.guess_report
        self.proposer.report(before, verdict, lookahead)
        rows, output = RowBatch(nothing, None, self.table, None, 1, True), TargetOutput(nothing, nothing)
        store_tokens(*self.pool.rows_of(self.table), self.lengths + 1, self.committed, self.accept_len + 1)
        learnt = self.proposer.extend(before, rows, output, verdict)
        guesses = self.proposer.propose(self.batch(after), learnt, WIDTH - 1)
        self.lengths.copy_(after)
        return guesses, lookahead

    def commit(self, committed: torch.Tensor, accept_len: torch.Tensor) -> None:
        columns = torch.arange(WIDTH)
        self.committed.copy_(committed.masked_fill(columns > accept_len[:, None], -1))
        self.accept_len.copy_(accept_len)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 100])
@pytest.mark.parametrize("max_breadth", [1, 10])
@pytest.mark.parametrize("is_divided", [False, True])
def test_captured_steps_guess_as_the_oracle_does(batch_size: int, max_breadth: int, is_divided: bool) -> None:
    torch.manual_seed(0)
    oracle, captured = (
        Steps("cpu", batch_size, is_divided, max_breadth=max_breadth),
        Steps("cuda", batch_size, is_divided, max_breadth=max_breadth),
    )
    warm = Steps("cuda", batch_size, max_breadth=max_breadth)
    warm.commit(torch.zeros(batch_size, WIDTH, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64))
    warm.step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guesses, lookahead = captured.step()
    for _ in range(60):
        run = torch.randint(0, 5, (batch_size, WIDTH)), torch.randint(0, WIDTH, (batch_size,))
        for steps in (oracle, captured):
            steps.commit(*run)
        graph.replay()
        expected, expected_lookahead = oracle.step()
        assert torch.equal(guesses.tokens.cpu(), expected.tokens)
        assert (guesses.parents is None) == (max_breadth == 1)
        if guesses.parents is not None and expected.parents is not None:
            assert torch.equal(guesses.parents.cpu(), expected.parents)
        assert torch.equal(lookahead.cpu(), expected_lookahead)


@sync_mode_warns
def test_no_step_synchronizes() -> None:
    steps = Steps("cuda", 8)
    steps.commit(torch.randint(0, 5, (8, WIDTH)), torch.full((8,), 3))
    steps.step()  # compiles
    with synchronization_is_an_error():
        steps.step()
