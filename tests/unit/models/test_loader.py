"""Loading from directories: shards, formats, dtypes, and one clear error for everything that is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.bad_checkpoints import (
    HEAD_ERRORS,
    Q_PROJ,
    STALE_INDEXES,
    TARGET_ERRORS,
    rewrite_index,
    write_shards,
)
from support.bad_mixtures import MIXTURE_ERRORS
from support.tiny.models import (
    CPU,
    TinyCheckpoint,
    load_tiny_target,
    tiny_config,
    tiny_eagle3,
    tiny_target,
    write_checkpoint,
)
from torch import Tensor

from overlap_spec.config import ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.attention import kv_shape_of
from overlap_spec.models.loading.loader import load_eagle3, load_target, read_target_config
from overlap_spec.models.loading.parts import _biases
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.targets.llama import LlamaConfig

F64 = torch.float64
TARGETS = TARGET_ERRORS | MIXTURE_ERRORS


def files(directory: Path) -> ModelFiles:
    config = json.loads((directory / "config.json").read_text())
    return ModelFiles(
        weights=str(directory),
        config=config,
        tokenizer_dir=None,
        eos_token_ids=(2,),
        context_length=512,
        vocab_size=config["vocab_size"],
    )


def load(directory: Path, dtype: torch.dtype = F64) -> LoadedTarget:
    return load_target(files(directory), dtype, CPU)


def assert_same(loaded: LoadedTarget, checkpoint: TinyCheckpoint, dtype: torch.dtype = F64) -> None:
    expected = load_tiny_target(checkpoint, dtype)
    assert loaded.embedding.dtype == dtype
    assert torch.equal(loaded.embedding.weight, expected.embedding.weight)
    assert torch.equal(loaded.head.stored, expected.head.stored)
    units = torch.eye(loaded.hidden_size, dtype=dtype)  # a map of them is its weight, whatever form it has
    assert torch.equal(loaded.layers[1].mlp.gate_up(units), expected.layers[1].mlp.gate_up(units))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_every_format_and_dtype(binary: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = tiny_target(1)
    assert_same(load(write_checkpoint(tmp_path, checkpoint, binary=binary), dtype), checkpoint, dtype)


@pytest.mark.parametrize(("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
def test_shards(name: str, save: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = tiny_target(2)
    write_shards(tmp_path, checkpoint, name, save)
    assert_same(load(tmp_path), checkpoint)
    next(tmp_path.glob("*00002-of*")).unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: shard .*00002-of-00002\S* is missing"):
        load(tmp_path)


@pytest.mark.parametrize("case", STALE_INDEXES)
def test_an_index_that_does_not_fit_its_shards(case: str, tmp_path: Path) -> None:
    write_shards(tmp_path, tiny_target(2), "model.safetensors", save_file)
    change, message = STALE_INDEXES[case]
    rewrite_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
def test_a_tensor_in_two_shards(name: str, save: Callable[..., Any], tmp_path: Path) -> None:
    write_shards(tmp_path, tiny_target(2), name, save)
    first, second = sorted(tmp_path.glob("*-of-00002*"))
    both = {Q_PROJ: torch.zeros(64, 32)}
    save(both, first)
    save(both, second)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\S*: tensor \S+q_proj\.weight: found in \S+00001-of"):
        load(tmp_path)


def test_names_without_prefix_and_old_buffers(tmp_path: Path) -> None:
    checkpoint = tiny_target(3)
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    assert_same(load(write_checkpoint(tmp_path, TinyCheckpoint(checkpoint.config, tensors))), checkpoint)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    loaded = load(write_checkpoint(tmp_path, tiny_target(4, tie_word_embeddings=True)))
    assert loaded.head.stored is loaded.embedding.weight
    expected = sum(tensor.nbytes for tensor in tiny_target(4, tie_word_embeddings=True).tensors.values())
    assert loaded.num_bytes == expected, "counted once"


def test_progress_ends_at_the_number_of_tensors(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    directory = write_checkpoint(tmp_path, tiny_target(5))
    load_target(files(directory), F64, CPU, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(tiny_target(5).tensors),) * 2


def test_sizes_are_known_before_weights_are_read(tmp_path: Path) -> None:
    config = tiny_config(layers=3)
    given = ModelFiles(
        weights=str(tmp_path), config=config, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128
    )
    read = read_target_config(given)
    assert isinstance(read, LlamaConfig) and (read.num_layers, read.vocab_size) == (3, 128)
    kv_shape = kv_shape_of([read.attention_shape(window) for window in read.windows])
    assert kv_shape.bytes_per_token(torch.float32) == 2 * 3 * 2 * 16 * 4


@pytest.mark.parametrize("case", TARGETS)
def test_a_bad_target_is_refused(case: str, tmp_path: Path) -> None:
    spoil, message = TARGETS[case]
    write_checkpoint(tmp_path, spoil(tiny_target(6)))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value), "the file is named"


@pytest.mark.parametrize("case", HEAD_ERRORS)
def test_a_bad_head_is_refused(case: str, tmp_path: Path) -> None:
    spoil, message = HEAD_ERRORS[case]
    write_checkpoint(tmp_path, spoil(tiny_eagle3(7, tiny_target(6))))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_eagle3(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(tiny_target(6)))
    assert str(tmp_path) in str(caught.value), "the file is named"


def eagle2_tensors() -> dict[str, Tensor]:
    names = {"fc.weight": (32, 64), "fc.bias": (32,), "layers.0.self_attn.q_proj.weight": (64, 32)}
    return {name: torch.zeros(shape) for name, shape in names.items()}


OTHER_KINDS = {
    "EAGLE / EAGLE-2": eagle2_tensors(),
    "ordinary language model": tiny_target(8).tensors,
    "MTP": {"model.mtp_layers.0.input_proj.weight": torch.zeros(32, 64)},
    "no draft model known": {"something.weight": torch.zeros(2)},
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_what_is_no_eagle3_head_is_named(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyCheckpoint(tiny_config(), OTHER_KINDS[kind]))
    with pytest.raises(CheckpointError, match=f"expected an EAGLE-3 head, but this looks like .*{kind}"):
        load_eagle3(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(tiny_target(6)))


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_target(9))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights found"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: not an index"):
        load(tmp_path)


def test_a_bin_file_that_holds_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    write_checkpoint(tmp_path, tiny_target(10))
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a torch file of plain tensors"):
        load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_head_without_config_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(7, tiny_target(6)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        load_eagle3(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(tiny_target(6)))


def test_biases_are_left_out_only_where_all_are_zero() -> None:
    class Stored(dict[str, Tensor]):
        def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
            return self[name]

    zeros, ones = torch.zeros(2), torch.ones(1)
    found = _biases(Stored({"a.bias": zeros, "b.bias": ones}), {"a": 2, "b": 1})
    assert found is not None and found.tolist() == [0, 0, 1]
    assert _biases(Stored({"a.bias": zeros}), {"a": 2}) is None
