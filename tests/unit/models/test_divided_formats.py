"""float8 weights that are divided among ranks at rows and blocks: one rank's logits; and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.threaded_ranks import on_ranks
from support.tiny.drawn import logits_of, random_checkpoint
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, write_checkpoint
from support.tiny.quantized import FORMATS, quantised

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading import sources
from overlap_spec.models.loading.loader import load_target

F64 = torch.float64
FLOAT8 = ("fp8 by tensor", "fp8 by row", "fp8 by block")
IN_BLOCKS: dict[str, Any] = {"hidden": 256, "num_attention_heads": 4, "head_dim": 128, "intermediate_size": 512}


def checkpoint_in(kind: str, family: str = "llama", kv_heads: int = 4, **changes: Any) -> TinyCheckpoint:
    return quantised(random_checkpoint(family, **IN_BLOCKS | {"num_key_value_heads": kv_heads} | changes), kind)[0]


def files_of(directory: Path, checkpoint: TinyCheckpoint, **flags: Any) -> ModelFiles:
    path = write_checkpoint(directory, checkpoint)
    return resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True, **flags))


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["llama", "phi 3"])
@pytest.mark.parametrize("kind", FLOAT8)
def test_logits_are_one_ranks(kind: str, family: str, ranks: int) -> None:
    """Weights stay as stored. phi 3's queries, keys and values are one tensor; of four ranks two share keys."""
    checkpoint = checkpoint_in(kind, family, kv_heads=2)
    first, *others = on_ranks(ranks, lambda rank: logits_of(load_tiny_target(checkpoint, rank=rank), F64))
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first, logits_of(load_tiny_target(checkpoint), F64), rtol=0, atol=1e-12)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("kind", FLOAT8)
def test_a_rank_reads_its_part_of_a_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights and scales, which become matrices on a CPU."""
    files, read = files_of(tmp_path, checkpoint_in(kind)), [0]
    for name in ("read", "read_part"):
        method = getattr(sources.SafetensorsSource, name)

        def counted(*arguments: object, method: Any = method) -> torch.Tensor:
            found: torch.Tensor = method(*arguments)
            read[0] += found.nbytes
            return found

        monkeypatch.setattr(sources.SafetensorsSource, name, counted)
    whole = logits_of(load_target(files, F64, CPU), F64)
    once, read[0] = read[0], 0
    first, second = on_ranks(2, lambda rank: logits_of(load_target(files, F64, CPU, rank=rank), F64))
    assert once < read[0] < 1.02 * once, "norms are read by both"
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-12)


def test_scales_of_rows_may_have_one_dimension() -> None:
    checkpoint = checkpoint_in("fp8 by row")
    flat = {name: found.flatten() if name.endswith("_scale") else found for name, found in checkpoint.tensors.items()}
    found = on_ranks(
        2, lambda rank: logits_of(load_tiny_target(TinyCheckpoint(checkpoint.config, flat), rank=rank), F64)
    )
    torch.testing.assert_close(found[0], logits_of(load_tiny_target(checkpoint), F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLOAT8)
def test_random_weights_of_ranks_are_those_of_one(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_in(kind).config))
    config = EngineConfig(model_path=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
    files = resolve_model(config)
    whole = logits_of(load_target(files, F64, CPU), F64)
    for found in on_ranks(2, lambda rank: logits_of(load_target(files, F64, CPU, rank=rank), F64)):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def refusal_of(files: ModelFiles, ranks: int = 2) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_target(files, F64, CPU, rank=Rank(0, ranks))
    return str(refused.value)


@pytest.mark.slow_but_every(12)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in FLOAT8])
def test_other_formats_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    assert "tp_size 2: " in (said := refusal_of(files_of(tmp_path, checkpoint_in(kind))))
    assert said.endswith("weights are not divided yet; use 1, or replicas")


def test_weights_that_are_rounded_while_loading_are_refused(tmp_path: Path) -> None:
    """A part of a row would have a scale of its own, and other values."""
    files = files_of(tmp_path, random_checkpoint("llama", **IN_BLOCKS), quantization="fp8")
    assert "quantised to fp8 (e4m3) while loading are not divided yet" in refusal_of(files)


def test_blocks_that_a_rank_would_cut_are_refused_by_the_linears_name(tmp_path: Path) -> None:
    of_inner = files_of(tmp_path / "inner", checkpoint_in("fp8 by block", intermediate_size=128))
    assert "tp_size 2: gate_proj: 128 rows do not divide at blocks of 128" in refusal_of(of_inner)
    of_keys = files_of(tmp_path / "keys", checkpoint_in("fp8 by block", kv_heads=2, head_dim=64))
    assert "tp_size 4: q_proj: 256 rows do not divide at blocks of 128" in refusal_of(of_keys, ranks=4)


def test_experts_in_float8_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "moe_intermediate_size": 128}
    files = files_of(tmp_path, quantised(random_checkpoint("qwen3 moe", **sizes), "fp8 by row")[0])
    assert "tp_size 2: fp8 (e4m3) weights of this family are not divided yet" in refusal_of(files)


def test_a_head_in_float8_is_refused() -> None:
    checkpoint = checkpoint_in("fp8 by row", tie_word_embeddings=False)
    head = checkpoint.tensors["lm_head.weight"]
    stored = {"lm_head.weight": head.to(torch.float8_e4m3fn), "lm_head.weight_scale": torch.ones(len(head), 1)}
    covered = checkpoint.config["quantization_config"] | {"ignore": []}
    config = checkpoint.config | {"quantization_config": covered}
    with_head = TinyCheckpoint(config, checkpoint.tensors | stored)
    with pytest.raises(CheckpointError, match="tp_size 2: a head in few bits is not divided yet"):
        on_ranks(2, lambda rank: load_tiny_target(with_head, rank=rank))
