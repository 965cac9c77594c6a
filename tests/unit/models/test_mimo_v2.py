"""MiMo-V2-Flash: its logits against transformers, its MTP layers against their formula; what its heads promise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed
from overlap_spec_kernels.launch import assuming
from support.paged_rows import Paged
from support.reference.mimo_v2_mtp import ReferenceMimoV2Layer
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import TINY_FAMILIES, alternating
from support.tiny.layouts import fused_experts
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_config, tiny_target, write_checkpoint
from support.tiny.mtp import load_tiny_layers, tiny_mimo_v2, with_layers
from torch import Tensor
from transformers import AutoModelForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.config.speculation import num_own_layers
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.models.drafts.mtp import MtpLayersHead
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import NarrowHeads, NarrowHeadsLinear
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.targets import mimo_v2_flash
from overlap_spec.models.targets.mimo_v2_flash import MimoV2Config
from overlap_spec.models.targets.reading import FULL, SLIDING

F64 = torch.float64
FAMILY = "mimo v2 flash"
OF_TRANSFORMERS = ("layer_types", "mlp_layer_types", "rope_parameters")
PUBLISHED = ("hybrid_layer_pattern", "moe_layer_freq", "swa_rope_theta", "partial_rotary_factor", "sliding_window_size")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ROWS, DRAFTED, LAYERS = 24, 16, 3


def read(*without: str, **changes: Any) -> MimoV2Config:
    config = tiny_config(**TINY_FAMILIES[FAMILY] | changes)
    return mimo_v2_flash.read_config({k: v for k, v in config.items() if k not in without}, "config.json")


def test_logits_are_those_of_transformers_from_the_same_files(tmp_path: Path) -> None:
    """A dense full layer, one with experts, and two with a window; the prompt passes the window."""
    checkpoint = random_checkpoint(FAMILY, layers=4, **alternating(4))
    assert len(TOKENS) > checkpoint.config["sliding_window"]
    path = write_checkpoint(tmp_path, checkpoint)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "published", random_checkpoint(FAMILY))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(loaded(tmp_path / "saved")), logits_of(loaded(path)))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
def test_every_tensor_counts(fused: bool) -> None:
    checkpoint = random_checkpoint(FAMILY)
    checkpoint = replace(checkpoint, tensors=fused_experts(checkpoint.tensors)) if fused else checkpoint
    assert not without_effect(checkpoint)
    assert any(name.endswith(("attention_sink_bias", "sinks")) for name in checkpoint.tensors)


def test_both_forms_of_the_config_say_the_same() -> None:
    assert read(*OF_TRANSFORMERS) == read(*PUBLISHED) == read()
    assert read().layers == (FULL, SLIDING) and read().sparse == (False, True)


def test_the_published_form_counts_where_both_are_given() -> None:
    assert read(hybrid_layer_pattern=[1, 0], moe_layer_freq=[1, 1]).layers == (SLIDING, FULL)
    assert read(hybrid_layer_pattern=[1, 0], moe_layer_freq=[1, 1]).sparse == (True, True)
    assert read(layernorm_epsilon=0.25).rms_norm_eps == 0.25


def test_what_a_config_does_not_say_is_what_transformers_takes() -> None:
    told = {"architectures": 0, "model_type": 0, "num_attention_heads": 0, "num_key_value_heads": 0}
    told |= {"n_routed_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}
    named = [key for key in TINY_FAMILIES[FAMILY] if key not in told]
    found = read(*named, "head_dim", "rope_theta", "rms_norm_eps", layers=13, num_attention_heads=64)
    assert [kind == FULL for kind in found.layers] == [i in (0, 5, 11) for i in range(13)]
    assert found.sparse == (False,) + (True,) * 12 and found.rms_norm_eps == 1e-5
    full, sliding = (found.kinds[kind] for kind in (FULL, SLIDING))
    assert (full.shape.window, sliding.shape.window) == (None, 128)
    assert (full.shape.head_dim, full.heads) == (192, NarrowHeads(2, 128, 0.707))
    assert (sliding.shape.num_kv_heads, sliding.heads) == (4, NarrowHeads(4, 128, 0.707))
    assert (full.shape.rope.theta, sliding.shape.rope.theta) == (5e6, 1e4)
    assert (full.shape.rope.head_dim, full.shape.rope.num_fixed) == (64, 64)
    assert (full.sinks, sliding.sinks) == (False, True)


def test_sinks_are_where_the_config_names_them() -> None:
    checkpoint = random_checkpoint(FAMILY, add_full_attention_sink_bias=True, add_swa_attention_sink_bias=False)
    layers = load_tiny_target(checkpoint).layers
    assert [layer.attention.shape.sinks is not None for layer in layers] == [True, False]


def test_a_cache_holds_all_layers_in_the_largest_heads() -> None:
    assert load_tiny_target(random_checkpoint(FAMILY)).kv_shape == KVShape(2, 4, 24)


def test_heads_are_copied_and_values_filled_up() -> None:
    """Two heads of keys with 4 columns and of values with 3, where the cache has 4 heads."""
    shape = AttentionShape(4, 4, 4, 0.5, None, RopeConfig("default", 1e4, 4, 16, {}))
    linear = Linear(torch.eye(16 + 8 + 6, dtype=F64))
    x = torch.arange(30, dtype=F64)[None] + 1
    q, k, v = NarrowHeadsLinear(linear, NarrowHeads(2, 3, 10.0), shape)(Normed(x, x)).view(12, 4).split(4)
    assert q.flatten().tolist() == list(range(1, 17))
    assert k.tolist() == [[17, 18, 19, 20]] * 2 + [[21, 22, 23, 24]] * 2
    assert v.tolist() == [[250, 260, 270, 0]] * 2 + [[280, 290, 300, 0]] * 2


def test_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_target(1, **TINY_FAMILIES[FAMILY]))
    files = resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))
    refused = "attention whose values are narrower than its keys does not run on a GPU yet; use --device cpu"
    with assuming((9, 0)), pytest.raises(CheckpointError, match=refused):
        load_target(files, torch.bfloat16, torch.device("meta"))
    assert load_target(files, torch.bfloat16, torch.device("meta")).num_layers == 2


def test_layers_that_draft_are_known_without_a_count() -> None:
    published = {"architectures": ["MiMoV2FlashForCausalLM"]}
    assert num_own_layers(published) == 3 and num_own_layers(published | {"num_nextn_predict_layers": 0}) == 0
    assert num_own_layers({"architectures": ["LlamaForCausalLM"]}) == 0


def drafting() -> TinyCheckpoint:
    """Every tensor at random."""
    target = tiny_target(3, **TINY_FAMILIES[FAMILY])
    layers = tiny_mimo_v2(5, target, LAYERS, agree=False)
    random = torch.Generator().manual_seed(12)
    norms = {
        name: 1 + 0.3 * torch.randn(tensor.shape, generator=random, dtype=F64)
        for name, tensor in layers.tensors.items()
        if name.endswith("norm.weight")
    }
    return with_layers(replace(layers, tensors=layers.tensors | norms), target)


def attached(checkpoint: TinyCheckpoint, dtype: torch.dtype, paged: Paged) -> MtpLayersHead:
    weights = load_tiny_layers(checkpoint, load_tiny_target(checkpoint, dtype), LAYERS)
    assert weights.profile.kv_shape == KVShape(LAYERS, 4, 24)
    cache = KVCache.allocate(weights.profile.kv_shape, paged.num_pages, paged.page_size, dtype, CPU)
    return weights.attach(cache, 64)


def inputs() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(128, (ROWS + DRAFTED,), generator=random)
    return tokens, torch.randn(ROWS + DRAFTED, 32, generator=random, dtype=F64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("index", range(LAYERS))
def test_logits_of_each_layer_are_those_of_the_loop(index: int, dtype: torch.dtype) -> None:
    """Of a prompt longer than the window in two chunks, then of 16 rows one by one."""
    checkpoint, paged = drafting(), Paged(num_requests=1)
    head, (tokens, features) = attached(checkpoint, dtype, paged), inputs()
    loop = ReferenceMimoV2Layer(checkpoint.tensors, checkpoint.config, index)
    parts = [slice(5), slice(5, ROWS), *(slice(row, row + 1) for row in range(ROWS, ROWS + DRAFTED))]
    for part in parts:
        rows = paged.rows([len(tokens[part])])
        found = head.logits(index, head.forward(index, tokens[part], features[part].to(dtype), rows)).compute()
        wanted = loop.forward(tokens[part].tolist(), features[part], part.start or 0) @ loop.head.T
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.slow
def test_every_tensor_of_every_layer_counts() -> None:
    checkpoint, (tokens, features) = drafting(), inputs()

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        paged = Paged(num_requests=1)
        head = attached(TinyCheckpoint(checkpoint.config, tensors), F64, paged)
        rows = paged.rows([len(tokens)])
        return torch.stack([head.logits(i, head.forward(i, tokens, features, rows)).compute() for i in range(LAYERS)])

    whole = logits(checkpoint.tensors)
    for index in range(LAYERS):
        mine = [name for name in checkpoint.tensors if name.startswith(f"model.mtp.layers.{index}.")]
        assert len(mine) == 14
        for name in mine:
            changed = logits(checkpoint.tensors | {name: torch.zeros_like(checkpoint.tensors[name])})
            assert [torch.equal(*pair) for pair in zip(changed, whole, strict=True)] == [
                other != index for other in range(LAYERS)
            ], name
