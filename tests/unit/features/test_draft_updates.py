"""A head from disk that is written over the draft: who may ask, what fits, and when it is written."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask
from support.frontend_harness import Harness, serving
from support.tiny.models import (
    TinyCheckpoint,
    load_tiny_draft,
    load_tiny_target,
    tiny_eagle3,
    tiny_target,
    write_checkpoint,
)

from overlap_spec.config import AdaptSettings, ApiKeys, EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import RequestError
from overlap_spec.features.adapt_draft import HeadLoaded, Judge, LoadHead, TakeOver
from overlap_spec.features.adapt_draft.learner import HeadReader
from overlap_spec.features.adapt_draft.scheduler import Learning, Updates
from overlap_spec.features.adapt_draft.worker import UpdateHook, reader_of
from overlap_spec.messages import DraftUpdated, ErrorCode, Recover, Rejected, Stats, UpdateDraft
from overlap_spec.speculative.drafts import ChainDraft, NoDraft, TreeDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.speculative.proposers.tree import Branching
from overlap_spec.worker.devices import CpuDevice
from overlap_spec.worker.startup.geometry import LoadedModels

TARGET = tiny_target(3, layers=4)
LOADED = load_tiny_target(TARGET)
HEAD = tiny_eagle3(5, TARGET, agree=False, aux_layers=(0, 2))


def changed(seed: int = 6, **tensors: torch.Tensor) -> TinyCheckpoint:
    """Another head with the same vocabulary, and these tensors."""
    other = tiny_eagle3(seed, TARGET, agree=False, aux_layers=(0, 2))
    kept = {name: HEAD.tensors[name] for name in ("d2t", "t2d")}
    return TinyCheckpoint(other.config, other.tensors | kept | tensors)


# --- the worker ---------------------------------------------------------------------------------------------


def hook_of() -> UpdateHook:
    return UpdateHook(HeadReader(load_tiny_draft(HEAD, LOADED), LOADED), CpuDevice())


def tensors_of(hook: UpdateHook) -> dict[str, torch.Tensor]:
    assert hook._reader.live is not None
    return {name: tensor.clone() for name, tensor in hook._reader.live.tensors().items()}


def told(hook: UpdateHook) -> HeadLoaded:
    """What comes of the oldest wish. A thread reads."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert hook.is_busy(), "it is looked at again"
        if found := hook.replies():
            (loaded,) = found
            assert isinstance(loaded, HeadLoaded)
            return loaded
        time.sleep(0.001)
    raise AssertionError("it was not told")


def test_a_head_from_disk_is_written_between_two_steps(tmp_path: Path) -> None:
    hook, other, handle = hook_of(), changed(), cast(Any, None)
    assert hook._reader.live is not None
    before, at = tensors_of(hook), {n: t.data_ptr() for n, t in hook._reader.live.tensors().items()}
    assert hook.message(LoadHead(7, str(write_checkpoint(tmp_path / "other", other)), "auto"))
    hook.before_layers(handle)
    for _ in range(50):
        assert hook.replies() == (), "a step is being launched"
        time.sleep(0.001)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(hook).items())
    hook.launched(handle)
    assert told(hook) == HeadLoaded(7) and not hook.is_busy() and not hook.replies()
    for name, tensor in tensors_of(hook).items():
        assert torch.equal(tensor, other.tensors[name].double()) and not torch.equal(tensor, before[name]), name
    assert at == {n: t.data_ptr() for n, t in hook._reader.live.tensors().items()}, "graphs read them there"


def test_several_heads_are_written_one_after_another(tmp_path: Path) -> None:
    hook, heads = hook_of(), [changed(seed) for seed in (8, 9)]
    for number, head in enumerate(heads):
        hook.message(LoadHead(number, str(write_checkpoint(tmp_path / str(number), head)), "safetensors"))
    assert [told(hook), told(hook)] == [HeadLoaded(0), HeadLoaded(1)]
    assert torch.equal(tensors_of(hook)["fc.weight"], heads[1].tensors["fc.weight"].double())


WIDE = tiny_eagle3(6, TARGET, agree=False, aux_layers=(0, 2), intermediate_size=48)
NAN = HEAD.tensors["midlayer.mlp.up_proj.weight"].clone().index_fill(0, torch.tensor([3]), torch.nan)
OTHER_TARGET = tiny_eagle3(6, tiny_target(3, layers=4, hidden_size=48), agree=False, aux_layers=(0, 2))
MISFITS: dict[str, tuple[TinyCheckpoint, str]] = {
    "sizes": (WIDE, "intermediate_size: found 48, expected "),
    "layers that are read": (
        tiny_eagle3(6, TARGET, aux_layers=(0, 1)),
        r"aux_layers: found \(0, 1\), expected \(0, 2\)",
    ),
    "vocabulary": (tiny_eagle3(6, TARGET, aux_layers=(0, 2)), "d2t: the head guesses other tokens"),
    "its size": (tiny_eagle3(6, TARGET, draft_vocab=96, aux_layers=(0, 2)), "draft_vocab_size: found 96, expected 112"),
    "NaN": (
        changed(**{"midlayer.mlp.up_proj.weight": NAN}),
        "up_proj.weight: 32 of its 2048 values are NaN",
    ),
    "a tensor's shape": (changed(**{"fc.weight": torch.zeros(32, 96)}), r"fc.weight: found shape \[32, 96\]"),
    "another target": (OTHER_TARGET, "a target of hidden size 48"),
    "layers": (tiny_eagle3(6, TARGET, aux_layers=(0, 2), num_hidden_layers=2), "layers beside the first"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_named_and_the_head_stays(misfit: str, tmp_path: Path) -> None:
    head, said = MISFITS[misfit]
    hook = hook_of()
    before = tensors_of(hook)
    hook.message(LoadHead(1, str(write_checkpoint(tmp_path / "other", head)), "auto"))
    loaded = told(hook)
    assert loaded.number == 1 and re.search(said, loaded.error), loaded.error
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(hook).items())
    hook.message(LoadHead(2, str(write_checkpoint(tmp_path / "fits", changed())), "auto"))
    assert told(hook) == HeadLoaded(2), "the next one is read"


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    hook = hook_of()
    broken = write_checkpoint(tmp_path / "broken", changed())
    (broken / "model.safetensors").write_bytes(b"\0" * 9)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(HEAD.config))
    for number, path in enumerate((tmp_path / "none", broken, bare)):
        hook.message(LoadHead(number, str(path), "auto"))
        assert str(path) in told(hook).error


def test_a_draft_of_another_kind_cannot_be_updated(tmp_path: Path) -> None:
    """A tree's head can; where there is no such head, the wish is refused by name."""
    chain = ChainDraft(load_tiny_draft(HEAD, LOADED), 3)
    path = str(write_checkpoint(tmp_path / "other", changed()))
    for draft in (chain, TreeDraft(chain, Branching(2, 2))):
        assert reader_of(LoadedModels(LOADED, draft, method_named("EAGLE3"))).read(path, "auto").keys()
    hook = UpdateHook(reader_of(LoadedModels(LOADED, NoDraft(), method_named("EAGLE3"))), CpuDevice())
    hook.message(LoadHead(1, path, "auto"))
    assert told(hook).error.startswith("--update-weights-from-disk: an EAGLE-3 head")


# --- the scheduler ------------------------------------------------------------------------------------------


def test_the_scheduler_passes_it_on_and_counts() -> None:
    sent: list[Any] = []
    updates = Updates(sent.append)
    asked = LoadHead(3, "/head", "auto")
    assert updates.message(asked) and sent == [asked] and not updates.message(TakeOver())
    for loaded in (HeadLoaded(3), HeadLoaded(4, "no")):
        assert updates.message(loaded)
    assert list(updates.replies()) == [HeadLoaded(3), HeadLoaded(4, "no")] and not updates.replies()
    assert updates.report(Stats()).draft_updates_total == 1
    updates.message(HeadLoaded(5))
    updates.abandoned()
    assert not updates.replies(), "another frontend has not asked"


def test_a_judgement_of_a_head_that_is_gone_decides_nothing() -> None:
    from test_adapt_draft import Played, after_training

    played = Played()
    after_training(played)
    played.learning.message(HeadLoaded(1))
    played.answer(live_length=1.0, copy_length=9.0)
    orders = played.taken()
    assert TakeOver() not in orders
    assert isinstance(played.learning, Learning) and played.learning.figures.versions == 0
    assert played.learning.report(Stats()).draft_updates_total == 1
    played.samples(6, first=200)
    orders = played.taken()
    while not isinstance(orders[-1], Judge):
        played.answer()
        orders = played.taken()
    played.answer(live_length=1.0, copy_length=9.0)
    assert TakeOver() in played.taken(), "the next one does"


# --- the frontend -------------------------------------------------------------------------------------------


def test_a_client_is_answered_when_it_is_done() -> None:
    async def main() -> None:
        async with serving() as harness:
            harness.attach(adapt=AdaptSettings(updates=True))
            harness.service._checks.admin_key = "secret"
            harness.say(UpdateDraft("q", "/head", "auto", "guess"))
            refused = await harness.heard(Rejected)
            assert refused.request_id == "q" and "--admin-api-key" in refused.message
            assert await wanted(harness, "a") == LoadHead(1, "/head", "auto")
            assert await wanted(harness, "b") == LoadHead(2, "/head", "auto")
            harness.inbox.send(HeadLoaded(1))
            assert await harness.heard(DraftUpdated) == DraftUpdated("a")
            harness.inbox.send(HeadLoaded(2, "fc.weight: found NaN"))
            failed = await harness.heard(Rejected)
            assert (failed.request_id, failed.code) == ("b", ErrorCode.BAD_REQUEST) and "NaN" in failed.message
            harness.inbox.send(HeadLoaded(9))  # another frontend's
            await wanted(harness, "c")
            (hook,) = [each for each in harness.service.hooks.all if type(each).__name__ == "UpdateHook"]
            hook.recovered(cast(Recover, None))
            assert "ask once more" in (await harness.heard(Rejected)).message

    asyncio.run(main())


async def wanted(harness: Harness, name: str) -> LoadHead:
    harness.say(UpdateDraft(name, "/head", "auto", "secret"))
    return await harness.to_scheduler(LoadHead)


def test_it_is_there_where_an_operator_guards_it() -> None:
    files = ModelFiles(
        weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
        preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
    )  # fmt: skip

    def updates(keys: ApiKeys, **flags: Any) -> bool:
        return resolve(EngineConfig(device="cpu", **flags), files, Machine(2, False), keys)[0].adapt.updates

    operated = ApiKeys({"k": "alice"}, admin="root")
    assert updates(operated) and updates(operated, adapt_draft=True)
    assert not updates(ApiKeys()) and not updates(operated, speculative_algorithm="NONE")


# --- HTTP ---------------------------------------------------------------------------------------------------

OPERATED = replace(INFO, keys=ApiKeys({"k": "alice"}, admin="root"))
PATH = "/update_weights_from_disk"


class Updated(FakeClient):
    """Takes heads whose path is not /bad."""

    async def update_draft(self, path: str, load_format: str = "auto") -> None:
        if path == "/bad":
            raise RequestError("request", "/bad: d2t: the head guesses other tokens")
        self.owners.append(f"{path} {load_format}")


def posted(body: dict[str, Any], key: str = "root", info: Any = OPERATED) -> Any:
    client = Updated()
    reply = ask(client, "POST", PATH, info, json=body, headers={"authorization": f"Bearer {key}"})
    return reply, client.owners


def test_sglangs_fields_over_http() -> None:
    reply, taken = posted({"model_path": "/head", "load_format": "safetensors", "flush_cache": False})
    assert reply.status_code == 200 and taken == ["/head safetensors"]
    assert reply.json() == {
        "success": True,
        "message": "The draft has the weights of /head now.",
        "num_paused_requests": 0,
    }
    reply, _ = posted({"model_path": "/bad"})
    assert (reply.status_code, reply.json()["success"]) == (400, False) and "d2t" in reply.json()["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "/h", "load_format": "dummy"}, "load_format"),
        ({"model_path": "/h", "flush_cache": True}, "flush_cache"),
        ({"model_path": "/h", "abort_all_requests": True}, "abort_all_requests"),
        ({"model_path": "/h", "weight_version": "7"}, "weight_version"),
        ({"model_path": "/h", "weights": "x"}, "weights"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    reply, taken = posted(body)
    assert reply.status_code == 400 and named in reply.json()["error"]["message"] and not taken


def test_a_path_on_the_servers_disk_needs_the_operators_key() -> None:
    for key, info, status in (("k", OPERATED, 403), ("other", OPERATED, 401), ("", INFO, 403)):
        reply, taken = posted({"model_path": "/head"}, key, info)
        assert reply.status_code == status and not taken, (key, reply.text)
