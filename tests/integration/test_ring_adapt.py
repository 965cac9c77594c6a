"""A draft that learns in a whole engine: what the ring holds, tokens while weights are swapped, and that it gains."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.random_schedules import run_seeds
from support.ring import Ring, RingConfig, running
from support.swapped_heads import Swaps, swap_all_the_time
from support.tiny.models import (
    TinyCheckpoint,
    load_tiny_draft,
    load_tiny_target,
    tiny_eagle3,
    tiny_target,
    write_checkpoint,
)

from overlap_spec.config import AdaptSettings
from overlap_spec.features.adapt_draft import LoadHead, learner, scheduler, worker
from overlap_spec.features.adapt_draft.scheduler import Learning, Updates
from overlap_spec.features.adapt_draft.worker import LearningHook
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import ChainDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.worker.startup.geometry import LoadedModels

LEARNS = AdaptSettings(0.3)
TARGET = tiny_target(3, layers=4, context=0.05)  # most of its tokens follow from the one before
LOADED = load_tiny_target(TARGET)
AUX = (0, 2)


def models() -> LoadedModels:
    """With a head that is hardly ever right."""
    head = load_tiny_draft(tiny_eagle3(5, TARGET, agree=False, aux_layers=AUX), LOADED)
    return LoadedModels(LOADED, ChainDraft(head, 3), method_named("EAGLE3"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SEGMENTS", 32)
    monkeypatch.setattr(worker, "SEGMENT_ROWS", 40)


def hook_of(ring: Ring) -> LearningHook:
    hook = ring.executor.hooks.by_name["adapt_draft"]
    assert isinstance(hook, LearningHook)
    return hook


def learning_of(ring: Ring) -> Learning:
    learning = ring.scheduler.hooks.by_name["adapt_draft"]
    assert isinstance(learning, Learning)
    return learning


def whole_forward(tokens: list[int]) -> TargetOutput:
    """All tokens at once, in pages of their own."""
    count = len(tokens)
    cache = KVCache.allocate(LOADED.kv_shape, 1 + count, 1, torch.float64, torch.device("cpu"))
    at = torch.arange(count)
    rows = RowBatch(at, None, 1 + at[None].int(), None, count, True).placed(1)
    with torch.inference_mode():
        return LOADED.attach(cache, count, AUX).forward(torch.tensor(tokens), rows)


@pytest.mark.parametrize("graphs", [(), pytest.param((1, 4), marks=pytest.mark.slow)], ids=["eager", "captured"])
def test_the_ring_has_what_the_target_computed(codec: TextCodec, graphs: tuple[int, ...]) -> None:
    """Of steps of every width, of prompts in chunks, behind cached prefixes; of answers longer than a segment."""
    numbers = random.Random(2)
    shared = [numbers.randrange(3, 128) for _ in range(30)]
    prompts = [shared, [*shared, 5, 9], [7], [numbers.randrange(3, 128) for _ in range(33)]]
    greedy = SamplingParams(max_new_tokens=45, temperature=0.0, seed=0, ignore_eos=True)

    async def asked() -> tuple[LearningHook, list[list[int]]]:
        config = RingConfig(adapt=LEARNS, widths_seed=4, graph_batch_sizes=graphs, num_pages=300)
        async with running(models(), config, codec) as ring:
            first = await ring.ask(prompts[0], greedy)
            answers = [first, *await asyncio.gather(*(ring.ask(prompt, greedy) for prompt in prompts[1:]))]
            await ring.idle()
            return hook_of(ring), [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]

    hook, wholes = asyncio.run(asked())
    assert len(hook.samples) >= 3 and any(sample.offset for sample in hook.samples.values())
    for segment, sample in hook.samples.items():
        (tokens, at) = next(
            (whole, start)
            for whole in wholes
            for start in range(len(whole))
            if whole[start : start + len(sample.tokens)] == list(sample.tokens)
        )
        count = len(sample.tokens) - 1
        first = hook.ring.first_row(segment) + sample.offset
        expected = whole_forward(tokens[: at + count])
        torch.testing.assert_close(hook.ring.aux[first : first + count], expected.aux[at:])
        known = sample.begin - 1  # the prompt's last row is computed, but not kept
        torch.testing.assert_close(hook.ring.hidden[first + known : first + count], expected.hidden[at + known :])


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> Swaps:
    return swap_all_the_time(monkeypatch)


@pytest.mark.slow
def test_tokens_are_plain_decodings_while_heads_change(codec: TextCodec, swaps: Swaps) -> None:
    """Random schedules: preemptions, aborts, prefix hits on what older heads have left, steps of all widths."""
    seen = run_seeds(range(2, 3), codec, {"num_steps": 3, "topk": 1, "adapt": AdaptSettings(0.5)})
    assert seen["accepted"] and seen["prefix_hit_tokens"], seen
    assert swaps.taken and swaps.trained, swaps


@pytest.mark.full
def test_tokens_of_more_schedules(codec: TextCodec, swaps: Swaps) -> None:
    engine = {"num_steps": 3, "topk": 1, "adapt": AdaptSettings(0.5)}
    seen: Counter[str] = run_seeds(range(3, 9), codec, engine)
    assert seen["preemptions"] and seen["mid_step_aborts"] and swaps.taken > 2 and swaps.undone, (seen, swaps)


SEEDED = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)


async def served(ring: Ring, first: int, count: int) -> float:
    """The accept length of so many answers, three at a time."""
    counters, numbers = ring.scheduler.planner.counters, random.Random(first)
    committed, steps = counters.committed_tokens, counters.verify_steps
    for begin in range(first, first + count, 3):
        prompts = [[numbers.randrange(3, 128) for _ in range(numbers.randrange(2, 10))] for _ in range(3)]
        asked = [
            SamplingParams(max_new_tokens=30, temperature=n % 2, seed=begin + n, ignore_eos=True) for n in range(3)
        ]
        await asyncio.gather(*(ring.ask(prompt, each) for prompt, each in zip(prompts, asked, strict=True)))
    return (counters.committed_tokens - committed) / (counters.verify_steps - steps)


@pytest.mark.slow
def test_accept_length_rises(codec: TextCodec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of requests that came later, on other texts, with the head that has learnt and taken over."""
    monkeypatch.setattr(learner, "RATE", 0.02)
    monkeypatch.setattr(learner, "WARM_UP", 1)
    monkeypatch.setattr(scheduler, "JUDGED_EVERY", 8)
    monkeypatch.setattr(worker, "CPU_BATCH", 8)

    async def lengths() -> tuple[float, float, Learning]:
        async with running(models(), RingConfig(num_pages=300, adapt=LEARNS), codec) as ring:
            learning = learning_of(ring)
            before = await served(ring, 0, 6)
            for n in range(10):
                await served(ring, 100 + 10 * n, 6)
                while learning._asked is not None:  # it learns while nothing runs, until it has seen all
                    await asyncio.sleep(0.002)
                if learning.figures.gain > 0.15:
                    break
            return before, await served(ring, 900, 9), learning

    before, after, learning = asyncio.run(lengths())
    assert learning.figures.versions and not learning.figures.refused
    assert after > 1.08 * before, (before, after, learning.figures)


@pytest.mark.slow
def test_a_head_from_disk_serves_better_and_tokens_stay(codec: TextCodec, tmp_path: Path) -> None:
    """It is written while requests run; captured steps read it where the one before was."""
    good = tiny_eagle3(7, TARGET, aux_layers=AUX)
    bad = tiny_eagle3(5, TARGET, agree=False, aux_layers=AUX)
    same = {name: good.tensors[name] for name in ("d2t", "t2d")}
    head = load_tiny_draft(TinyCheckpoint(bad.config, bad.tensors | same), LOADED)
    loaded = LoadedModels(LOADED, ChainDraft(head, 3), method_named("EAGLE3"))
    path = str(write_checkpoint(tmp_path / "good", good))

    async def asked() -> tuple[list[float], list[list[int]]]:
        config = RingConfig(num_pages=300, adapt=AdaptSettings(updates=True), graph_batch_sizes=(1, 4))
        async with running(loaded, config, codec) as ring:
            prompt, updates = [9, 30, 55], ring.scheduler.hooks.by_name["adapt_draft"]
            assert isinstance(updates, Updates)
            answers, lengths = [await ring.ask(prompt, SEEDED)], [await served(ring, 0, 6)]
            ring.to_scheduler.send(LoadHead(1, path, "auto"))
            while not updates.updates:
                lengths.append(await served(ring, 100 * len(lengths), 3))
            answers.append(await ring.ask(prompt, SEEDED))
            return [lengths[0], await served(ring, 0, 6)], [each.token_ids for each in answers]

    (before, after), answers = asyncio.run(asked())
    assert after > 1.3 * before, (before, after)
    assert answers[0] == answers[1] and len(answers[0]) == 30
