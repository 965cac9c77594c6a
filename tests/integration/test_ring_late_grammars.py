"""Slots whose masks are late are left out of steps: they alone wait.

That no token changes is shown by `test_ring_grammars.test_random_schedules`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct
from support.grammar_oracle import GrammarOracle
from support.late_grammars import grammars_of
from support.ring import Ring, running, tiny_loaded
from test_ring_grammars import CONFIG, LONG, PROMPT, answers, check, sampling
from torch import Tensor

from overlap_spec.features.grammar import PrepareGrammar
from overlap_spec.features.grammar.grammars import TOO_LARGE, GrammarMemory, Grammars, RequestGrammar
from overlap_spec.features.grammar.window_masks import HostWindow
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import Phase
from overlap_spec.runtime.tracing import Record


class Gate:
    """Holds a thread that computes masks, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._compiled, self._masks = Grammars._compiled, Grammars.masks
        monkeypatch.setattr(Grammars, "_compiled", lambda grammars, message: self._slow(grammars, message))
        monkeypatch.setattr(Grammars, "masks", lambda grammars, *arguments: self._held(grammars, *arguments))

    def open(self) -> None:
        self._open.set()

    def _slow(self, grammars: Grammars, message: PrepareGrammar) -> RequestGrammar:
        grammar = self._compiled(grammars, message)
        grammar.is_slow = True
        return grammar

    def _held(
        self,
        grammars: Grammars,
        found: Sequence[RequestGrammar],
        windows: Sequence[HostWindow],
        memory: Tensor,
        places: Sequence[int],
    ) -> None:
        if threading.current_thread().name.startswith("grammar"):
            assert self._open.wait(20), "the others wait for this grammar"
        self._masks(grammars, found, windows, memory, places)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("NGRAM", 1)])
def test_the_rest_of_the_batch_keeps_its_steps_and_two_in_flight(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, topk: int
) -> None:
    """Masks that never come before the others have ended."""
    gate = Gate(monkeypatch)
    slow, free = sampling(LONG), replace_struct(sampling(None), ignore_eos=True)
    config = replace(CONFIG, method=method, topk=topk, trace_dir=tmp_path, num_pages=400)

    async def serve() -> list[Record]:
        models = tiny_loaded(0, config.num_steps, method=method, topk=topk)
        async with running(models, config, codec) as ring:
            waiting = asyncio.create_task(ring.ask(PROMPT, slow))
            while not ring.clients.answers or not next(iter(ring.clients.answers.values())).token_ids:
                await asyncio.sleep(0.001)
            others = await asyncio.gather(ring.ask(PROMPT, free), ring.ask(PROMPT, free))
            assert not waiting.done()
            num_tokens = len(next(iter(ring.clients.answers.values())).token_ids)
            gate.open()
            check(GrammarOracle(0, codec), [slow, free, free], [await waiting, *others], method)
            assert num_tokens == 1, "it went on without masks"
            await ring.idle()
            return ring.written_trace()

    records = asyncio.run(serve())
    left_out = {record.step for record in records if record.args.get("left_out")}
    assert any(record.args.get("left_out") == record.args["batch"] for record in records if "batch" in record.args)
    beside = {record.step for record in records if record.args.get("batch") == 3 and record.name == "plan"}
    in_flight = Counter(
        record.args["in_flight"] for record in records if record.name == "plan" and record.step in left_out
    )
    with_masks = beside - left_out - prefills(records)
    assert left_out and len(with_masks) <= 2, "two steps are in flight when the others have ended"
    assert in_flight[2] > 0.8 * in_flight.total(), in_flight
    launches = [record for record in records if record.name == "masks of grammars" and record.step in left_out]
    waits = sorted(record.end - record.begin for record in launches)
    assert waits[len(waits) // 2] < 0.1, "steps wait for masks"


def prefills(records: list[Record]) -> set[int]:
    return {record.step for record in records if record.args.get("phase") == Phase.PREFILL.value}


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "topk"), [("STANDALONE", 1), ("EAGLE3", 1), ("EAGLE3", 3), ("NEXTN of several layers", 1)]
)
def test_a_slot_that_was_left_out_goes_on_with_the_same_window(codec: TextCodec, method: str, topk: int) -> None:
    """And its draft with the same KV: as many steps verify as many tokens."""
    requests = [sampling(LONG), sampling(LONG, 1.0), replace_struct(sampling(None), ignore_eos=True)]
    config = replace(CONFIG, method=method, topk=topk, proposes_forced=False)

    def served(late_s: float) -> tuple[list[tuple[list[int], int]], int]:
        async def serve() -> tuple[list[tuple[list[int], int]], int]:
            models = tiny_loaded(0, config.num_steps, method=method, topk=topk)
            async with running(models, replace(config, late_grammars=late_s), codec) as ring:
                found = await answers(ring, requests)
                assert all(answer.usage is not None for answer in found)
                counts = [(answer.token_ids, answer.usage.spec_verify_ct) for answer in found if answer.usage]
                return counts, ring.inbox.sent.left_out

        return asyncio.run(serve())

    (in_time, _), (late, left_out) = served(0.0), served(0.004)
    assert late == in_time and left_out > 0


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("NGRAM", 1)])
def test_one_of_several_ranks_waits_for_every_mask_and_proposes_nothing(
    codec: TextCodec, method: str, topk: int
) -> None:
    """Then all ranks do the same, however long their grammars take.

    The scheduler looks n-grams up by the time that it has, so steps of those are as many as it finds.
    """
    free = replace_struct(sampling(None), ignore_eos=True)
    requests = [replace_struct(each, max_new_tokens=24) for each in (sampling(LONG), sampling(LONG, 1.0), free)]

    def served(late_s: float) -> list[tuple[list[int], int]]:
        async def serve() -> list[tuple[list[int], int]]:
            models = tiny_loaded(0, CONFIG.num_steps, method=method, topk=topk)
            config = replace(CONFIG, method=method, topk=topk, late_grammars=late_s, ranks=2)
            async with running(models, config, codec) as ring:
                assert not grammars_of(ring.executor).timed and not grammars_of(ring.executor)._max_forced
                found = await answers(ring, requests)
                assert ring.inbox.sent.left_out == 0
                check(GrammarOracle(0, codec), requests, found, method)
                counts = [0 if method == "NGRAM" else answer.usage.spec_verify_ct for answer in found if answer.usage]
                return list(zip((answer.token_ids for answer in found), counts, strict=True))

        return asyncio.run(serve())

    assert served(0.0) == served(0.004)


def test_a_grammar_that_is_too_large_goes_on_until_its_request_ends_where_other_ranks_have_it(
    codec: TextCodec,
) -> None:
    """Its request fails; no mask of it changes meanwhile."""

    async def serve(ranks: int) -> tuple[bool, bool]:
        config = replace(CONFIG, ranks=ranks)
        async with running(tiny_loaded(0, 3), config, codec) as ring:
            grammars = grammars_of(ring.executor).grammars
            grammars.prepare(PrepareGrammar(5, LONG))
            found = grammars.of(5)
            found.seconds = 1.0
            grammars.memory = GrammarMemory(iter([0, 1 << 40, 1 << 40]).__next__)
            grammars.memory.begin()
            failed = []
            for _ in range(2):
                grammars.memory.spend(1.0)
                failed += grammars.bound_memory()
            assert [(each.uid, TOO_LARGE in each.error) for each in failed] == [(5, True)]
            return bool(found.failure), ring.scheduler.queues.idle

    assert [asyncio.run(serve(ranks))[0] for ranks in (1, 2)] == [True, False]


@pytest.mark.slow
def test_a_slow_grammar_is_followed_in_the_loop_again(codec: TextCodec) -> None:
    """As soon as one of its windows is quick."""

    async def serve() -> None:
        async with running(tiny_loaded(0, 3), CONFIG, codec) as ring:
            make_slow(ring)
            (answer,) = await answers(ring, [sampling(LONG)])
            check(GrammarOracle(0, codec), [sampling(LONG)], [answer], "slow at first")
            assert not grammars_of(ring.executor).slow._fillings

    asyncio.run(serve())


def make_slow(ring: Ring) -> None:
    """Every grammar is slow in its first window."""
    grammars = grammars_of(ring.executor).grammars
    compiled = grammars._compiled

    def slow(message: PrepareGrammar) -> RequestGrammar:
        grammar = compiled(message)
        grammar.is_slow = True
        return grammar

    grammars._compiled = slow
