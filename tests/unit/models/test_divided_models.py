"""Targets that are divided among ranks: whole logits on each, what each reads, and what is refused by name."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.threaded_ranks import on_ranks
from support.tiny.drawn import logits_of, random_checkpoint
from support.tiny.families import RECURRENT, TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import CPU, write_checkpoint
from torch import Tensor

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading import sources
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.targets.divided import REFUSED

F64 = torch.float64
READ_BY_ALL = (
    "norm.weight",
    *("gate.weight", "router.weight", "router.bias", "e_score_correction_bias"),
    *("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),  # a token's latents
    *(f"{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")),  # two ranks share a head
    *("o_proj.bias", "down_proj_bias"),  # the first rank's
)
UNDIVIDED = {*RECURRENT, "olmo 2", "mimo v2 flash", "step 3.5", "gemma 4", "gemma 4 e", "gemma 4 moe"}
ONE_OF_EACH = ["llama", "qwen2", "gemma 3", "phi 3", "gpt oss", "deepseek v3", "glm 4.5"]
OTHERS = sorted(TINY_FAMILIES.keys() - UNDIVIDED - set(ONE_OF_EACH))


def files_of(directory: Path, family: str, **changes: object) -> ModelFiles:
    path = write_checkpoint(directory, random_checkpoint(family, **changes))
    return resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))


def logits_on(ranks: int, files: ModelFiles) -> list[Tensor]:
    """Of all ranks, which are threads."""
    return on_ranks(ranks, lambda rank: logits_of(load_target(files, F64, CPU, rank=rank), F64))


def assert_whole(ranks: int, files: ModelFiles) -> None:
    """The same bits on all ranks, and one rank's logits but for the order of sums."""
    first, *others = logits_on(ranks, files)
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first, logits_of(load_target(files, F64, CPU), F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_logits_are_one_ranks(family: str, ranks: int, tmp_path: Path) -> None:
    """Of four ranks two share a head of keys and values, in families that have two."""
    assert_whole(ranks, files_of(tmp_path, family))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", OTHERS)
def test_logits_of_other_families_are_one_ranks(family: str, ranks: int, tmp_path: Path) -> None:
    assert_whole(ranks, files_of(tmp_path, family))


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_is_filled_up(tied: bool, tmp_path: Path) -> None:
    files = files_of(tmp_path, "llama", vocab_size=130, tie_word_embeddings=tied)
    assert_whole(4, files)
    assert logits_on(4, files)[3].shape[1] == 130


@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen3 moe", "mixtral", "gpt oss", "deepseek v3", "deepseek v2 lite"])
def test_ranks_together_read_once_what_is_divided(
    family: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts, too, in a tensor each and in one for all: no rank reads more than its part."""
    checkpoint = random_checkpoint(family)
    if fused:
        checkpoint = replace(checkpoint, tensors=fused_experts(checkpoint.tensors))
    path = write_checkpoint(tmp_path, checkpoint)
    files, read = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True)), Counter[str]()
    source = sources.SafetensorsSource
    for name in ("read", "read_part"):
        method: Callable[..., Tensor] = getattr(source, name)

        def counted(self: object, tensor: str, *more: object, method: Callable[..., Tensor] = method) -> Tensor:
            found = method(self, tensor, *more)
            read[tensor] += found.nbytes
            return found

        monkeypatch.setattr(source, name, counted)
    ranks = 4
    on_ranks(ranks, lambda rank: load_target(files, F64, CPU, rank=rank))
    again = {name: read[name] / tensor.nbytes for name, tensor in checkpoint.tensors.items()}
    assert all(1 <= times <= ranks for times in again.values()), "each tensor is read"
    by_all = {name for name, times in again.items() if times > 1}
    assert by_all and not {name for name in by_all if not name.endswith(READ_BY_ALL)}


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_rank_has_its_part_of_every_layer(family: str, tmp_path: Path) -> None:
    """Norms, routers and what a latent is made from are each rank's: little beside heads, inner columns and experts."""
    files = files_of(tmp_path, family)
    whole = load_target(files, F64, CPU).num_bytes
    assert all(
        part.num_bytes < 0.6 * whole for part in on_ranks(2, lambda rank: load_target(files, F64, CPU, rank=rank))
    )


@pytest.mark.parametrize("family", sorted(UNDIVIDED))
def test_families_that_are_not_divided_are_refused_by_name(family: str, tmp_path: Path) -> None:
    files = files_of(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    (name,) = files.config["architectures"]
    with pytest.raises(CheckpointError, match=f"tp_size 2: {name} is not divided yet: {REFUSED[name]}"):
        load_target(files, F64, CPU, rank=Rank(0, 2))


@pytest.mark.parametrize(
    ("ranks", "changes", "named"),
    [
        (4, {"num_attention_heads": 6, "num_key_value_heads": 2}, "num_attention_heads 6 is not a multiple"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads 3 neither divides by it"),
        (4, {"intermediate_size": 66}, "intermediate_size 66 is not a multiple"),
        (2, {"num_attention_heads": 9, "num_key_value_heads": 3}, "num_attention_heads 9 is not a multiple"),  # SmolLM2
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    ranks: int, changes: dict[str, int], named: str, tmp_path: Path
) -> None:
    """By config.json alone: the weights are not even looked for."""
    files = files_of(tmp_path, "llama", **changes)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"tp_size {ranks}: {named}"):
        load_target(files, F64, CPU, rank=Rank(0, ranks))
