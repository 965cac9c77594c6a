"""A language model as draft: what it may guess, what it brings, and what is no language model."""

from pathlib import Path

import pytest
import torch
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import (
    CPU,
    TinyCheckpoint,
    load_tiny_target,
    tiny_config,
    tiny_eagle3,
    tiny_target,
    write_checkpoint,
)
from support.tiny.standalone import load_tiny_language_draft, tiny_language_draft

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.language_draft import LanguageDraft, LanguageDraftWeights, load_language_draft
from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.loading.sources import DraftSource

CHECKPOINT = tiny_target(6)
TARGET = load_tiny_target(CHECKPOINT)


def ignore(done: int, total: int) -> None:
    pass


def attached(weights: LanguageDraftWeights) -> LanguageDraft:
    return weights.attach(KVCache.allocate(weights.profile.kv_shape, 5, 8, torch.float64, CPU), 32)


def rows(count: int) -> RowBatch:
    """The first rows of one request, on pages 1 to 4."""
    positions = torch.arange(count)
    pages = torch.arange(1, 5, dtype=torch.int32)[None]
    return RowBatch(positions, positions + 8, pages, torch.tensor([0, count], dtype=torch.int32), count, True)


def test_a_directory_is_loaded_in_the_targets_dtype(tmp_path: Path) -> None:
    checkpoint = tiny_language_draft(7, CHECKPOINT)
    loaded = load_language_draft(
        DraftSource.for_target(str(write_checkpoint(tmp_path, checkpoint)), TARGET, ignore), TARGET
    )
    tokens = torch.tensor([5, 77, 9])
    expected = attached(load_tiny_language_draft(checkpoint, TARGET))
    model = attached(loaded)
    assert loaded.profile.kv_shape == KVShape(1, 1, 16), "its own layers, heads and head size"
    assert model.target_ids.tolist() == list(range(128))
    logits = model.logits(model.forward(tokens, rows(3)).hidden).compute()
    assert logits.dtype == torch.float64 and logits.shape == (3, 128)
    torch.testing.assert_close(logits, expected.logits(expected.forward(tokens, rows(3)).hidden).compute())


@pytest.mark.parametrize(("vocab", "shared"), [(112, 112), (128, 128), (144, 128)])
def test_only_ids_that_both_have_are_guessed_and_any_is_read(vocab: int, shared: int) -> None:
    weights = load_tiny_language_draft(tiny_language_draft(7, CHECKPOINT, vocab=vocab), TARGET)
    model = attached(weights)
    lazy_logits = model.logits(model.forward(torch.tensor([5, 127]), rows(2)).hidden)
    assert lazy_logits.compute().shape == (2, shared)
    assert weights.profile.num_bytes == weights.model.num_bytes, "a part of the head is no copy"


def test_a_token_map_gathers_rows_of_its_head() -> None:
    checkpoint = tiny_language_draft(7, CHECKPOINT, vocab=112)
    whole = attached(load_tiny_language_draft(checkpoint, TARGET))
    weights = load_tiny_language_draft(checkpoint, TARGET, torch.tensor([90, 3, 120, 41]))
    mapped = attached(weights)
    assert mapped.target_ids.tolist() == [90, 3, 41], "an id that the draft does not have is no guess"
    tokens = torch.tensor([5, 77])
    every = whole.logits(whole.forward(tokens, rows(2)).hidden).compute()
    some = mapped.logits(mapped.forward(tokens, rows(2)).hidden).compute()
    torch.testing.assert_close(some, every[:, [90, 3, 41]])
    assert weights.profile.num_bytes == weights.model.num_bytes + 3 * 32 * 8
    left_out = (112 - 3) * 32
    assert weights.model.work.weight_bytes - weights.profile.work.weight_bytes == 8 * left_out
    assert weights.model.work.head_flop - weights.profile.work.head_flop == 2 * left_out


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_language_draft(7, CHECKPOINT))
    (tmp_path / "model.safetensors").unlink()
    loaded = load_language_draft(DraftSource.for_target(str(tmp_path), TARGET, ignore, "dummy"), TARGET)
    assert loaded.profile.kv_shape == KVShape(1, 1, 16)


@pytest.mark.parametrize("family", ["qwen2", "mistral with a window", "mixtral"])
def test_any_family_of_targets_may_draft(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_language_draft(7, CHECKPOINT, **TINY_FAMILIES[family])
    model = attached(
        load_language_draft(DraftSource.for_target(str(write_checkpoint(tmp_path, checkpoint)), TARGET, ignore), TARGET)
    )
    alone = load_tiny_target(checkpoint)
    cache = KVCache.allocate(alone.kv_shape, 5, 8, torch.float64, CPU)
    tokens, target = torch.arange(20) + 30, alone.attach(cache, 32)
    expected = target.logits(target.forward(tokens, rows(20)).hidden).compute()
    torch.testing.assert_close(model.logits(model.forward(tokens, rows(20)).hidden).compute(), expected)


OTHER_KINDS = {
    "an EAGLE-3 head": tiny_eagle3(7, CHECKPOINT).tensors,
    "an EAGLE / EAGLE-2 head": {"fc.weight": torch.zeros(32, 64), "layers.0.self_attn.q_proj.weight": torch.zeros(2)},
    "no draft model known": {"something.weight": torch.zeros(2)},
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_what_is_no_language_model_is_named(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyCheckpoint(tiny_config(), OTHER_KINDS[kind]))
    with pytest.raises(CheckpointError, match=f"expected an ordinary language model.*, but this looks like {kind}"):
        load_language_draft(DraftSource.for_target(str(tmp_path), TARGET, ignore), TARGET)


def test_an_architecture_that_no_target_may_have_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_language_draft(7, CHECKPOINT)
    write_checkpoint(
        tmp_path, TinyCheckpoint(checkpoint.config | {"architectures": ["GPT2LMHeadModel"]}, checkpoint.tensors)
    )
    with pytest.raises(CheckpointError, match=r"config\.json: architecture GPT2LMHeadModel is not supported"):
        load_language_draft(DraftSource.for_target(str(tmp_path), TARGET, ignore), TARGET)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: (not a readable JSON file|expected a JSON object)"):
        load_language_draft(DraftSource.for_target(str(tmp_path), TARGET, ignore), TARGET)
