"""gpt-oss: its logits against transformers, and what its experts promise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Clamp, Float4Matrices, Normed
from overlap_spec_kernels.launch import assuming
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import (
    CPU,
    MemorySource,
    TinyCheckpoint,
    load_tiny_target,
    tiny_config,
    tiny_target,
    write_checkpoint,
)
from support.tiny.quantized import MXFP4, in_mxfp4
from torch import Tensor
from transformers import AutoModelForCausalLM

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers import attention
from overlap_spec.models.layers.attention_choice import AttentionChoice
from overlap_spec.models.layers.experts import MixtureMLP, SeparateExperts, StackedExperts
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading.checkpoint import Checkpoint
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.loading.quantized import take_stored_experts
from overlap_spec.models.quantization import float4
from overlap_spec.models.quantization.linear import StoredWeight
from overlap_spec.models.targets import gpt_oss
from overlap_spec.models.targets.mixture import ExpertSizes

F64 = torch.float64
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
FAMILY = "gpt oss"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are loaded as for a GPU, and the references of its kernels run."""
    monkeypatch.setattr(gpt_oss, "capability_of", lambda device: (9, 0))


def test_logits_are_those_of_transformers_from_the_same_files(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(FAMILY, layers=3)
    rope, window = checkpoint.config["rope_scaling"], checkpoint.config["sliding_window"]
    assert len(TOKENS) > rope["original_max_position_embeddings"] > window
    path = write_checkpoint(tmp_path, checkpoint)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "published", random_checkpoint(FAMILY))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(loaded(tmp_path / "saved")), logits_of(loaded(path)))


@pytest.mark.slow
def test_every_tensor_counts() -> None:
    checkpoint = random_checkpoint(FAMILY)
    assert not without_effect(checkpoint) and any(name.endswith("sinks") for name in checkpoint.tensors)


def test_both_bounds_of_the_product_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = random_checkpoint(FAMILY)
    whole = logits_of(load_tiny_target(checkpoint), F64)
    monkeypatch.setattr(gpt_oss, "CLAMP", Clamp(1.702, 1e9))
    assert (logits_of(load_tiny_target(checkpoint), F64) - whole).abs().max() > 0.01


@pytest.fixture
def published() -> tuple[TinyCheckpoint, TinyCheckpoint]:
    """In mxfp4, and what it means."""
    return in_mxfp4(random_checkpoint(FAMILY, hidden=64, intermediate_size=96))


def test_logits_of_mxfp4_are_those_of_transformers_from_the_same_files(
    published: tuple[TinyCheckpoint, TinyCheckpoint], tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, published[0])
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).float()  # experts were bfloat16
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


def test_mxfp4_is_what_it_means(published: tuple[TinyCheckpoint, TinyCheckpoint], tmp_path: Path) -> None:
    expected = logits_of(load_tiny_target(published[1]), F64)
    torch.testing.assert_close(logits_of(load_tiny_target(published[0]), F64), expected, atol=1e-10, rtol=0)
    stored, meant = (loaded(write_checkpoint(tmp_path / str(i), each)) for i, each in enumerate(published))
    assert torch.equal(logits_of(stored), logits_of(meant)) and stored.num_bytes == meant.num_bytes, "on a CPU"


@pytest.mark.slow
def test_every_tensor_of_mxfp4_counts(published: tuple[TinyCheckpoint, TinyCheckpoint]) -> None:
    checkpoint, _ = published
    whole, idle = logits_of(load_tiny_target(checkpoint), F64), []
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(("_blocks", "_scales")):
            without = TinyCheckpoint(checkpoint.config, checkpoint.tensors | {name: torch.zeros_like(tensor)})
            idle += [name] * torch.equal(logits_of(load_tiny_target(without), F64), whole)
    assert not idle


def test_every_value_and_every_scale_of_mxfp4() -> None:
    """Two values in a byte, the first in the lower bits; scales from 2^-127 on."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    pairs = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    tensors = {"experts.up_blocks": pairs, "experts.up_scales": scales}
    source = Checkpoint(MemorySource(tensors), canonical_name, F64, CPU, lambda done, total: None)
    source.in_format(quantization_scheme({"quantization_config": MXFP4}, "config.json"))
    (found,) = take_stored_experts(source, "experts.up", (1, 255, 512))
    expected = [
        [values[half] * 2.0 ** (row - 127) for byte in range(256) for half in (byte % 16, byte // 16)]
        for row in range(255)
    ]
    assert found.matrix(F64).tolist() == expected


def test_mxfp4_is_checked_without_its_values(published: tuple[TinyCheckpoint, TinyCheckpoint], tmp_path: Path) -> None:
    files = resolve_model(
        EngineConfig(model_path=str(write_checkpoint(tmp_path, published[0])), skip_tokenizer_init=True)
    )
    outlined = load_target(files, torch.bfloat16, torch.device("meta"))
    assert outlined.num_bytes == load_target(files, torch.bfloat16, CPU).num_bytes


def test_dummies_of_mxfp4_are_as_large_as_others(
    published: tuple[TinyCheckpoint, TinyCheckpoint], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published[0].config))
    config = EngineConfig(model_path=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
    logits = logits_of(load_target(resolve_model(config), torch.float32, CPU))
    assert logits.isfinite().all() and 1e-3 < logits.std() < 10


def test_mxfp4_stays_in_4_bits_on_a_gpu(
    published: tuple[TinyCheckpoint, TinyCheckpoint], on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredWeight, "stacks_on", lambda self, device: True)
    stored, meant = (load_tiny_target(checkpoint) for checkpoint in published)
    experts = stored.layers[1].mlp.experts
    assert isinstance(experts, StackedExperts) and isinstance(experts.gate_up, Float4Matrices)
    assert (experts.gate_up.parts, experts.down.parts) == (2, 1)
    torch.testing.assert_close(logits_of(stored, F64), logits_of(meant, F64), atol=1e-9, rtol=0)


def test_a_step_of_mxfp4_reads_4_bits(
    published: tuple[TinyCheckpoint, TinyCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the headers of a checkpoint tell, and as it is loaded: what memory and work are counted by."""
    stored, meant = (write_checkpoint(tmp_path / str(index), each) for index, each in enumerate(published))
    with assuming((9, 0)):
        in_4, in_16 = (load_target(_files(path), torch.bfloat16, torch.device("meta")) for path in (stored, meant))
    experts, whole = (target.layers[1].mlp.experts for target in (in_4, in_16))
    assert isinstance(experts.gate_up, Float4Matrices) and isinstance(whole.gate_up, Tensor)
    saved = (whole.gate_up.nbytes + whole.down.nbytes) - (experts.gate_up.num_bytes + experts.down.num_bytes)
    assert saved > 0 and in_16.num_bytes - in_4.num_bytes == len(in_4.layers) * saved
    assert (whole.work.weight_bytes - experts.work.weight_bytes) == saved // len(whole.gate_up)
    assert whole.work.row_flop == experts.work.row_flop
    monkeypatch.setattr(gpt_oss, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(StoredWeight, "stacks_on", lambda self, device: True)
    assert load_target(_files(stored), torch.bfloat16, CPU).num_bytes == in_4.num_bytes


def test_mxfp4_with_scales_beyond_its_kernel_is_dequantised(
    published: tuple[TinyCheckpoint, TinyCheckpoint], on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = published
    monkeypatch.setattr(float4, "capability_of", lambda device: (9, 0))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = checkpoint.tensors[name].clone()
    scales[2, 3, 1] = 130
    changed = TinyCheckpoint(checkpoint.config, checkpoint.tensors | {name: scales})
    loaded_as = load_tiny_target(changed, torch.bfloat16)
    experts = loaded_as.layers[1].mlp.experts
    assert isinstance(experts, StackedExperts)
    assert isinstance(experts.gate_up, Float4Matrices) and isinstance(experts.down, Tensor)


def _files(path: Path) -> ModelFiles:
    return resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))


def mixture_from(
    checkpoint: TinyCheckpoint, rank: Rank = gpt_oss.WHOLE, dtype: torch.dtype = F64, sizes: tuple[int, ...] = (6, 3)
) -> MixtureMLP:
    source = Checkpoint(MemorySource(checkpoint.tensors), canonical_name, dtype, CPU, lambda done, total: None)
    config = checkpoint.config
    found = ExpertSizes(*sizes, config["intermediate_size"], True)
    return gpt_oss.take_mlp(source, "layers.1.mlp", config["hidden_size"], found, rank)


def of_a_gpu(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> MixtureMLP:
    with monkeypatch.context() as patch:
        patch.setattr(gpt_oss, "capability_of", lambda device: (9, 0))
        return mixture_from(checkpoint, dtype=dtype)


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("inner", [36, 10])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that do not fill a CPU's vectors, too: its sigmoid rounds the last elements in another way."""
    checkpoint = random_checkpoint(FAMILY, intermediate_size=inner)
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    for mixture in (mixture_from(checkpoint, dtype=dtype), of_a_gpu(checkpoint, monkeypatch, dtype)):
        alone = torch.cat([mixture(Normed(row[None], row[None])) for row in x])
        for num_rows in (1, 2, 3, 4, 5, 31, 100, 255, 256):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
            assert torch.equal(mixture(Normed(x[order], x[order])), alone[order]), num_rows


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_parts_of_several_ranks_add_up(place: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "gpu":
        monkeypatch.setattr(gpt_oss, "capability_of", lambda device: (9, 0))
    checkpoint, x = random_checkpoint(FAMILY), torch.randn(11, 32, dtype=F64)
    whole, *parts = (mixture_from(checkpoint, rank) for rank in (Rank(), *(Rank(i, ranks) for i in range(ranks))))
    assert isinstance(whole.experts, StackedExperts if place == "gpu" else SeparateExperts)
    total = sum((part(Normed(x, x)) for part in parts[1:]), parts[0](Normed(x, x)))
    torch.testing.assert_close(total, whole(Normed(x, x)), atol=1e-12, rtol=0)


def test_columns_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts: found 36 inner columns, expected a multiple"):
        mixture_from(random_checkpoint(FAMILY), Rank(0, 5))


def test_experts_of_a_gpu_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = random_checkpoint(FAMILY)
    separate = load_tiny_target(checkpoint)
    monkeypatch.setattr(gpt_oss, "capability_of", lambda device: (9, 0))
    stacks = load_tiny_target(checkpoint)
    assert isinstance(stacks.layers[1].mlp.experts, StackedExperts)
    torch.testing.assert_close(logits_of(stacks, F64), logits_of(separate, F64), atol=1e-9, rtol=0)
    assert (stacks.work, stacks.num_bytes) == (separate.work, separate.num_bytes)


PUBLISHED: dict[str, Any] = {key: TINY_FAMILIES[FAMILY][key] for key in ("architectures", "model_type")}
PUBLISHED |= {"num_local_experts": 32, "num_experts_per_tok": 4, "layers": 4, "head_dim": None}


def test_what_a_config_does_not_say_is_what_transformers_takes() -> None:
    config = {key: value for key, value in tiny_config(**PUBLISHED).items() if key != "rope_theta"}
    found = gpt_oss.read_config(config, "config.json").decoder
    assert found.windows == (128, None, 128, None) and found.head_dim == 64
    assert (found.attention_bias.qkv, found.attention_bias.output) == (True, True)
    assert (found.rope.kind, found.rope.theta) == ("yarn", 150000.0)
    assert (found.rope.scaling["factor"], found.rope.scaling["truncate"]) == (32.0, False)


def test_layers_have_windows_as_they_are_listed() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = tiny_config(**PUBLISHED, layer_types=kinds, sliding_window=9)
    assert gpt_oss.read_config(config, "config.json").decoder.windows == (None, None, 9, 9)


class TakesEverything:
    """A CPU's kernel that would attend to anything."""

    def takes(self, head_dim: int, cache: Tensor) -> bool:
        return True


def test_kernels_that_know_no_sinks_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cuDNN's for long chunks, nor the one in C++ for a CPU's rows."""
    monkeypatch.setattr(attention, "takes_long_chunks", lambda *heads: True)
    choice = AttentionChoice(of_rows=TakesEverything())
    for name, chosen in (("llama", True), (FAMILY, False)):
        target = load_tiny_target(tiny_target(1, **TINY_FAMILIES[name] | {"sliding_window": None}), torch.float32)
        shapes = [layer.attention.shape for layer in target.layers]
        cache = KVCache.allocate(target.kv_shape, 4, 16, torch.float32, CPU)
        for layer in attention.PagedAttention(shapes, torch.float32, cache, 64, choice)._layers:
            assert layer.long_apart is chosen
            found = attention.PagedAttention(shapes, torch.float32, cache, 64, choice)._kernel_of(layer)
            assert (found is not None) is chosen


def test_a_sink_takes_weight_from_every_key() -> None:
    """With a large one, layers add what their biases add, and nothing of the values."""
    checkpoint = random_checkpoint(FAMILY)

    def logits(sink: float, scale: float) -> Tensor:
        """With all sinks alike, and values multiplied."""
        changed = dict(checkpoint.tensors)
        for name, tensor in checkpoint.tensors.items():
            if name.endswith("sinks"):
                changed[name] = torch.full_like(tensor, sink)
            if "v_proj" in name:
                changed[name] = scale * tensor
        return logits_of(load_tiny_target(TinyCheckpoint(checkpoint.config, changed)), F64)

    torch.testing.assert_close(logits(1e4, 1.0), logits(1e4, 5.0), atol=1e-12, rtol=0)
    assert not torch.allclose(logits(0.0, 1.0), logits(0.0, 5.0))
