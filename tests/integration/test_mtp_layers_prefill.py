"""The rows of MTP layers depend on tokens further on: what chunks, cached prefixes and earlier owners of a slot leave.

A prompt's draft KV and guesses are the same however it came: in one chunk, in many, or after a cached prefix.
"""

from array import array

import pytest
import torch
from support.plans import SlotPart, plan_of
from support.tiny.methods import MULTI_LAYER
from test_deferred_draft import CONFIG, PAGES_PER_SLOT, Bench

from overlap_spec.messages import ResetSlot, SamplingParams

PROMPT = [(7 * i) % 113 + 6 for i in range(23)]
OTHER = [(5 * i) % 101 + 9 for i in range(40)]
NUM_FINAL = len(PROMPT) - 2  # three layers, and a first token


class Chunks:
    """Prefills slots of a bench chunk by chunk."""

    def __init__(self, method: str) -> None:
        self.bench = Bench(method)

    def run(self, slot: int, tokens: list[int], sizes: tuple[int, ...], start: int = 0, shared: int = 0) -> None:
        """The first `shared` pages are slot 0's."""
        pages = [1 + (0 if i < shared else slot) + 2 * i for i in range(PAGES_PER_SLOT)]
        reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(tokens), (), len(tokens))
        for size in sizes:
            end = start + size
            chunk, following = array("i", tokens[start:end]).tobytes(), tokens[end] if end < len(tokens) else -1
            work = SlotPart(
                slot=slot,
                new_pages=pages if reset else [],
                start=start,
                tokens=chunk,
                next_token=following,
                reset=reset,
            )
            self.bench._run(plan_of(0, [work], self.bench.geometry.width))
            start, reset = end, None
        assert start == len(tokens)

    def left(self, slot: int) -> tuple[torch.Tensor, list[int]]:
        """Final draft KV and the window."""
        return self.bench.draft_kv(slot, NUM_FINAL), self.bench.window(slot)


def assert_same(one: tuple[torch.Tensor, list[int]], other: tuple[torch.Tensor, list[int]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-9)
    assert one[1] == other[1]


@pytest.fixture(params=MULTI_LAYER)
def chunks(request: pytest.FixtureRequest) -> Chunks:
    return Chunks(request.param)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(7)
@pytest.mark.parametrize("sizes", [(22, 1), (1, 22), (1,) * 23, (4, 2, 1, 1, 8, 7), (2, 1, 20), (21, 2), (8, 8, 7)])
def test_chunks_leave_what_a_whole_prompt_does(chunks: Chunks, sizes: tuple[int, ...]) -> None:
    chunks.run(0, PROMPT, (len(PROMPT),))
    chunks.run(1, OTHER, (len(OTHER),))  # what it leaves in the slot's memory is nobody's
    chunks.run(1, PROMPT, sizes)
    assert_same(chunks.left(1), chunks.left(0))


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("sizes", [(7,), (1, 6), (2, 5), (3, 3, 1)])
def test_a_cached_prefix_stays_as_it_is(chunks: Chunks, sizes: tuple[int, ...]) -> None:
    """The slot's ring ends where the prefix does, but it is of another request: its rows must not be written."""
    chunks.run(0, PROMPT, (len(PROMPT),))
    before = chunks.left(0)
    chunks.run(1, OTHER[:16], (16,))
    chunks.run(1, PROMPT, sizes, start=16, shared=4)
    assert_same(chunks.left(1), before)
    chunks.bench.tokens = [[*PROMPT, chunks.bench.window(slot)[0]] for slot in (0, 1)]
    for _ in range(3):
        chunks.bench.decode(CONFIG.width)
    assert chunks.bench.tokens[0] == chunks.bench.tokens[1]
    torch.testing.assert_close(chunks.left(0)[0], before[0], rtol=1e-9, atol=1e-9)


def test_rows_written_for_another_request_would_be_noticed(chunks: Chunks) -> None:
    chunks.run(0, PROMPT, (len(PROMPT),))
    before = chunks.left(0)
    chunks.run(1, OTHER[:16], (16,))
    proposer = chunks.bench.executor.decode_step.method.proposer
    finish = proposer._finish_earlier

    def forgetful(*arguments: object) -> None:
        proposer._recent.first.zero_()
        finish(*arguments)

    proposer._finish_earlier = forgetful
    chunks.run(1, PROMPT, (7,), start=16, shared=4)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(chunks.left(0), before)
