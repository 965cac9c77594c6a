"""A draft that learns, in the worker: the order of steps and orders, memory, and heads that are written."""

import logging
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from support.fake_settings import fake_settings
from support.tiny.models import load_tiny_draft, load_tiny_target, tiny_eagle3, tiny_target, write_checkpoint

from overlap_spec.config import AdaptSettings, SpecSettings
from overlap_spec.errors import ConfigError
from overlap_spec.features.adapt_draft import (
    Finished,
    Follow,
    Judge,
    LearningRoom,
    TakeOver,
    Train,
    Watch,
    Worked,
    worker,
)
from overlap_spec.features.adapt_draft.learner import Learner, Saver
from overlap_spec.features.adapt_draft.ring import StateRing
from overlap_spec.features.adapt_draft.worker import LearningHook, needs
from overlap_spec.messages import ChunkWork, ResetSlot, SamplingParams, StepPlan
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.speculative.drafts import ChainDraft, EngineShape, NoDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.worker.devices import CpuDevice
from overlap_spec.worker.hooks import Needs
from overlap_spec.worker.startup.geometry import LoadedModels, demand_of

TARGET = tiny_target(3, layers=4)
LOADED = load_tiny_target(TARGET)
HEAD = tiny_eagle3(5, TARGET, agree=False, aux_layers=(0, 2))
NUM_SLOTS, SEGMENTS, ROWS = 3, 4, 32


def hook_of(saver: Saver | None = None) -> LearningHook:
    learner = Learner(load_tiny_draft(HEAD, LOADED), LOADED, 64, num_guesses=3)
    shape = cast(
        EngineShape,
        SimpleNamespace(num_rows=NUM_SLOTS, hidden_size=32, dtype=torch.float64, device=torch.device("cpu")),
    )
    ring = StateRing.allocate(SEGMENTS, ROWS, 2, shape)
    ring.aux.normal_(generator=torch.Generator().manual_seed(1))
    return LearningHook(learner, ring, LearningRoom(SEGMENTS, ROWS, 2), CpuDevice(), saver)


def plan(*resets: tuple[int, int, int]) -> StepPlan:
    """Of slots, uids and where their first chunks start."""
    chunks = [ChunkWork(slot, start, array("i", [5, 6]).tobytes()) for slot, _, start in resets]
    asked = SamplingParams(seed=0)
    return StepPlan(1, 4, chunks=chunks, resets={slot: ResetSlot(asked, 9, (), 9, uid=uid) for slot, uid, _ in resets})


def finished(segment: int, count: int = 20, start: int = 6) -> Finished:
    return Finished(segment, array("i", [50 + i % 7 for i in range(count)]).tobytes(), start)


def rows(hook: LearningHook, slot: int, *positions: int) -> list[int]:
    return hook.ring.rows_of(torch.tensor([slot]), torch.tensor([positions])).tolist()


def test_slots_write_to_their_segments_and_to_no_other() -> None:
    hook = hook_of()
    nowhere = len(hook.ring.aux) - 1
    assert nowhere == SEGMENTS * (ROWS + 2) and rows(hook, 1, 0, 999) == [nowhere, nowhere]
    hook.message(Follow(uid=7, segment=2, first=10))
    hook.changed(plan((1, 7, 0), (0, 8, 0)))
    begin = 2 * (ROWS + 2) + 1
    found = rows(hook, 1, 0, 9, 10, 11, 10 + ROWS - 1, 10 + ROWS, 10**6)
    assert found == [begin - 1, begin - 1, begin, begin + 1, begin + ROWS - 1, begin + ROWS, begin + ROWS]
    assert rows(hook, 0, 3) == [nowhere]
    hook.changed(plan((1, 9, 0)))
    assert rows(hook, 1, 10) == [nowhere], "the slot is another request's"
    hook.changed(plan((2, 7, 0)))
    assert rows(hook, 2, 10) == [nowhere], "one that begins again is followed no more"
    hook.changed(plan((NUM_SLOTS, -7, 0)))  # of a feature's own steps


@pytest.mark.parametrize(("start", "offset"), [(4, 0), (10, 0), (13, 3), (40, 5)])
def test_a_sample_begins_where_states_were_computed(start: int, offset: int) -> None:
    """What was cached has none; one token before the answer stays, whose state the first guess is made of."""
    hook = hook_of()
    hook.message(Follow(uid=7, segment=2, first=10))
    hook.changed(plan((1, 7, start)))
    hook.message(finished(2))
    sample = hook.samples[2]
    assert (sample.offset, sample.start, len(sample.tokens)) == (offset, 6 - offset, 20 - offset)


def test_orders_are_carried_out_between_steps() -> None:
    hook, handle = hook_of(), cast(Any, None)
    for segment in range(2):
        hook.message(finished(segment))
    assert list(hook.before_layers(handle)) == [], "nothing was done before it"
    hook.message(Train((0, 1)))
    hook.message(TakeOver())
    before = {name: tensor.clone() for name, tensor in hook.learner.live.tensors().items()}
    assert hook.learner.num_steps == 0 and not hook.is_busy() and not hook.replies()
    hook.launched(handle)
    assert hook.learner.num_steps == 1 and hook.is_busy()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in hook.learner.live.tensors().items())
    (done,) = hook.replies()
    assert isinstance(done, Worked) and done.seconds > 0 and done.is_finite and not hook.is_busy()
    waits = list(hook.before_layers(handle))
    assert [wait() for wait in waits] == [True], "the step's time begins behind them"
    hook.launched(handle)
    assert list(hook.before_layers(handle)) == []
    hook.serves(None)
    hook.message(Train((0, 1)))
    assert hook.learner.num_steps == 2, "no step is being launched"


def test_an_order_waits_until_no_step_has_come_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    hook, handle, now = hook_of(), cast(Any, None), [50.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for segment in range(2):
        hook.message(finished(segment))
    order = Train((0, 1), still_s=0.5)
    hook.message(order)
    now[0] += 0.4
    assert not hook.replies() and hook.is_busy() and not hook.learner.num_steps
    now[0] += 0.2
    assert not hook.replies() and hook.learner.num_steps == 1
    (done,) = hook.replies()
    assert isinstance(done, Worked) and done.is_done
    hook.message(order)
    assert not hook.replies() and hook.learner.num_steps == 2, "it has been still ever since"
    hook.replies()
    hook.message(order)
    hook.before_layers(handle)
    hook.launched(handle)
    (undone,) = hook.replies()
    assert isinstance(undone, Worked) and not undone.is_done and not hook.is_busy() and hook.learner.num_steps == 2
    hook.message(order)
    now[0] += 0.4
    assert not hook.replies() and hook.learner.num_steps == 2, "a step has come since"


def test_the_hosts_seconds_are_told() -> None:
    """Of slots that are followed, samples that are kept, and heads that are swapped."""
    hook, now = hook_of(), [0.0]

    def clock() -> float:
        now[0] += 1.0  # each block takes as long
        return now[0]

    hook._watch = Watch(clock)
    hook.message(Follow(uid=7, segment=2, first=10))
    hook.changed(plan((1, 7, 0)))
    hook.message(finished(2))
    for order in (TakeOver(), Train((2,))):
        hook.message(order)
    (done,) = hook.replies()
    assert isinstance(done, Worked) and done.upkeep_s == 3.0
    hook.message(Train((2,)))
    assert cast(Worked, hook.replies()[0]).upkeep_s == 0.0


def test_a_judgement_has_the_accept_lengths_of_both() -> None:
    """Answers are one token over and over, and the copy guesses it: a step commits three guesses and the bonus."""
    hook = hook_of()
    known = int(hook.learner.copy.ids[0])
    for segment, count in ((1, 20), (3, 16), (0, 17)):
        hook.message(Finished(segment, array("i", [known] * count).tobytes(), 6))
    with torch.no_grad():
        hook.learner.copy.tensors["lm_head.weight"].zero_()
    hook.message(Judge((1, 3, 0)))
    (worked,) = hook.replies()
    assert isinstance(worked, Worked) and worked.is_finite
    committed = (20 - 8, 16 - 8, 17 - 8)
    assert worked.copy_length == pytest.approx(sum(committed) / sum(-(-each // 4) for each in committed))
    assert 1 <= worked.live_length < worked.copy_length


def test_memory_is_counted() -> None:
    models = LoadedModels(LOADED, ChainDraft(load_tiny_draft(HEAD, LOADED), 3), method_named("EAGLE3"))
    still, learns = fake_settings(), replace(fake_settings(), adapt=AdaptSettings(0.05))
    assert needs(still, models) == Needs()
    asked = needs(learns, models).num_bytes
    ring = worker.SEGMENTS * worker.SEGMENT_ROWS * 3 * 32 * 8
    parameters = sum(tensor.numel() for tensor in hook_of().learner.copy.tensors.values())
    assert asked > ring + parameters * (16 + 8), "states; float32, gradients, two moments; those before"
    assert demand_of(learns, models).kept - demand_of(still, models).kept == asked
    plain = LoadedModels(LOADED, NoDraft(), method_named("NONE"))
    with pytest.raises(ConfigError, match="^--adapt-draft: an EAGLE-3 head that guesses chains can learn"):
        needs(learns, plain)


def test_a_large_head_does_not_learn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of SmolLM2's takes seconds there, for which requests would wait."""
    models = LoadedModels(LOADED, ChainDraft(load_tiny_draft(HEAD, LOADED), 3), method_named("EAGLE3"))
    monkeypatch.setattr(worker, "CPU_PARAMETERS", 1000)
    with pytest.raises(ConfigError, match="^--adapt-draft: a CPU would hold up requests for seconds .* use a GPU"):
        needs(replace(fake_settings(), adapt=AdaptSettings(0.05)), models)


@pytest.mark.slow
def test_a_gpu_takes_steps_of_each_shape_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is left."""
    hook, keys = hook_of(), list[Any]()
    learnt, before = Learner.step, {name: tensor.clone() for name, tensor in hook.learner.copy.tensors.items()}
    monkeypatch.setattr(hook._device, "asynchronous", True)

    def noted(self: Learner, key: Any, read: Any) -> None:
        keys.append(key)
        learnt(self, key, read)

    monkeypatch.setattr(Learner, "step", noted)
    hook.warm_up()
    shapes = [(2, ROWS, places) for places in (16, 32, 48, 64)]
    assert keys == [key for key in shapes for _ in range(worker.CAPTURED)]
    assert not hook.samples and not hook.is_busy()
    for name, tensor in hook.learner.copy.tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_a_gpus_batches_teach_what_a_cpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In few shapes, at addresses that stay: graphs read them there."""
    hooks = [hook_of(), hook_of()]
    monkeypatch.setattr(hooks[1]._device, "asynchronous", True)
    for hook in hooks:
        for segment, count in enumerate((20, 27, 17)):
            hook.message(finished(segment, count))
        for order in (Train((0, 1)), Train((2,)), Judge((0, 1, 2))):
            hook.message(order)
    found = [hook.replies()[0] for hook in hooks]
    # replies to `Judge` alone
    assert [each.live_length for each in found] == [found[0].live_length] * 2  # type: ignore[attr-defined]
    for name, tensor in hooks[0].learner.copy.tensors.items():
        torch.testing.assert_close(tensor, hooks[1].learner.copy.tensors[name], rtol=1e-3, atol=1e-6, msg=name)
    (packed, other) = (hooks[1]._packed((segment,), ROWS) for segment in (0, 2))
    assert packed.key == other.key and packed.shape == (2, ROWS)
    one, two = (hooks[1]._upload(each)() for each in (packed, other))  # both are alive
    assert one.places.data_ptr() == two.places.data_ptr()


def test_a_head_that_takes_over_is_written_and_loads(tmp_path: Path) -> None:
    spec = SpecSettings("EAGLE3", str(write_checkpoint(tmp_path / "head", HEAD)), 3, 1, 4)
    saver = Saver(tmp_path / "saved", spec, LOADED)
    hook = hook_of(saver)
    for segment in range(2):
        hook.message(finished(segment))
    for order in (Train((0, 1)), TakeOver()):
        hook.message(order)
    hook.close()
    source = DraftSource.for_target(str(tmp_path / "saved"), LOADED)
    read = Learner(load_eagle3(source, LOADED), LOADED, 64, 3).live.tensors()
    for name, tensor in hook.learner.live.tensors().items():
        assert torch.equal(read[name], tensor.to(torch.bfloat16).double()), name
    assert load_eagle3(source, LOADED).target_ids.tolist() == hook.learner.copy.ids.tolist()


def test_a_directory_that_cannot_be_is_refused_and_a_full_disk_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="^--adapt-save: .*file"):
        Saver(tmp_path / "file", fake_settings().spec, LOADED)
    saver = Saver(tmp_path / "saved", fake_settings().spec, LOADED)
    (tmp_path / "saved").rmdir()
    with caplog.at_level(logging.WARNING):
        saver.save(hook_of().learner)
        saver.finish()
    assert "--adapt-save: " in caplog.text
    saver.wait_copied()
