"""Step-3.5-Flash: its logits against transformers, its MTP layers against their formula; what its layers promise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed
from overlap_spec_kernels.launch import assuming
from support.paged_rows import Paged
from support.reference.step_mtp import ReferenceStepLayer
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import TINY_FAMILIES, in_lists
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_config, tiny_target, write_checkpoint
from support.tiny.mtp import load_tiny_layers, tiny_step, with_layers
from support.tiny.quantized import SIZES, quantised
from support.transformers_model import reference_model
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.models.drafts.mtp import MtpLayersHead
from overlap_spec.models.drafts.mtp_layouts import MIMO_V2, STEP, dummy_layout_of_layers
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.experts import MixtureMLP, SeparateExperts
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.mlp import BoundedMLP, GatedMLP
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.targets import step3p5
from overlap_spec.models.targets.step3p5 import Step35Config

F64 = torch.float64
FAMILY = "step 3.5"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ROWS, DRAFTED, LAYERS = 24, 16, 3


def read(**changes: Any) -> Step35Config:
    return step3p5.read_config(tiny_config(**TINY_FAMILIES[FAMILY] | changes), "config.json")


def test_logits_are_those_of_transformers() -> None:
    """Dense and with experts, with a window and without; the prompt passes the window and what stretches positions."""
    checkpoint = random_checkpoint(FAMILY, layers=4, **in_lists(4))
    scaling, window = checkpoint.config["rope_scaling"], checkpoint.config["sliding_window"]
    assert len(TOKENS) > scaling["original_max_position_embeddings"] > window
    with torch.no_grad():
        expected = reference_model(checkpoint, torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(load_tiny_target(checkpoint, torch.float32)), expected, atol=1e-4, rtol=0)


def test_files_are_read(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(FAMILY)
    found = logits_of(loaded(write_checkpoint(tmp_path, checkpoint)))
    assert torch.equal(found, logits_of(load_tiny_target(checkpoint, torch.float32)))


@pytest.mark.slow
def test_every_tensor_counts() -> None:
    checkpoint = random_checkpoint(FAMILY)
    assert not without_effect(checkpoint)


def test_linears_beside_experts_may_be_in_few_bits() -> None:
    """Gates of heads are in 16 bits or more even so, as they are published."""
    stored, meant = quantised(random_checkpoint(FAMILY, **SIZES, share_expert_dim=64), "fp8 by row", kept=("moe",))
    assert stored.tensors["model.layers.1.share_expert.up_proj.weight"].dtype == torch.float8_e4m3fn
    found, expected = (logits_of(load_tiny_target(each), F64) for each in (stored, meant))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_experts_in_few_bits_are_refused_by_name() -> None:
    stored, _ = quantised(random_checkpoint(FAMILY, **SIZES, share_expert_dim=64), "fp8 by row")
    refused = (
        r"layers\.1\.moe\.gate_proj: experts in one tensor are not supported as fp8 \(e4m3\) weights; expected 16-bit"
    )
    with pytest.raises(CheckpointError, match=refused):
        load_tiny_target(stored)


@pytest.mark.parametrize("key", ["swiglu_limits", "swiglu_limits_shared"])
def test_bounds_are_reached(key: str) -> None:
    checkpoint = random_checkpoint(FAMILY)
    unbounded = TinyCheckpoint(checkpoint.config | {key: None}, checkpoint.tensors)
    difference = logits_of(load_tiny_target(checkpoint), F64) - logits_of(load_tiny_target(unbounded), F64)
    assert difference.abs().max() > 0.01


def test_a_bounded_product_is_bounded_after_its_activation() -> None:
    """Columns of the gate are x, those of the up projection -x; of the padded ones nothing is left."""
    mlp = BoundedMLP(Linear(torch.cat((torch.eye(3), -torch.eye(3)))), Linear(torch.eye(3)), 0.5)
    x = torch.tensor([[0.25, 4.0, -8.0]])
    silu = [value / (1 + torch.tensor(-value).exp().item()) for value in (0.25, 4.0, -8.0)]
    expected = [silu[0] * -0.25, 0.5 * -0.5, silu[2] * 0.5]
    torch.testing.assert_close(mlp(Normed(x, x)), torch.tensor([expected]))


def test_layers_are_as_they_are_listed() -> None:
    target = load_tiny_target(random_checkpoint(FAMILY, layers=4, **in_lists(4)))
    shapes = [layer.attention.shape for layer in target.layers]
    assert [(shape.num_heads, shape.window) for shape in shapes] == [(4, None), (6, 6)] * 2
    assert [shape.rope.theta for shape in shapes] == [5e6, 1e4] * 2
    assert [(shape.rope.head_dim, shape.rope.num_fixed, shape.rope.kind) for shape in shapes] == [
        (8, 4, "llama3"),
        (16, 0, "default"),
    ] * 2
    mlps = [layer.mlp for layer in target.layers]
    assert [type(mlp) for mlp in mlps] == [GatedMLP, *[MixtureMLP] * 3]
    bounds = []
    for mlp in mlps[1:]:
        assert isinstance(mlp, MixtureMLP) and isinstance(mlp.experts, SeparateExperts)
        bounds.append([getattr(each, "limit", None) for each in (mlp.experts.experts[0], mlp.shared)])
    assert bounds == [[None, None], [None, None], [0.5, 0.4]]
    assert target.kv_shape == KVShape(4, 2, 16)


def test_a_list_has_an_entry_for_each_layer() -> None:
    with pytest.raises(CheckpointError, match=r"swiglu_limits must have an entry for each of 2 layers, found \[7\.0\]"):
        read(swiglu_limits=[7.0])
    assert read(swiglu_limits=[7.0, 0.0, None]).kinds[0].expert_limit == 7.0


def test_layers_with_experts_may_be_a_list() -> None:
    assert read(moe_layers_enum=[1]).sparse == read(moe_layers_enum=" 1 ").sparse == (False, True)


def test_one_base_may_hold_for_all_layers() -> None:
    shapes = read(rope_theta=3e4, partial_rotary_factors=None, yarn_only_types=None).decoder.shapes
    assert [(shape.rope.theta, shape.rope.kind, shape.rope.num_fixed) for shape in shapes] == [(3e4, "llama3", 0)] * 2


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        mixture = load_tiny_target(random_checkpoint(FAMILY), dtype).layers[1].mlp
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        alone = torch.cat([mixture(Normed(row[None], row[None])) for row in x])
        for num_rows in (2, 3, 31, 64):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
            assert torch.equal(mixture(Normed(x[order], x[order])), alone[order]), num_rows


def test_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_target(1, **TINY_FAMILIES[FAMILY]))
    files = resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))
    refused = r"config\.json: attention with gated heads does not run on a GPU yet; use --device cpu"
    with assuming((9, 0)), pytest.raises(CheckpointError, match=refused):
        load_target(files, torch.bfloat16, torch.device("meta"))
    assert load_target(files, torch.bfloat16, torch.device("meta")).num_layers == 2


def test_random_layers_have_the_layout_of_their_architecture() -> None:
    names = ("Step3p5ForCausalLM", "LlamaForCausalLM")
    assert [dummy_layout_of_layers({"architectures": [name]}) for name in names] == [STEP, MIMO_V2]


def drafting() -> TinyCheckpoint:
    """Every tensor at random."""
    target = tiny_target(3, **TINY_FAMILIES[FAMILY])
    layers = tiny_step(5, target, LAYERS, agree=False)
    random = torch.Generator().manual_seed(12)
    changed = {
        name: 0.3 * torch.randn(tensor.shape, generator=random, dtype=F64)
        for name, tensor in layers.tensors.items()
        if name.endswith("norm.weight")
    }
    return with_layers(TinyCheckpoint(layers.config, layers.tensors | changed), target)


def attached(checkpoint: TinyCheckpoint, dtype: torch.dtype, paged: Paged) -> MtpLayersHead:
    weights = load_tiny_layers(checkpoint, load_tiny_target(checkpoint, dtype), LAYERS)
    assert weights.profile.kv_shape == KVShape(LAYERS, 2, 16) and weights.chained
    cache = KVCache.allocate(weights.profile.kv_shape, paged.num_pages, paged.page_size, dtype, CPU)
    return weights.attach(cache, 64)


def inputs() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(128, (ROWS + DRAFTED,), generator=random)
    return tokens, torch.randn(ROWS + DRAFTED, 32, generator=random, dtype=F64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("index", range(LAYERS))
def test_logits_of_each_layer_are_those_of_the_loop(index: int, dtype: torch.dtype) -> None:
    """Of a prompt longer than the window in two chunks, then of 16 rows one by one; and what the next layer reads."""
    checkpoint, paged = drafting(), Paged(num_requests=1)
    head, (tokens, features) = attached(checkpoint, dtype, paged), inputs()
    loop = ReferenceStepLayer(checkpoint.tensors, checkpoint.config, index)
    parts = [slice(5), slice(5, ROWS), *(slice(row, row + 1) for row in range(ROWS, ROWS + DRAFTED))]
    for part in parts:
        output = head.forward(index, tokens[part], features[part].to(dtype), paged.rows([len(tokens[part])]))
        wanted = loop.stream(tokens[part].tolist(), features[part], part.start or 0)
        passed_on = head.next_features(features[part].to(dtype), output)
        torch.testing.assert_close(passed_on.double(), wanted, atol=TOLERANCE[dtype], rtol=0)
        logits = loop.norm(wanted, loop.layout.final_norm) @ loop.head.T
        found = head.logits(index, output).compute().double()
        torch.testing.assert_close(found, logits, atol=TOLERANCE[dtype], rtol=0)


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
        mine = [name for name in checkpoint.tensors if name.startswith(f"model.layers.{2 + index}.")]
        assert len(mine) == 17
        for name in mine:
            changed = logits(checkpoint.tensors | {name: torch.zeros_like(checkpoint.tensors[name])})
            assert [torch.equal(*pair) for pair in zip(changed, whole, strict=True)] == [
                other != index for other in range(LAYERS)
            ], name


def test_layers_that_the_config_does_not_count_are_refused() -> None:
    checkpoint = drafting()
    uncounted = TinyCheckpoint(checkpoint.config | {"num_nextn_predict_layers": 2}, checkpoint.tensors)
    target = load_tiny_target(tiny_target(3, **TINY_FAMILIES[FAMILY]))
    with pytest.raises(
        CheckpointError, match=r"num_nextn_predict_layers: found 2 layers that draft, expected 3 or more"
    ):
        load_tiny_layers(uncounted, target, LAYERS)
