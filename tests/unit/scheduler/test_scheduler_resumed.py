"""Requests that another scheduler had begun, which is gone: they go on at the next token."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.plans import parts_of

from overlap_spec.client.link import pack_ids
from overlap_spec.features.grammar import PrepareGrammar
from overlap_spec.messages import FinishKind, Resumed, Started, Usage
from overlap_spec.messages.sampling import Grammar, GrammarKind


def killed(bench: Bench, rng: random.Random) -> None:
    """Run for a random while, then stop as a killed process does."""
    for _ in range(rng.randrange(1, 60)):
        if bench.results and (not bench.plans or rng.random() < 0.5):
            bench.deliver_result()
        elif bench.plans:
            bench.run_device()


def successor(old: Bench, depth: int, seed: int) -> Bench:
    """Another scheduler and another device, with everything that was open."""
    bench = Bench(make_ready(), depth, seed)
    for uid, admit in old.admits.items():
        if uid not in old.finishes:
            usage, output = old.usages.get(uid, Usage(0, 0, 0, 0)), old.tokens[uid]
            resumed = Resumed(pack_ids(output), usage.cached_tokens, usage.spec_verify_ct)
            bench.admit(replace(admit, resumed=resumed if output else None))
            bench.tokens[uid] = list(output)
    return bench


def test_resumed_requests_share_what_their_salts_do() -> None:
    """Each finds in the cache what the first one of its salt has left there, and nothing of the other."""
    bench, found = Bench(make_ready(), 1, 0), []
    for uid, salt in enumerate("abab", start=1):
        resumed = Resumed(pack_ids(range(50, 62)), 0, 0)
        bench.admit(replace(make_admit(uid, list(range(10, 50)), 20, seed=0), salt=salt, resumed=resumed))
        found.append(bench.scheduler.queues.open[uid].cached_len)
        bench.finish_all()
    assert found[:2] == [0, 0] and found[2] == found[3] >= 48
    bench.check_drained()


@pytest.mark.parametrize("beside", [False, True])
def test_output_is_computed_again_in_chunks_without_company(beside: bool) -> None:
    """Of a deterministic engine whose layers recur; prompts are cut at multiples of their chunks."""
    ready = make_ready(state_chunk=8, num_snapshots=4, chunk_tokens=20)
    bench = Bench(ready, 2, 0, deterministic=True, windows_with_prompts=beside, chunks_seed=3)
    sizes = [(13, 30), (21, 0), (5, 40), (9, 7), (40, 3), (30, 0)]
    for uid, (num_prompt, num_output) in enumerate(sizes, start=1):
        resumed = Resumed(pack_ids(range(50, 50 + num_output)), 0, 0) if num_output else None
        bench.admit(replace(make_admit(uid, list(range(num_prompt)), 44), resumed=resumed))
        if bench.plans:
            bench.run_device()
    bench.finish_all()
    bench.check_drained()
    lengths, drawn, num_joined = dict[int, int](), Counter[int](), 0
    for plan in bench.all_plans:
        lengths |= {slot: reset.output_from for slot, reset in plan.resets.items()}
        assert len(plan.chunks) == 1 or not any(chunk.num_drawn for chunk in plan.chunks)
        for chunk in plan.chunks:
            length, end = lengths[chunk.slot], chunk.start + len(chunk.tokens) // 4
            assert chunk.num_drawn == max(end - max(chunk.start, length), 0)
            assert chunk.num_drawn or end == length or end % 8 == 0, "a prompt is cut elsewhere"
            drawn[length] += chunk.num_drawn
            num_joined += chunk.start < length < end
    assert drawn == dict(sizes) and num_joined
    assert bench.scheduler.reporter.snapshot().recomputed_tokens_total == sum(drawn.values())


@pytest.mark.parametrize(
    ("num_output", "chunk_tokens", "ends"),
    [
        (30, 64, [(51, 30)]),
        (30, 40, [(40, 19), (51, 11)]),
        (30, 22, [(21, 0), (40, 19), (51, 11)]),
        (600, 1000, [(532, 511), (621, 89)]),
    ],
)
def test_a_prompt_and_output_share_a_step(num_output: int, chunk_tokens: int, ends: list[tuple[int, int]]) -> None:
    """As many whole pages of output as fit, and at most `MOST_DRAWN` tokens. `ends`: of chunks, with their output."""
    ready = make_ready(state_chunk=8, chunk_tokens=chunk_tokens, max_len=1000, num_pages=600)
    bench = Bench(ready, 1, 0, deterministic=True)
    resumed = Resumed(pack_ids(range(50, 50 + num_output)), 0, 0)
    bench.admit(replace(make_admit(1, list(range(21)), num_output + 4), resumed=resumed))
    bench.finish_all()
    chunks = [chunk for plan in bench.all_plans for chunk in plan.chunks]
    assert [(chunk.start + len(chunk.tokens) // 4, chunk.num_drawn) for chunk in chunks] == ends


@pytest.mark.parametrize(
    ("others", "chunks"),
    [
        ([(6, 0)], [[(0, 3)], [(1, 0)], [(0, 16)], [(0, 11)]]),
        ([(6, 0), (5, 6)], [[(0, 3)], [(1, 0), (2, 0)], [(0, 16)], [(2, 6)], [(0, 11)]]),
    ],
)
def test_output_has_no_prompt_of_others_beside_it(
    others: list[tuple[int, int]], chunks: list[list[tuple[int, int]]]
) -> None:
    """Prompts and output of requests; slots of each step, and how much output is theirs."""
    bench = Bench(make_ready(state_chunk=8, chunk_tokens=20), 1, 0, deterministic=True)
    for uid, (num_prompt, num_output) in enumerate([(13, 30), *others], start=1):
        resumed = Resumed(pack_ids(range(num_output)), 0, 0) if num_output else None
        bench.admit(replace(make_admit(uid, list(range(num_prompt)), 44), resumed=resumed))
    bench.finish_all()
    steps = [plan.chunks for plan in bench.all_plans if plan.chunks]
    assert [[(chunk.slot, chunk.num_drawn) for chunk in step] for step in steps] == chunks


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_and_counts_are_those_of_an_undisturbed_run(depth: int) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        bench = Bench(make_ready(), depth, seed)
        for uid in range(1, 13):
            prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 40))]
            bench.admit(make_admit(uid, prompt, rng.randrange(1, 30), (3, 5), min_new_tokens=rng.choice((0, 1))))
        begun: dict[int, Usage] = {}
        for death in range(3):
            killed(bench, rng)
            begun |= {uid: usage for uid, usage in bench.usages.items() if uid not in bench.finishes}
            bench = successor(bench, depth, seed + death)
        bench.finish_all()
        bench.check_streams()
        bench.check_drained()
        for uid, usage in bench.usages.items():
            assert usage.prompt_tokens == len(bench.admits[uid].prompt) // 4
            if uid in begun:
                assert usage.cached_tokens == begun[uid].cached_tokens
                assert usage.spec_verify_ct >= begun[uid].spec_verify_ct


def test_a_resumed_request_ends_by_its_length_and_counts_once() -> None:
    bench = Bench(make_ready())
    admit = make_admit(1, [1, 2, 3], 4)
    bench.admits[1], bench.tokens[1] = admit, [7, 8, 9]
    bench.deliver(replace(admit, resumed=Resumed(pack_ids([7, 8, 9]), 2, 2)))
    bench.finish_all()
    assert bench.finishes[1].kind is FinishKind.LENGTH and len(bench.tokens[1]) == 4
    assert bench.usages[1] == Usage(3, 2, 4, 2), "the token after a prefill is no verify step's"
    assert bench.scheduler.planner.counters.requests == 0
    (reset,) = [work.reset for plan in bench.all_plans for work in parts_of(plan) if work.reset is not None]
    assert (reset.prompt_len, reset.output_from) == (6, 3)


def test_its_grammar_is_prepared_with_the_output_that_it_has_consumed() -> None:
    bench = Bench(make_ready())
    admit = make_admit(1, [1, 2, 3], 4, grammar=Grammar(GrammarKind.REGEX, "a+"))
    resumed = Resumed(pack_ids([7, 8]), 0, 2)
    bench.scheduler.dispatch(replace(admit, resumed=resumed))
    (prepared,) = bench.worker.drain()
    assert isinstance(prepared, PrepareGrammar) and prepared.output == resumed.output


@pytest.mark.parametrize("tells", [True, False])
def test_the_frontend_is_told_who_is_in_the_batch_where_it_wants_to_know(tells: bool) -> None:
    bench = Bench(make_ready(num_slots=2))
    bench.scheduler.tells_started = tells
    told: list[int] = []
    bench._receive = lambda message: told.extend(message.uids if isinstance(message, Started) else ())
    for uid in (1, 2, 3):
        bench.admit(make_admit(uid, [1, 2, 3]))
    assert told == ([1] if tells else []), "the others wait for a step"
    while bench.plans or bench.results:
        bench.deliver_result() if bench.results else bench.run_device()
    assert told == ([1, 2, 3] if tells else [])
