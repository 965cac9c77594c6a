"""How long a chunk may be: by what the worker holds, by its time, by what was learnt of it."""

import itertools
import math

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.installed import needs_feature
from support.plans import parts_of

from overlap_spec.errors import ConfigError
from overlap_spec.messages import LogProbParams, Phase, PrefillCosts, TwoPartSizes
from overlap_spec.scheduler.limits import (
    AHEAD_TOKENS,
    ALONE_GAPS,
    LEAST_OUT,
    LEAST_TOKENS,
    MOST_OUT_BYTES,
    Beside,
    ChunkRoom,
    ChunkSizes,
    ahead_tokens,
)

COSTS = PrefillCosts(0.001, 20e-6, 2e-9)
GAP_S = 0.025
LIMITS = Bench(make_ready(chunk_tokens=8192)).scheduler.limits


def sizes(costs: PrefillCosts = COSTS, max_gap_s: float | None = GAP_S) -> ChunkSizes:
    return ChunkSizes(LIMITS, costs, max_gap_s)


def seconds(costs: PrefillCosts, start: int, num_tokens: int) -> float:
    return costs.step_s + num_tokens * costs.token_s + num_tokens * (start + num_tokens / 2) * costs.pair_s


@pytest.mark.parametrize("start", [0, 1000, 40_000])
def test_a_chunk_beside_decoding_is_the_longest_that_fits(start: int):
    room = sizes().room(decoding=True)
    length = room.fitting(start, 100_000)
    assert seconds(COSTS, start, length) <= GAP_S < seconds(COSTS, start, length + 2)
    room.take(start, length)
    assert room.expected_s == pytest.approx(seconds(COSTS, start, length))
    assert room.fitting(start, 100_000) <= 1


def test_alone_a_chunk_is_as_long_as_the_worker_holds_unless_that_takes_too_long():
    assert sizes().room(decoding=False).fitting(0, 100_000) == 8192
    deep = sizes().room(decoding=False).fitting(100_000, 100_000)
    assert seconds(COSTS, 100_000, deep) == pytest.approx(ALONE_GAPS * GAP_S, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "start", "wanted", "length"),
    [(200, 0, 1000, 192), (200, 192, 1000, 192), (200, 100, 1000, 156), (200, 0, 200, 200), (50, 0, 100, 50)],
)
def test_prompts_of_layers_that_recur_are_cut_at_their_chunks(tokens: int, start: int, wanted: int, length: int):
    """At multiples of 64, unless a prompt ends in the step, or the step holds too few tokens."""
    limits = Bench(make_ready(chunk_tokens=tokens, state_chunk=64)).scheduler.limits
    assert ChunkSizes(limits, PrefillCosts(), None).room(decoding=False).fitting(start, wanted) == length
    anywhere = Bench(make_ready(chunk_tokens=tokens)).scheduler.limits
    found = ChunkSizes(anywhere, PrefillCosts(), None).room(decoding=False).fitting(start, wanted)
    assert found == min(wanted, tokens)


@pytest.mark.parametrize(("costs", "max_gap_s"), [(PrefillCosts(), GAP_S), (COSTS, None)])
def test_without_costs_or_without_a_bound_time_counts_for_nothing(costs: PrefillCosts, max_gap_s: float | None):
    chunks = sizes(costs, max_gap_s)
    chunks.observe(0.001, 1.0)
    assert chunks.room(decoding=True).fitting(100_000, 100_000) == 8192 and chunks.correction == 1


def test_a_slow_device_still_gets_chunks():
    room = sizes(PrefillCosts(1.0, 0.1)).room(decoding=True)
    assert room.fitting(0, 100_000) == LEAST_TOKENS
    room.take(0, LEAST_TOKENS)
    assert room.fitting(0, 100_000) == 0


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_a_device_that_is_slower_or_faster_than_it_was_measured_is_learnt(factor: float):
    chunks = sizes()
    for _ in range(40):
        room = chunks.room(decoding=True)
        room.take(5000, room.fitting(5000, 100_000))
        chunks.observe(room.expected_s, factor * room.expected_s)
    assert chunks.correction == pytest.approx(factor, rel=0.03)
    length = chunks.room(decoding=True).fitting(5000, 100_000)
    assert factor * seconds(COSTS, 5000, length) == pytest.approx(GAP_S, rel=0.05)


def test_one_step_that_was_held_up_changes_little():
    chunks = sizes()
    for _ in range(20):
        chunks.observe(0.02, 0.02)
    chunks.observe(0.02, 5.0)
    assert chunks.correction < 1.5


def test_a_chunk_that_is_cut_leaves_no_padding_and_one_that_ends_its_prompt_may():
    padded = PrefillCosts(0.0, 20e-6, 2e-9, (16, 64, 256, 512))
    room = ChunkRoom(LIMITS, padded, 300 * 20e-6)
    assert room.fitting(0, 290) == 290
    assert room.fitting(0, 1000) == 256
    room.take(0, 30)
    assert room.fitting(0, 1000) == 256 - 30
    room.take(0, 226)
    assert room.fitting(0, 1000) == 0
    assert ChunkRoom(LIMITS, padded, math.inf).fitting(0, 1000) == 1000


def test_a_padded_step_is_expected_to_take_what_its_size_takes():
    padded = PrefillCosts(0.0, 20e-6, 0.0, (16, 64, 256, 512))
    room = ChunkRoom(LIMITS, padded, 1000 * 20e-6)
    for taken, expected in ((100, 256), (300, 512), (600, 1000)):
        room.take(0, taken)
        assert room.expected_s == pytest.approx(expected * 20e-6)


def test_the_planner_cuts_by_time_only_while_others_decode():
    costs = PrefillCosts(0.0, 0.001)
    ready = make_ready(prefill_costs=costs, chunk_tokens=200, page_size=1, num_pages=1001, max_len=900)
    bench = Bench(ready, max_gap_s=0.1)
    bench.scheduler.planner.chunks.observe = lambda *_: None  # this device's steps take no time
    bench.admit(make_admit(1, [1] * 200, 30))
    bench.admit(make_admit(2, [2] * 300, 4))
    bench.finish_all()
    chunks = [
        (work.slot, len(work.tokens) // 4)
        for plan in bench.all_plans
        if plan.phase is Phase.PREFILL
        for work in parts_of(plan)
    ]
    assert chunks[0] == (bench.all_plans[0].chunks[0].slot, 200), "alone"
    assert chunks[1][1] == chunks[2][1] == chunks[3][1] == 100, "others decode"
    phases = [plan.phase for plan in bench.all_plans[:6]]
    assert phases[1:5] == [Phase.DECODE, Phase.PREFILL, Phase.DECODE, Phase.PREFILL]
    bench.check_streams()
    bench.check_drained()


LONG_COSTS = PrefillCosts(0.001, 20e-6, 2e-9, long_chunk=1536, long_pair_s=1e-9)


def test_a_chunk_is_long_where_the_time_of_long_ones_allows_it() -> None:
    """30,000 keys before it: a pair costs half as much in a chunk of 1,536 and more."""
    alone = sizes(LONG_COSTS).room(decoding=False)
    rows = alone.fitting(30_000, 8192)
    assert rows * (20e-6 + (30_000 + rows / 2) * 1e-9) <= 10 * GAP_S - 0.001
    assert rows > 1.4 * sizes(COSTS).room(decoding=False).fitting(30_000, 8192)
    alone.take(30_000, rows)
    assert alone.expected_s == pytest.approx(10 * GAP_S, rel=0.001)


def test_beside_decoding_a_chunk_is_short_and_costs_what_short_ones_do() -> None:
    room, plain = sizes(LONG_COSTS).room(decoding=True), sizes(COSTS).room(decoding=True)
    assert room.fitting(30_000, 8192) == plain.fitting(30_000, 8192) < 1536
    room.take(30_000, 100)
    plain.take(30_000, 100)
    assert room.expected_s == plain.expected_s


def test_a_chunk_that_is_too_long_for_the_time_is_the_longest_short_one() -> None:
    """Where short ones were measured as cheaper, which noise can do."""
    odd = PrefillCosts(0.0, 1e-6, 1e-9, long_chunk=1536, long_pair_s=1e-7)
    assert sizes(odd).room(decoding=True).fitting(10_000, 8192) == 1535


TWO_PARTS = TwoPartSizes(4, 3, (8, 32), ((96, 352, 600), (128, 512)))


def test_beside_windows_a_chunk_has_less_time() -> None:
    alone, beside = (sizes().room(decoding=True, beside=rows).fitting(5000, 100_000) for rows in (None, Beside(100)))
    assert alone - 100 < beside < alone - 50
    room = sizes().room(decoding=True, beside=Beside(100))
    room.take(5000, beside)
    assert room.expected_s == pytest.approx(seconds(COSTS, 5000, beside) + 100 * COSTS.token_s)


def test_a_chunk_beside_windows_is_of_a_captured_size() -> None:
    chunks = ChunkSizes(LIMITS, PrefillCosts(0.0, 20e-6, 0.0, (1024,)), GAP_S, True, TWO_PARTS)
    beside = chunks.beside(5, 4)
    assert beside == Beside(32, (96, 352, 600), 3)
    room = chunks.room(decoding=True, beside=beside)
    assert room.fitting(0, 5000) == 600, "no larger one is captured, although 1,218 tokens have time"
    room.take(0, 300)
    assert room.expected_s == pytest.approx((32 + 352) * 20e-6), "what it is padded to"
    assert room.fitting(0, 5000) == 300
    assert room.fitting(0, 10) == 10, "a chunk that ends its prompt"
    room.take(0, 10)
    room.take(0, 10)
    assert room.fitting(0, 10) == 0, "of more requests none is captured"


def test_what_no_size_of_both_holds_has_a_step_of_its_own() -> None:
    chunks = ChunkSizes(LIMITS, COSTS, GAP_S, True, TWO_PARTS)
    assert chunks.with_windows()
    assert chunks.beside(32, 4) == Beside(128, (128, 512), 3)
    assert chunks.beside(33, 4) is None and chunks.beside(8, 3) is None
    assert not ChunkSizes(LIMITS, COSTS, GAP_S, True, TwoPartSizes(4, 3)).with_windows(), "nothing is captured"
    assert not ChunkSizes(LIMITS, COSTS, GAP_S, False, TWO_PARTS).with_windows(), "it was not asked for"
    anything = ChunkSizes(LIMITS, COSTS, GAP_S, True)
    assert anything.with_windows() and anything.beside(33, 3) == Beside(99)


@pytest.mark.parametrize(
    ("num_windows", "lengths", "narrows"),
    [
        (4, [300, 300], True),
        (6, [300, 300], True),
        (7, [300, 300], False),  # too many windows would be made narrow
        (4, [256, 256], False),  # one step holds both prompts
        (16, [86] * 8, True),
        (12, [100] * 4, True),  # it holds their tokens, but three prompts at most
        (16, [85] * 8, False),  # three of them, as many as a step has, do not fill half of it
        (16, [100] * 5, False),
        (33, [300] * 20, False),  # no step holds so many windows
    ],
)
def test_windows_are_narrow_while_many_prompts_would_share_their_steps(
    num_windows: int, lengths: list[int], narrows: bool
) -> None:
    two_parts = TwoPartSizes(1, 3, (8, 32), ((128, 512), (512,)))
    assert ChunkSizes(LIMITS, COSTS, GAP_S, True, two_parts).narrowing(num_windows, lengths) == narrows
    assert ChunkSizes(LIMITS, COSTS, GAP_S, True).narrowing(num_windows, lengths) == 0, "steps of any width share"


def test_what_is_left_after_narrow_steps_shares_one_more() -> None:
    """Their windows have no guesses yet, so a step of their own would commit what a narrow one does."""
    two_parts = TwoPartSizes(1, 3, (8, 32), ((128, 512), (512,)))
    chunks = ChunkSizes(LIMITS, COSTS, GAP_S, True, two_parts)
    assert chunks.narrowing(6, [300, 300]) == 1
    assert chunks.narrows_again(8) and not chunks.narrows_again(33), "if any is left"
    assert chunks.narrowing(8, [60]) == 1 and not chunks.narrows_again(9)
    assert chunks.narrowing(9, [60]) == 0, "where prompts come again and again, streams have their guesses back"
    assert chunks.narrowing(6, [300, 300]) == 1 and chunks.narrowing(33, [60]) == chunks.narrowing(9, [60]) == 0


def test_requests_that_no_size_of_both_holds_take_turns_with_prompts() -> None:
    ready = make_ready(
        prefill_costs=PrefillCosts(0.0, 1e-6),
        page_size=1,
        num_pages=1001,
        two_parts=TwoPartSizes(4, 3, (1,), ((8, 16),)),
    )
    bench = Bench(ready, windows_with_prompts=True)
    for uid in range(3):
        bench.admit(make_admit(uid, [uid + 1] * 40, 30))
    bench.finish_all()
    plans = bench.all_plans
    mixed = [plan for plan in plans if plan.slots and plan.chunks]
    assert mixed and all(len(plan.slots) == 1 for plan in mixed), "of one request, if any"
    last = max(i for i, plan in enumerate(plans) if plan.chunks)
    several = [len(plan.slots) > 1 for plan in plans[:last]]
    assert any(several) and not any(map(all, itertools.pairwise(several))), "prompts are next"
    assert all(sum(len(chunk.tokens) // 4 for chunk in plan.chunks) <= 16 for plan in mixed)
    bench.check_streams()
    bench.check_drained()


def test_first_prompts_go_ahead_only_of_models_whose_tokens_take_the_time() -> None:
    large = PrefillCosts(step_s=0.0004, token_s=21.5e-6)
    assert ahead_tokens(large) == AHEAD_TOKENS
    assert ahead_tokens(replace(large, step_s=0.003)) == 0
    assert ahead_tokens(PrefillCosts(step_s=0.0004, token_s=1.1e-6)) == 0
    assert ahead_tokens(PrefillCosts()) == 0


OUT_COSTS = replace(COSTS, out_s=100e-6)


@pytest.mark.parametrize("start", [0, 5000])
@pytest.mark.parametrize("before_out", [0, 100, 200, 2000, math.inf])
def test_scored_rows_take_their_part_of_the_time(start: int, before_out: float):
    room = sizes(OUT_COSTS).room(decoding=True)
    length = room.fitting(start, 100_000, before_out)

    def with_out(num_tokens: int) -> float:
        return seconds(COSTS, start, num_tokens) + max(num_tokens - before_out, 0) * OUT_COSTS.out_s

    assert with_out(length) <= GAP_S < with_out(length + 2)
    num_out = int(max(length - before_out, 0))
    assert (num_out > 0) == (before_out < 2000)
    room.take(start, length, num_out)
    assert room.expected_s == pytest.approx(with_out(length))
    assert room.fitting(start, 100_000, 0) <= 1, "nothing is left"


def test_a_slow_device_scores_fewer_rows_than_it_computes():
    slow = replace(COSTS, out_s=1.0)
    assert sizes(slow).room(decoding=True).fitting(0, 100_000, 0) == LEAST_OUT
    assert sizes(replace(slow, step_s=1.0)).room(decoding=True).fitting(0, 100_000, 30) == 30 + LEAST_OUT
    assert sizes(replace(slow, step_s=1.0)).room(decoding=True).fitting(0, 100_000) == LEAST_TOKENS


def test_without_a_bound_of_time_a_scored_row_counts_as_tokens_that_take_as_long():
    costs = PrefillCosts(0.0, 0.001, out_s=0.009)
    limits = Bench(make_ready(chunk_tokens=1000, prefill_costs=costs)).scheduler.limits
    assert limits.affordable(1.0, 0, 0) == 100 and limits.affordable(1.0, 0, 400) == 400 + 60
    assert limits.affordable(1.0, 0) == 1000
    assert limits.chunk_cost(0, 460, 60) == pytest.approx(1.0)


@pytest.mark.parametrize("flags", [{"max_gap_s": 1.0}, {"chunk_tokens": -1}])
def test_scored_rows_are_no_share_of_a_step_that_time_bounds_or_nothing_does(flags: dict[str, float]):
    costs = PrefillCosts(0.0, 0.001, out_s=0.009)
    limits = Bench(make_ready(chunk_tokens=1000, prefill_costs=costs), **flags).scheduler.limits
    assert limits.affordable(1.0, 0, 0) == 1000


@needs_feature("log_probs")
def test_the_planner_cuts_a_prompt_whose_log_probs_are_asked_for_by_their_time():
    costs = PrefillCosts(0.0, 0.001, out_s=0.009)
    ready = make_ready(prefill_costs=costs, chunk_tokens=200, page_size=1, num_pages=2001, max_len=900, key_lookahead=0)
    bench = Bench(ready, max_gap_s=0.2)
    bench.scheduler.planner.chunks.observe = lambda *_: None  # this device's steps take no time
    bench.admit(make_admit(1, [1] * 10, 60))
    bench.admit(make_admit(2, [2] * 400, 2, log_probs=LogProbParams(prompt_from=190)))
    bench.finish_all()
    works = [work for plan in bench.all_plans if plan.phase is Phase.PREFILL for work in parts_of(plan)]
    works = [work for work in works if work.tokens[:4] == b"\2\0\0\0"]
    taken = [0.001 * len(work.tokens) / 4 + 0.009 * (work.rows_out[1] - work.rows_out[0]) for work in works]
    assert sum(work.rows_out[1] - work.rows_out[0] for work in works) == 400 - 1 - 190
    beside = taken[1:]  # the first is planned before another request decodes
    assert max(beside) <= 0.2 + 1e-9 and min(beside[:-1]) > 0.18, taken


@needs_feature("log_probs")
def test_prompts_that_share_a_step_share_its_time_for_scored_rows():
    costs = PrefillCosts(0.0, 0.001, out_s=0.009)
    ready = make_ready(prefill_costs=costs, chunk_tokens=200, page_size=1, num_pages=2001, max_len=900, key_lookahead=0)
    bench = Bench(ready, max_gap_s=0.2)
    bench.scheduler.planner.chunks.observe = lambda *_: None
    bench.admit(make_admit(1, [1] * 10, 60))
    for uid in range(2, 6):
        bench.admit(make_admit(uid, [uid] * 15, 2, log_probs=LogProbParams(prompt_from=0)))
    bench.finish_all()
    plans = [plan for plan in bench.all_plans[1:] if plan.phase is Phase.PREFILL]
    taken = [
        sum(0.001 * len(work.tokens) / 4 + 0.009 * (work.rows_out[1] - work.rows_out[0]) for work in parts_of(plan))
        for plan in plans
    ]
    assert max(taken) <= 0.2 + 1e-9 and sum(taken) == pytest.approx(4 * (0.015 + 14 * 0.009)), taken


WIDEST = 53 * 16  # bytes of a position's log-probs, where 20 of the most probable and 32 others are asked for


@pytest.mark.parametrize("max_gap_s", [GAP_S, None])
@pytest.mark.parametrize("decoding", [True, False])
@pytest.mark.parametrize("before_out", [0, 500])
def test_a_step_has_so_many_bytes_of_log_probs_however_little_time_they_take(
    max_gap_s: float | None, decoding: bool, before_out: int
):
    """They pass through four processes: 7,000 rows of the widest took 25 ms there, the device's time not counted."""
    room = sizes(replace(COSTS, token_s=1e-6, pair_s=0.0), max_gap_s).room(decoding)
    most = MOST_OUT_BYTES // WIDEST
    assert room.fitting(0, 7000, before_out, WIDEST) == before_out + most
    assert room.fitting(0, 7000, math.inf, WIDEST) == room.fitting(0, 7000) == 7000, "none of them is asked for here"
    assert room.fitting(0, 7000, before_out, 32) == 7000, "narrow ones have room"
    assert room.fitting(0, before_out, before_out, WIDEST) == before_out
    room.take(0, before_out + most - 100, most - 100, WIDEST)
    assert 100 <= room.fitting(0, 7000, 0, WIDEST) <= 101, "prompts of a step share it"
    room.take(0, 100, 100, WIDEST)
    assert room.fitting(0, 7000, 0, WIDEST) <= 1 and room.fitting(0, 300, 300, WIDEST) == 300


@needs_feature("log_probs")
def test_the_planner_cuts_a_prompt_by_the_bytes_of_its_log_probs():
    costs = PrefillCosts(0.0, 1e-7, out_s=1e-7)
    ready = make_ready(prefill_costs=costs, chunk_tokens=8192, page_size=4, num_pages=4001, max_len=9000)
    bench = Bench(ready, max_gap_s=0.2)
    asked = LogProbParams(top=20, token_ids=tuple(range(32)), prompt_from=300)
    bench.admit(make_admit(1, [1] * 10, 60))
    bench.admit(make_admit(2, [2] * 4000, 2, log_probs=asked))
    bench.finish_all()
    works = [parts_of(plan) for plan in bench.all_plans if plan.phase is Phase.PREFILL]
    rows = [sum(work.rows_out[1] - work.rows_out[0] for work in step) for step in works]
    assert sum(rows) == 4000 - 1 - 300
    most = MOST_OUT_BYTES // asked.record_bytes
    assert asked.record_bytes == WIDEST and max(rows) <= most and sorted(rows)[-2] > most - 8, rows
    bench.check_streams()
    bench.check_drained()


@needs_feature("log_probs")
def test_short_prompts_with_log_probs_share_a_step_as_far_as_their_bytes_fit():
    costs = PrefillCosts(0.0, 1e-7, out_s=1e-7)
    ready = make_ready(prefill_costs=costs, chunk_tokens=8192, page_size=4, num_pages=4001, max_len=9000)
    bench = Bench(ready, max_gap_s=0.2)
    asked = LogProbParams(top=20, token_ids=tuple(range(32)), prompt_from=0)
    for uid in range(4):
        bench.admit(make_admit(uid, [uid + 1] * 500, 2, log_probs=asked))
    bench.finish_all()
    works = [parts_of(plan) for plan in bench.all_plans if plan.phase is Phase.PREFILL]
    rows = [sum(work.rows_out[1] - work.rows_out[0] for work in step) for step in works]
    most = MOST_OUT_BYTES // WIDEST
    assert sum(rows) == 4 * 499 and most - 4 < max(rows) <= most and len(works) == 3, "the first has a step alone"


def test_a_step_of_a_deterministic_engine_holds_a_chunk_of_layers_that_recur():
    """Prompts are cut nowhere else."""
    assert Bench(make_ready(chunk_tokens=64, state_chunk=64), deterministic=True).scheduler.limits.drawn_apart
    with pytest.raises(ConfigError, match="--chunked-prefill-size: 63: .* at multiples of 64"):
        Bench(make_ready(chunk_tokens=63, state_chunk=64), deterministic=True)
    assert not Bench(make_ready(chunk_tokens=63), deterministic=True).scheduler.limits.drawn_apart
