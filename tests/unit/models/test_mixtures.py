"""Mixtures of experts: their logits against transformers, in both layouts; what their layers promise."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from overlap_spec_kernels import Float4Matrices, Normed, QuantizedStack, Routing
from overlap_spec_kernels.launch import assuming
from support.threaded_ranks import SummedBy
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import (
    CPU,
    MemorySource,
    TinyCheckpoint,
    load_tiny_target,
    tiny_config,
    tiny_target,
    write_checkpoint,
)
from support.tiny.quantized import FORMATS, SIZES, quantised
from torch import Tensor
from transformers import AutoModelForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.experts import MixtureMLP, MostProbable, Router, SeparateExperts, StackedExperts
from overlap_spec.models.layers.layer_run import described
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading.checkpoint import Checkpoint
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.quantization.linear import StoredWeight
from overlap_spec.models.targets import llama_mixtures, mixture
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.mixture import ExpertSizes, take_mixture
from overlap_spec.models.work import count_bytes

MIXTURES = ["qwen3 moe", "mixtral", "deepseek v3", "deepseek v2 lite", "glm 4.7 flash", "glm 4.5"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def in_layout(checkpoint: TinyCheckpoint, fused: bool) -> TinyCheckpoint:
    return replace(checkpoint, tensors=fused_experts(checkpoint.tensors)) if fused else checkpoint


@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
@pytest.mark.parametrize("family", MIXTURES)
def test_logits_are_those_of_transformers_from_the_same_files(family: str, fused: bool, tmp_path: Path) -> None:
    """Transformers reads the published layout; the fused one is what it has in memory."""
    checkpoint = random_checkpoint(family)
    published = write_checkpoint(tmp_path / "published", checkpoint)
    reference = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    read = {name: reference.state_dict()[name] for name in fused_experts(checkpoint.tensors)}
    path = write_checkpoint(tmp_path / "fused", replace(checkpoint, tensors=read)) if fused else published
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_stretched_positions_turn_a_part_of_a_head(kind: str, tmp_path: Path) -> None:
    """The prompt is longer than what positions were trained for."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0}
    if kind == "llama3":
        rope |= {"original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = write_checkpoint(tmp_path, random_checkpoint("glm 4.5", rope_parameters=rope))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("family", MIXTURES)
def test_what_transformers_saves_is_read(family: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(family)
    published = write_checkpoint(tmp_path / "published", checkpoint)
    AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(loaded(tmp_path / "saved")), logits_of(loaded(published)))


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
@pytest.mark.parametrize("family", MIXTURES)
def test_every_tensor_counts(family: str, fused: bool) -> None:
    checkpoint = in_layout(random_checkpoint(family), fused)
    assert not without_effect(checkpoint)


@pytest.mark.parametrize("family", MIXTURES)
def test_both_layouts_are_the_same_weights(family: str) -> None:
    checkpoint = random_checkpoint(family)
    published, fused = (load_tiny_target(in_layout(checkpoint, layout)) for layout in (False, True))
    assert torch.equal(logits_of(published, torch.float64), logits_of(fused, torch.float64))
    assert published.num_bytes == fused.num_bytes


def test_dense_layers_stay_dense() -> None:
    config = TINY_FAMILIES["qwen3 moe"] | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "layers": 5}
    mlps = [type(layer.mlp) for layer in load_tiny_target(tiny_target(1, **config)).layers]
    assert mlps == [GatedMLP, MixtureMLP, GatedMLP, GatedMLP, GatedMLP]


def mixture_of(dtype: torch.dtype, experts: int = 8, top_k: int = 3, hidden: int = 32, inner: int = 24) -> MixtureMLP:
    random = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).mul_(shape[1] ** -0.5).to(dtype)

    gated = (GatedMLP(Linear(weight(2 * inner, hidden)), Linear(weight(hidden, inner))) for _ in range(experts))
    return MixtureMLP(Router(2 * weight(experts, hidden), MostProbable(top_k, True)), SeparateExperts(tuple(gated)))


def stacked(mixture: MixtureMLP) -> MixtureMLP:
    """The same in the form of a GPU."""
    assert isinstance(mixture.experts, SeparateExperts)
    matrices = [(expert.gate_up.matrix(), expert.down.matrix()) for expert in mixture.experts.experts]
    gate_up, down = (torch.stack(each) for each in zip(*matrices, strict=True))
    return replace(mixture, experts=StackedExperts(gate_up, down))


def assert_rows_are_alone(mixture: MixtureMLP, x: Tensor) -> None:
    """Each row has the bits that it has by itself, beside any others, wherever it stands."""

    def run(rows: Tensor) -> Tensor:
        return mixture(Normed(rows, rows))

    alone = torch.cat([run(row[None]) for row in x])
    for num_rows in (1, 2, 3, 4, 5, 8, 31, 64, 100, 255, 256):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        assert torch.equal(run(x[order]), alone[order]), num_rows


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(9)
@pytest.mark.parametrize("shape", [(8, 3, 32, 24), (16, 8, 100, 36), (4, 2, 128, 96)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    x = torch.randn(256, shape[2], generator=torch.Generator().manual_seed(1)).to(dtype)
    mixture = mixture_of(dtype, *shape)
    assert_rows_are_alone(mixture, x)
    assert_rows_are_alone(stacked(mixture), x)


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["awq", "fp8 by row", None])
def test_nor_as_it_is_loaded(kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredWeight, "runs_on", lambda self, device, dtype: True)
    checkpoint = tiny_target(3, **SIZES, **TINY_FAMILIES["mixtral"])
    target = loaded(write_checkpoint(tmp_path, checkpoint if kind is None else quantised(checkpoint, kind)[0]))
    mixture = target.layers[0].mlp
    assert isinstance(mixture, MixtureMLP)
    assert_rows_are_alone(mixture, torch.randn(256, 64, generator=torch.Generator().manual_seed(1)))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    mixture, x = mixture_of(torch.float32), torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    whole = mixture(Normed(x, x))
    x[4] = torch.nan
    spoilt = mixture(Normed(x, x))
    assert spoilt[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(spoilt[others], whole[others])


def test_of_equal_experts_the_lower_ones_are_chosen() -> None:
    weight = torch.randn(3, 16).repeat_interleave(10, dim=0)[torch.arange(30) * 7 % 30]
    alike = torch.arange(30) * 7 % 30 // 10
    chosen = Router(weight, MostProbable(12, False))(torch.randn(64, 16)).experts
    for row in chosen:
        first, second = alike[row[0]], alike[row[10]]
        assert row[:10].tolist() == (alike == first).nonzero().flatten().tolist()
        assert row[10:].tolist() == (alike == second).nonzero().flatten().tolist()[:2]


@pytest.mark.parametrize("normalised", [False, True])
def test_weights_are_the_softmax_of_all_or_of_the_chosen(normalised: bool) -> None:
    weight, x = torch.randn(8, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    routing, logits = Router(weight, MostProbable(3, normalised))(x), x @ weight.T
    best = logits.topk(3).indices
    assert torch.equal(routing.experts, best)
    probabilities = logits.gather(1, best).softmax(1) if normalised else logits.softmax(1).gather(1, best)
    torch.testing.assert_close(routing.weights, probabilities)


def test_logits_of_routers_are_not_rounded() -> None:
    weight, x = torch.randn(64, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    routing = Router(weight, MostProbable(64, False))(x)
    assert routing.weights.dtype == torch.float32
    assert torch.equal(routing.experts, Router(weight.float(), MostProbable(64, False))(x.float()).experts)


def test_experts_are_added_in_the_order_of_their_weights() -> None:
    mixture, x = mixture_of(torch.float64, 8, 8), torch.randn(20, 32, dtype=torch.float64)
    experts, routing = mixture.experts, mixture.router(x)
    assert (routing.weights.diff(dim=1) <= 0).all()
    one = torch.ones(20, 1, dtype=torch.float64)
    each = [experts(x, Routing(routing.experts[:, place, None], one)) for place in range(8)]

    def added(places: range) -> Tensor:
        first, *others = [routing.weights[:, place, None] * each[place] for place in places]
        return sum(others, first)

    assert torch.equal(experts(x, routing), added(range(8)))
    assert not torch.equal(experts(x, routing), added(range(7, -1, -1)))


def mixture_from(checkpoint: TinyCheckpoint, rank: Rank, dtype: torch.dtype = torch.float64) -> MixtureMLP:
    source = Checkpoint(MemorySource(checkpoint.tensors), canonical_name, dtype, CPU, lambda done, total: None)
    return take_mixture(source, "layers.1", mixture.NAMES, 32, ExpertSizes(8, 3, 24, True), rank)


@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_several_ranks_add_up(ranks: int, fused: bool) -> None:
    checkpoint = in_layout(random_checkpoint("qwen3 moe"), fused)
    x = torch.randn(11, 32, dtype=torch.float64)
    whole = mixture_from(checkpoint, Rank())
    parts = [mixture_from(checkpoint, Rank(rank, ranks)) for rank in range(ranks)]
    total = sum((part(Normed(x, x)) for part in parts[1:]), parts[0](Normed(x, x)))
    torch.testing.assert_close(total, whole(Normed(x, x)), atol=1e-12, rtol=0)
    assert parts[1].experts.work.weight_bytes * ranks == whole.experts.work.weight_bytes
    reduced = replace(parts[0], communicator=SummedBy(lambda part: part + total))
    torch.testing.assert_close(reduced(Normed(x, x)), parts[0](Normed(x, x)) + total)


def test_columns_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts: found 24 inner columns, expected a multiple"):
        mixture_from(random_checkpoint("qwen3 moe"), Rank(0, 5))


def test_work_is_of_the_chosen_experts_and_memory_of_all() -> None:
    mixture = mixture_of(torch.float32, experts=8, top_k=3, hidden=32, inner=24)
    each, router = 3 * 24 * 32, 8 * 32
    assert mixture.work.row_flop == 2 * (3 * each + router)
    assert mixture.work.weight_bytes == 4 * (3 * each + router)
    dense, sparse = (load_tiny_target(tiny_target(1, **TINY_FAMILIES[name])) for name in ("llama", "mixtral"))
    assert sparse.num_bytes == dense.num_bytes + 8 * 2 * (3 * 3 * 64 * 32 + 4 * 32), "four experts for each MLP"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are loaded as for a GPU, and the references of its kernels run."""
    monkeypatch.setattr(mixture, "capability_of", lambda device: (9, 0))


@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_a_gpu_are_the_same(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = in_layout(random_checkpoint(family), fused)
    separate = load_tiny_target(checkpoint)
    monkeypatch.setattr(mixture, "capability_of", lambda device: (9, 0))
    stacks = load_tiny_target(checkpoint)
    assert isinstance(stacks.layers[1].mlp, MixtureMLP) and isinstance(stacks.layers[1].mlp.experts, StackedExperts)
    expected = logits_of(separate, torch.float64)
    torch.testing.assert_close(logits_of(stacks, torch.float64), expected, atol=1e-9, rtol=0)
    assert (stacks.work, stacks.num_bytes) == (separate.work, separate.num_bytes)


@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
def test_parts_of_several_gpus_add_up(fused: bool, on_gpu: None) -> None:
    checkpoint, x = in_layout(random_checkpoint("qwen3 moe"), fused), torch.randn(11, 32, dtype=torch.float64)
    whole, *parts = (mixture_from(checkpoint, rank) for rank in (Rank(), Rank(0, 2), Rank(1, 2)))
    total = parts[0](Normed(x, x)) + parts[1](Normed(x, x))
    torch.testing.assert_close(total, whole(Normed(x, x)), atol=1e-12, rtol=0)


WIDE = {"hidden": 128, "moe_intermediate_size": 128}
IN_RUNS = {"qwen3 moe": WIDE, "mixtral": {"hidden": 128}, "glm 4.5": WIDE}
IN_RUNS["qwen3 next"] = WIDE | {"shared_expert_intermediate_size": 128, "linear_value_head_dim": 32}


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(29)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dequantised"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", IN_RUNS)
def test_experts_in_few_bits_on_a_gpu(
    family: str, kind: str, kept: bool, tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are stored, with the references of the kernels; and as it is where no kernel has the format."""
    stored, meant = quantised(tiny_target(3, **TINY_FAMILIES[family] | IN_RUNS[family]), kind)
    monkeypatch.setattr(StoredWeight, "stacks_on", lambda self, device: kept)
    target = loaded(write_checkpoint(tmp_path / "stored", stored), torch.float64)
    experts = target.layers[1].mlp.experts
    assert isinstance(experts, StackedExperts) and isinstance(
        experts.down, QuantizedStack | Float4Matrices if kept else Tensor
    )
    assert (experts.common is not None) == (family in ("glm 4.5", "qwen3 next"))
    assert (experts.common is not None and experts.common.share is not None) == (family == "qwen3 next")
    mlp, each = target.layers[1].mlp, experts.work.weight_bytes
    num_read = mlp.router.choice.top_k + (experts.common is not None)
    assert mlp.work.weight_bytes == mlp.router.work.weight_bytes + num_read * each
    found = logits_of(target, torch.float64)
    expected = logits_of(loaded(write_checkpoint(tmp_path / "meant", meant), torch.float64), torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


def test_groups_of_linears_are_those_that_are_in_few_bits(tmp_path: Path) -> None:
    """Experts in two groups of one format; attention, which no group names, in 16 bits or more."""
    stored, meant = quantised(tiny_target(3, **TINY_FAMILIES["qwen3 moe"] | SIZES), "fp8 by row", ("self_attn",))
    given = stored.config["quantization_config"]
    group = given["config_groups"]["group_0"]
    targets = [r"re:.*\.experts\.\d+\.(gate|up)_proj$", r"re:.*mlp.*up_proj$"], [r"re:.*mlp\..*(down|gate)_proj$"]
    groups = {f"group_{index}": group | {"targets": each} for index, each in enumerate(targets)}
    config = stored.config | {"quantization_config": given | {"config_groups": groups, "ignore": []}}
    found = loaded(write_checkpoint(tmp_path / "stored", replace(stored, config=config)), torch.float64)
    expected = logits_of(loaded(write_checkpoint(tmp_path / "meant", meant), torch.float64), torch.float64)
    torch.testing.assert_close(logits_of(found, torch.float64), expected, atol=1e-9, rtol=0)


def test_a_shared_expert_in_16_bits_stays_apart(tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, meant = quantised(
        tiny_target(3, **TINY_FAMILIES["qwen3 next"] | IN_RUNS["qwen3 next"]), "fp8 by block", ("shared_expert.",)
    )
    monkeypatch.setattr(StoredWeight, "stacks_on", lambda self, device: True)
    target = loaded(write_checkpoint(tmp_path / "stored", stored), torch.float64)
    mlp = target.layers[1].mlp
    assert mlp.shared is not None and mlp.experts.common is None
    expected = logits_of(loaded(write_checkpoint(tmp_path / "meant", meant), torch.float64), torch.float64)
    torch.testing.assert_close(logits_of(target, torch.float64), expected, atol=1e-7, rtol=0)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_it_is_outlined_as_a_gpu_loads_it(kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_target(3, **TINY_FAMILIES["mixtral"] | IN_RUNS["mixtral"])
    path = write_checkpoint(tmp_path, checkpoint if kind is None else quantised(checkpoint, kind)[0])
    files = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))
    with assuming((9, 0)):
        outlined = load_target(files, torch.bfloat16, torch.device("meta"))
    monkeypatch.setattr(mixture, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(StoredWeight, "stacks_on", lambda self, device: True)
    real = loaded(path, torch.bfloat16)
    layers = (target.layers[1] for target in (real, outlined) if isinstance(target, DecoderWeights))
    mlps = [layer.mlp for layer in layers if isinstance(layer, PreNormLayer)]
    experts, outline = (mlp.experts for mlp in mlps if isinstance(mlp, MixtureMLP))
    assert described(experts) == described(outline)
    assert experts.work == outline.work and experts.work.weight_bytes * 4 == count_bytes(experts)


def test_experts_of_which_some_are_in_few_bits_are_refused(tmp_path: Path, on_gpu: None) -> None:
    checkpoint = tiny_target(3, **TINY_FAMILIES["mixtral"] | IN_RUNS["mixtral"])
    stored, _ = quantised(checkpoint, "fp8 by row", ("layers.1.block_sparse_moe.experts.2.w2",))
    with pytest.raises(CheckpointError, match=r"experts\.2\.w2 stays in 16 bits and .*experts\.0\.w1 does"):
        loaded(write_checkpoint(tmp_path, stored))


def test_few_bits_are_not_divided_among_ranks() -> None:
    checkpoint, _ = quantised(tiny_target(3, **TINY_FAMILIES["mixtral"] | IN_RUNS["mixtral"]), "fp8 by row")
    source = Checkpoint(MemorySource(checkpoint.tensors), canonical_name, torch.float64, CPU, lambda done, total: None)
    source.in_format(quantization_scheme(checkpoint.config, "memory"))
    with pytest.raises(CheckpointError, match=r"moe\.experts: fewer than 16 bits are not divided"):
        take_mixture(source, "layers.1", llama_mixtures.MIXTRAL, 32, ExpertSizes(4, 2, 64, True), Rank(0, 2))


def test_the_sum_with_a_residual_is_normalised_as_by_itself() -> None:
    x, norm = torch.randn(9, 32, dtype=torch.float64), RMSNorm(torch.rand(32, dtype=torch.float64), 1e-5)
    normed = Normed(x, norm(x))
    plain, stack = mixture_of(torch.float64), stacked(mixture_of(torch.float64))
    assert isinstance(plain.experts, SeparateExperts)
    for whole in (plain, stack, *(replace(each, shared=plain.experts.experts[0]) for each in (plain, stack))):
        expected = norm.enter(x + whole(normed))
        found, several = whole.add(normed, norm), replace(whole, communicator=SummedBy(lambda part: part + 1))
        reduced = several.add(normed, norm)
        assert torch.equal(found.values, expected.values) and torch.equal(found.weighted, expected.weighted)
        torch.testing.assert_close(reduced.values, expected.values + 1)


def test_experts_without_zero_points_beside_others() -> None:
    """GPTQ: of each expert alone the loader finds out that all of its zero points are 8."""
    values = torch.randint(0, 16, (32, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    plain = StoredWeight(values, torch.rand(1, 32) + 0.5, None, 4, 128)
    shifted = replace(plain, zeros=torch.arange(32, dtype=torch.uint8)[None] % 16)
    stack = QuantizedStack.of([each.in_rows() for each in (plain, shifted)])
    for index, each in enumerate((plain, shifted)):
        torch.testing.assert_close(stack.matrix(index, torch.float64), each.matrix(torch.float64))


def test_rows_may_have_all_experts() -> None:
    config = tiny_config(**TINY_FAMILIES["mixtral"] | {"num_experts_per_tok": 4})
    assert llama_mixtures.read_mixtral(config, "config.json").experts == ExpertSizes(4, 4, 64, True)


@pytest.mark.parametrize("family", [family for family in MIXTURES if "kv_lora_rank" in TINY_FAMILIES[family]])
def test_rows_of_latent_attention_that_no_kernel_takes_are_refused(family: str, tmp_path: Path) -> None:
    """On a GPU: two blocks of them fill its shared memory."""

    def load(directory: Path) -> LoadedTarget:
        files = resolve_model(EngineConfig(model_path=str(directory), skip_tokenizer_init=True))
        return load_target(files, torch.bfloat16, torch.device("meta"))

    for key, most in {"kv_lora_rank": 512, "qk_rope_head_dim": 64}.items():
        for size in (most, most + 2):
            directory = tmp_path / f"{key} {size}"
            write_checkpoint(directory, tiny_target(1, **TINY_FAMILIES[family] | {key: size}))
            assert load(directory).num_layers == 2
            with assuming((9, 0)):
                if size == most:
                    load(directory)
                    continue
                with pytest.raises(
                    CheckpointError, match=rf"config\.json: {key}: found {size}, expected at most {most}"
                ):
                    load(directory)
