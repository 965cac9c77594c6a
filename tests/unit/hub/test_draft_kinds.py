"""A checkpoint in the wrong place: a head as target, or another method's draft, refused before a target is read."""

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.tiny.eagle import tiny_eagle
from support.tiny.models import TinyCheckpoint, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.mtp import in_deepseek_layout, tiny_mtp, with_mtp

from overlap_spec import Engine
from overlap_spec.config import EngineConfig, Machine, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.config.speculation import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import check_draft_kind, resolve_drafting, resolve_model
from overlap_spec.hub.weight_files import _is_named_head
from overlap_spec.worker import build

TARGET = tiny_target(3)
EAGLE, EAGLE3, MTP = tiny_eagle(4, TARGET), tiny_eagle3(5, TARGET), tiny_mtp(6, TARGET)
HEADS = {"EAGLE": EAGLE, "EAGLE3": EAGLE3, "NEXTN": MTP, "NEXTN, DeepSeek's": in_deepseek_layout(MTP)}
NOTHING = TinyCheckpoint(TARGET.config, {"a": torch.zeros(2)})
OTHERS = [
    ("EAGLE", EAGLE3, "an EAGLE-3 head, but EAGLE drafts with an EAGLE / EAGLE-2 head; use .*EAGLE3"),
    ("EAGLE", TARGET, "an ordinary language model.*; use --speculative-algorithm STANDALONE, or another draft$"),
    ("EAGLE3", EAGLE, "; use --speculative-algorithm EAGLE, or another draft$"),
    ("EAGLE3", MTP, "; use --speculative-algorithm NEXTN,"),
    ("NEXTN", TARGET, r"but NEXTN drafts with a multi-token-prediction \(MTP\) layer;"),
    ("STANDALONE", EAGLE3, "but STANDALONE drafts with an ordinary language model"),
    (
        "STANDALONE",
        TinyCheckpoint(TARGET.config, {"a": torch.zeros(2)}),
        "no draft model known here, but STANDALONE drafts with .* draft$",
    ),
]
other_draft = pytest.mark.parametrize(("method", "draft", "message"), OTHERS)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_no_target_with_or_without_a_tokenizer(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, HEADS[name])
    for tokens_only in (False, True):
        config = EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=tokens_only)
        with pytest.raises(ConfigError, match="--model-path: .*is a draft head.*--speculative-draft-model-path"):
            resolve_model(config)


@pytest.mark.parametrize("head", [EAGLE, EAGLE3], ids=["EAGLE", "EAGLE3"])
def test_the_config_may_say_so_too(head: TinyCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, head, binary=True)
    with pytest.raises(ConfigError, match="--model-path: .*is a draft head"):
        resolve_model(EngineConfig(model_path=str(tmp_path)))


@pytest.mark.parametrize("checkpoint", [TARGET, with_mtp(7, TARGET)], ids=["plain", "with an MTP layer"])
def test_a_target_is_one(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint)
    assert resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True)).weights == str(tmp_path)


@pytest.mark.parametrize(
    ("method", "draft"),
    [("EAGLE", EAGLE), ("EAGLE", MTP), ("EAGLE3", EAGLE3), ("NEXTN", MTP), ("STANDALONE", TARGET), ("own:METHOD", MTP)],
)
def test_what_a_method_drafts_with_passes(method: str, draft: TinyCheckpoint, tmp_path: Path) -> None:
    check_draft_kind(method, str(write_checkpoint(tmp_path, draft)), "auto")


def flags(method: str, directory: Path, draft: TinyCheckpoint, *, binary: bool = False) -> EngineConfig:
    """A target and a draft on disk."""
    return EngineConfig(
        model_path=str(write_checkpoint(directory / "target", TARGET)),
        skip_tokenizer_init=True,
        dtype="float64",
        device="cpu",
        speculative_algorithm=method,
        speculative_draft_model_path=str(write_checkpoint(directory / "draft", draft, binary=binary)),
    )


@other_draft
def test_another_methods_draft_is_refused_before_a_process_starts(
    method: str, draft: TinyCheckpoint, message: str, tmp_path: Path
) -> None:
    engine = Engine(flags(method, tmp_path, draft), roles={})
    with pytest.raises(CheckpointError, match=f"draft: it looks like .*{message}"):
        asyncio.run(engine.start())


def test_a_target_without_the_layers_that_its_config_counts(tmp_path: Path) -> None:
    """As many that were trained further or quantised: what is missing is said, not what the rest looks like."""
    counted = TinyCheckpoint(TARGET.config | {"num_nextn_predict_layers": 1}, TARGET.tensors)
    config = EngineConfig(
        model_path=str(write_checkpoint(tmp_path, counted)), skip_tokenizer_init=True, speculative_algorithm="NEXTN"
    )
    said = "found no tensor of an MTP layer, expected those of 1 by config.json; .*--speculative-draft-model-path"
    files = resolve_model(config)
    with pytest.raises(CheckpointError, match=said):
        resolve_drafting(settings_of(config).spec, files, config)
    head = replace(config, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(tmp_path / "head"))
    write_checkpoint(tmp_path / "head", EAGLE3)
    resolve_drafting(settings_of(head).spec, files, head)
    assert files.config["architectures"] == TARGET.config["architectures"]


@other_draft
def test_a_bin_is_told_by_the_worker_before_it_reads_the_target(
    method: str, draft: TinyCheckpoint, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = flags(method, tmp_path, draft, binary=True)
    check_draft_kind(method, str(tmp_path / "draft"), "auto")
    monkeypatch.setattr(build, "load_target", lambda *_: pytest.fail("the target was read"))
    with pytest.raises(CheckpointError, match=message):
        build.load_models(settings_of(config), torch.device("cpu"), lambda done, total: None)


def test_a_method_that_is_none_is_told_before_the_target_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_target", lambda *_: pytest.fail("the target was read"))
    for name in ("nope:METHOD", "os:METHOD"):
        with pytest.raises(ConfigError, match=f"--speculative-algorithm: {name}"):
            build.load_models(settings_of(flags(name, tmp_path, EAGLE)), torch.device("cpu"), lambda done, total: None)


def settings_of(config: EngineConfig) -> Settings:
    return resolve(config, resolve_model(config), Machine(1, False))[0]


def test_a_config_with_a_draft_vocabulary_is_a_heads() -> None:
    assert _is_named_head({"draft_vocab_size": 32000}) and _is_named_head({"architectures": ["LlamaForCausalLMEagle3"]})
    assert not _is_named_head({"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"]})


def test_what_joins_a_feature_and_an_embedding_is_twice_as_wide_as_it_is_long() -> None:
    assert draft_kind({"fc.weight": (8, 16)}) is DraftKind.EAGLE_2
    assert draft_kind({"fc.weight": (8, 24)}) is draft_kind({"fc.weight": (8,)}) is DraftKind.UNKNOWN
