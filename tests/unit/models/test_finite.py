"""Weights that are no numbers: the start fails, and names file and tensor, or the first layer."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ring import RingConfig, tiny_loaded
from support.tiny.models import CPU, TinyCheckpoint, tiny_eagle3, tiny_target, write_checkpoint

from overlap_spec.config import ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.loader import load_eagle3, load_target
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.startup.warmup import NotFinite, first_not_finite, warm_up
from overlap_spec.worker.worker_actor import _not_finite

MLP = "model.layers.1.mlp.down_proj.weight"


def stored(path: Path, checkpoint: TinyCheckpoint) -> ModelFiles:
    write_checkpoint(path, checkpoint)
    return ModelFiles(
        weights=str(path),
        config=checkpoint.config,
        tokenizer_dir=None,
        eos_token_ids=(),
        context_length=512,
        vocab_size=128,
    )


def damaged(name: str, value: float, **config: Any) -> TinyCheckpoint:
    checkpoint = tiny_target(3, **config)
    checkpoint.tensors[name][5, 7] = value
    return checkpoint


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_damaged_tensor_is_named_with_its_file_and_place(value: float, tmp_path: Path) -> None:
    files = stored(tmp_path, damaged(MLP, value))
    with pytest.raises(CheckpointError, match=rf"safetensors: tensor {MLP}: 1 of its \d+ values .* at \[5, 7\]"):
        load_target(files, torch.float32, CPU)


def test_of_several_the_first_layers_is_named(tmp_path: Path) -> None:
    checkpoint = damaged(MLP, torch.nan)
    checkpoint.tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    checkpoint.tensors["lm_head.weight"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight"):
        load_target(stored(tmp_path, checkpoint), torch.float64, CPU)


def test_a_value_beyond_the_dtypes_range_says_so_and_a_large_sum_is_no_damage(tmp_path: Path) -> None:
    files = stored(tmp_path, damaged(MLP, 1e6))
    with pytest.raises(CheckpointError, match=rf"{MLP}: its largest value is 1e\+06, beyond the range of float16: use"):
        load_target(files, torch.float16, CPU)
    load_target(files, torch.float32, CPU)
    checkpoint = damaged(MLP, 3e38)
    checkpoint.tensors[MLP][6, 7] = 3e38
    load_target(stored(tmp_path / "large", checkpoint), torch.float32, CPU)


def test_a_row_of_the_embedding_that_its_token_alone_reaches_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_target(stored(tmp_path / "own", damaged("model.embed_tokens.weight", torch.nan)), torch.float32, CPU)
    assert "requests with a token of such a row will end with an error" in caplog.text
    tied = damaged("model.embed_tokens.weight", torch.nan, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight"):
        load_target(stored(tmp_path / "tied", tied), torch.float32, CPU)


def test_a_draft_head_is_checked_too(tmp_path: Path) -> None:
    checkpoint = tiny_target(3)
    target = load_target(stored(tmp_path / "target", checkpoint), torch.float32, CPU)
    head = tiny_eagle3(4, checkpoint)
    head.tensors["midlayer.mlp.up_proj.weight"][0, 3] = torch.nan
    write_checkpoint(tmp_path / "head", head)
    with pytest.raises(CheckpointError, match=r"head.*tensor midlayer\.mlp\.up_proj\.weight: .* at \[0, 3\]"):
        load_eagle3(DraftSource.for_target(str(tmp_path / "head"), target), target)


@pytest.mark.parametrize(
    ("part", "expected"),
    [("embedding", "the embedding"), ("layer", "layer 1 of 0 to 1"), ("norm", "the final norm"), ("head", "the head")],
)
def test_the_first_part_whose_output_is_no_number_is_named(part: str, expected: str, tmp_path: Path) -> None:
    target: Any = load_target(stored(tmp_path, tiny_target(3)), torch.float64, CPU)
    weights = {
        "embedding": target.embedding.weight,
        "layer": target.layers[1].mlp_norm.weight,
        "norm": target.norm.weight,
        "head": target.head.stored,
    }
    assert first_not_finite(target, 4) == "no layer, run alone"
    weights[part].fill_(torch.nan)
    assert first_not_finite(target, 4).startswith(expected)
    settings: Any = SimpleNamespace(model=SimpleNamespace(dtype="float64", files=SimpleNamespace(weights="some/model")))
    geometry: Any = SimpleNamespace(page_size=4)
    models: Any = SimpleNamespace(target=target)
    text = _not_finite(settings, models, geometry)
    assert "some/model: the logits of a prompt" in text and f"are so from {expected}" in text


def test_the_warm_up_ends_where_no_token_can_be_drawn() -> None:
    config = RingConfig(num_steps=0)
    models: Any = tiny_loaded(3, 0)
    executor = build_executor(models, config.geometry(), CPU)
    warm_up(executor, config.geometry())
    models.target.norm.weight.fill_(torch.nan)
    with pytest.raises(NotFinite):
        warm_up(executor, config.geometry())
