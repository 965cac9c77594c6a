"""Dummy weights: the true shapes, the same on every load, finite all the way to the logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import resolve_draft, resolve_model
from overlap_spec.models.drafts.eagle3 import Eagle3Config, Eagle3Weights
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.loading.dummy import DummyWeights, spread_target_ids
from overlap_spec.models.loading.loader import load_eagle3, load_target, read_target_config
from overlap_spec.models.loading.sources import DraftSource, open_directory
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.work import count_bytes

CPU = torch.device("cpu")
SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dummy_files(directory: Path) -> ModelFiles:
    return resolve_model(EngineConfig(model_path=str(directory), load_format="dummy", skip_tokenizer_init=True))


def load_dummies(path: Path, dtype: torch.dtype) -> tuple[DecoderWeights, Eagle3Weights]:
    checkpoint = tiny_target(seed=1)
    files = dummy_files(write_config(path / "target", checkpoint.config))
    target = load_target(files, dtype, CPU)
    head_config = tiny_eagle3(seed=2, target=checkpoint).config
    head = load_eagle3(
        DraftSource(str(write_config(path / "head", head_config)), dtype, CPU, load_format="dummy"), target
    )
    assert isinstance(target, DecoderWeights) and isinstance(head, Eagle3Weights)
    return target, head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_dummy_models_are_finite_and_not_all_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    target, head = load_dummies(tmp_path, dtype)
    paged = Paged(num_requests=2)

    def cache(shape: KVShape) -> KVCache:
        return KVCache.allocate(shape, paged.num_pages, paged.page_size, dtype, CPU)

    rows, tokens = paged.rows([5, 3]), torch.arange(8)
    model = target.attach(cache(target.kv_shape), 64, head.profile.aux_layers)
    draft = head.attach(cache(head.profile.kv_shape), 64)
    output = model.forward(tokens, rows)
    drafted = draft.forward(tokens, draft.fuse(output), rows)
    for logits, size in ((model.logits(output.hidden).compute(), 128), (draft.logits(drafted).compute(), 112)):
        assert logits.shape == (8, size) and logits.isfinite().all()
        assert logits.argmax(1).unique().numel() > 1


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_architecture_has_dummies(tmp_path: Path, family: str) -> None:
    checkpoint = tiny_target(seed=1, **TINY_FAMILIES[family])
    target = load_target(dummy_files(write_config(tmp_path / "target", checkpoint.config)), torch.float32, CPU)
    assert target.num_bytes == sum(tensor.nbytes for tensor in checkpoint.tensors.values()) // 2, "float64 there"
    paged = Paged(num_requests=2)
    cache = paged.cache(target.kv_shape, torch.float32)
    model = target.attach(cache, 64)
    logits = model.logits(model.forward(torch.arange(20), paged.rows([15, 5])).hidden).compute()
    assert logits.isfinite().all() and logits.argmax(1).unique().numel() > 1


def test_shapes_and_dtypes_are_the_configs(tmp_path: Path) -> None:
    target, head = load_dummies(tmp_path, torch.bfloat16)
    assert target.embedding.weight.shape == (128, 32) and target.embedding.dtype == torch.bfloat16
    assert len(target.layers) == 2
    assert target.head.stored is not target.embedding.weight
    assert head.head.stored.shape == (112, 32)
    assert head.embedding is target.embedding
    assert count_bytes(head) > head.profile.num_bytes > 0


def test_every_load_gives_the_same_weights(tmp_path: Path) -> None:
    files = dummy_files(write_config(tmp_path / "target", tiny_target(seed=1).config))
    first, second = (load_target(files, torch.float32, CPU) for _ in range(2))
    assert torch.equal(first.embedding.weight, second.embedding.weight)
    assert torch.equal(first.head.stored, second.head.stored)
    assert not torch.equal(first.embedding.weight, first.head.stored)


def test_a_dummy_heads_guesses_are_distinct_tokens_of_the_target(tmp_path: Path) -> None:
    _, head = load_dummies(tmp_path, torch.float32)
    assert head.target_ids.tolist() == sorted(set(head.target_ids.tolist()))
    assert head.target_ids[0] == 0 and 112 <= head.target_ids[-1] < 128


def test_the_map_into_the_vocabulary() -> None:
    assert spread_target_ids(4, 10).tolist() == [0, 2, 5, 7]
    assert spread_target_ids(10, 10) is None
    assert spread_target_ids(None, 10) is None


def test_scale_of_each_kind() -> None:
    weights = DummyWeights("memory", torch.float64, CPU, lambda done, total: None)
    assert weights.take("norm.weight", (8,)).tolist() == [1.0] * 8
    assert weights.take("layers.0.mlp.down_proj.bias", (8,)).tolist() == [0.0] * 8
    assert weights.take("lm_head.weight", (200, 100)).std().item() == pytest.approx(0.02, rel=0.05)
    with pytest.raises(CheckpointError, match=r"memory \(dummy weights\): tensor d2t is missing"):
        weights.take_raw("d2t")


def test_the_default_model_as_a_dummy_needs_no_download() -> None:
    files = resolve_model(EngineConfig(load_format="dummy"))
    assert (Path(files.weights) / "config.json").is_file() and files.load_format == "dummy"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-8b-eagle3"])
def test_the_shapes_of_the_benchmarks_can_be_read(name: str) -> None:
    directory = SHAPES / name
    config = json.loads((directory / "config.json").read_text())
    if "draft_vocab_size" in config:
        head = Eagle3Config.from_hf(config, 32, str(directory))
        assert head.aux_layers == (1, 15, 28) == Eagle3Config.from_hf(config | {"eagle_config": {}}, 32, "").aux_layers
        assert (head.draft_vocab_size, head.fused_size, head.llama.num_layers) == (32000, 3 * 4096, 1)
        assert resolve_draft(str(directory), load_format="dummy") == str(directory)
    else:
        llama = read_target_config(dummy_files(directory))
        per_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
        assert 32 * per_layer + 2 * llama.vocab_size * 4096 == pytest.approx(8.03e9, rel=0.001)
        assert (llama.num_layers, llama.num_kv_heads, llama.head_dim, llama.rope.kind) == (32, 8, 128, "llama3")


def test_formats_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", tiny_target(seed=1).config)
    with pytest.raises(ConfigError, match="--load-format: gguf needs a .gguf file"):
        resolve_model(EngineConfig(model_path=str(directory), load_format="gguf", skip_tokenizer_init=True))
    with pytest.raises(ConfigError, match=r"--load-format: smollm2 is a \.gguf file"):
        resolve_model(EngineConfig(load_format="safetensors"))


@pytest.mark.parametrize(("load_format", "binary"), [("safetensors", True), ("pt", False)])
def test_a_named_format_takes_no_other(tmp_path: Path, load_format: str, binary: bool) -> None:
    write_checkpoint(tmp_path, tiny_target(seed=1), binary=binary)
    with pytest.raises(CheckpointError, match="no weights found; expected"):
        open_directory(tmp_path, load_format)
    open_directory(tmp_path)
