"""--enable-deterministic-inference: what cannot keep its promise is refused by name, before weights are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from overlap_spec_kernels import NoLibraryError
from support.tiny.grouped import grouped_kernel
from support.tiny.models import tiny_target, write_checkpoint

from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.linear_forms import linears_of
from overlap_spec.models.quantization.grouped import GroupedLinear, by_kernel
from overlap_spec.worker import build

CPU, GPU = Machine(num_cores=2, has_cuda=False), Machine(num_cores=2, has_cuda=True)
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4}
FILES = ModelFiles(
    weights="/none", config=LLAMA, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
    preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip


def settle(machine: Machine = CPU, changed: dict[str, Any] | None = None, **asked: Any) -> Settings:
    files = replace(FILES, config=LLAMA | (changed or {}))
    return resolve(EngineConfig(enable_deterministic_inference=True, **asked), files, machine)[0]


def test_it_is_off_unless_it_is_given() -> None:
    assert not resolve(EngineConfig(), FILES, CPU)[0].model.deterministic
    assert settle().model.deterministic
    assert settle(**TREES).spec.topk == 2, "rows of trees keep the promise on a CPU"


def test_a_gpu_keeps_it_in_16_bits() -> None:
    for dtype in ("auto", "bfloat16", "float16"):
        settings = settle(GPU, dtype=dtype, kv_cache_dtype="fp8_e4m3")
        assert settings.model.deterministic and settings.attention.target_in_order, dtype
    assert settle(GPU, quantization="fp8").model.deterministic
    for method in ("fp8", "awq", "gptq"):
        assert settle(GPU, changed={"quantization_config": {"quant_method": method}}).model.deterministic
    assert not settle(GPU, device="cpu", dtype="float32").attention.target_in_order
    assert not resolve(EngineConfig(), FILES, GPU)[0].attention.target_in_order


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_layers_that_recur_keep_it(machine: Machine) -> None:
    of_text = ("Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM")
    for name in (*of_text, "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"):
        settings = settle(machine, {"architectures": [name]}, speculative_algorithm="NGRAM")
        assert settings.model.deterministic and settings.scheduler.deterministic, name


BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_sizes_of_heads_are_those_of_the_family() -> None:
    """A size that Gemma 3's config leaves out is not hidden / heads; latent attention has a kernel of its own."""
    for name, own in (("Gemma3", {}), ("Gemma4", {}), ("DeepseekV3", {"qk_nope_head_dim": 12})):
        changed = {"architectures": [f"{name}ForCausalLM"], "hidden_size": 2560, "num_attention_heads": 200, **own}
        assert settle(GPU, changed=changed, speculative_algorithm="NGRAM").model.deterministic, name


def stored_as(name: str, stored: dict[str, Any] | None) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"]} | ({"quantization_config": stored} if stored else {})


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *[
            ("Qwen3Next", BY_BLOCK),
            ("Qwen3_5Moe", BY_BLOCK),
            ("Qwen3_5", BY_BLOCK),
            ("Qwen3_5", {"quant_method": "awq"}),
        ],
        *[("Qwen3Moe", BY_BLOCK), ("Mixtral", {"quant_method": "gptq"}), ("GptOss", {"quant_method": "mxfp4"})],
        *[("GptOss", {"quant_method": "mxfp4"}), ("DeepseekV3", BY_BLOCK), ("DeepseekV2", None)],
        *[("Glm4Moe", None), ("Gemma3", {"quant_method": "awq"})],
    ],
)
def test_families_keep_it_in_tested_formats(name: str, stored: dict[str, Any]) -> None:
    assert settle(GPU, changed=stored_as(name, stored), speculative_algorithm="NGRAM").model.deterministic


@pytest.mark.parametrize(
    ("name", "stored", "asked", "said"),
    [
        ("Qwen3Next", {"quant_method": "fp8"}, {}, "not for this fp8"),
        ("Qwen3Next", {"quant_method": "awq"}, {}, "not for this awq"),
        ("GraniteMoeHybrid", BY_BLOCK, {}, "not for this fp8"),
        ("Qwen3_5", {"quant_method": "mxfp4"}, {}, "not for this mxfp4"),
        ("Qwen3_5", None, {"quantization": "fp8"}, "not for --quantization"),
        ("Qwen3Moe", {"quant_method": "mxfp4"}, {}, "not for this mxfp4"),
        ("DeepseekV3", {"quant_method": "awq"}, {}, "not for this awq"),
        ("GptOss", None, {"quantization": "fp8"}, "not for --quantization"),
        ("Gemma4", BY_BLOCK, {}, "not for this fp8"),
    ],
)
def test_other_weights_of_few_bits_are_refused_on_a_gpu(
    name: str, stored: dict[str, Any] | None, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"is on a GPU for 16 bits.* of {name}ForCausalLM, {said}"):
        settle(GPU, changed=stored_as(name, stored), speculative_algorithm="NGRAM", **asked)


@pytest.mark.parametrize(
    ("flag", "asked"),
    [
        ("dtype", {"dtype": "float32"}),
        ("logit-processor", {"logit_processor": "some:processor"}),
        ("feature", {"feature": ("some_package",)}),
        ("enable-torch-compile", {"enable_torch_compile": True}),
        ("speculative-use-rejection-sampling", {"speculative_use_rejection_sampling": True}),
        ("attention-backend", {"attention_backend": "torch"}),
        ("quantization", {"quantization": "mxfp4"}),
    ],
)
def test_flags_that_cannot_go_with_it_on_a_gpu_are_named(flag: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}: .*cannot go with --enable-deterministic-inference"):
        settle(GPU, **asked)


TREES = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


def test_a_gpu_s_default_numbers_are_chains() -> None:
    """Llama's are trees without the flag; a tree that is asked for is refused by name."""
    files = replace(FILES, preset_spec=None, preset_draft=None)
    asked = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/head"}
    config = EngineConfig(enable_deterministic_inference=True, **asked)
    settings, notes = resolve(config, files, GPU)
    assert (settings.spec.num_steps, settings.spec.topk, settings.spec.width) == (5, 1, 6)
    assert any("guesses are chains" in note and "--enable-deterministic-inference" in note for note in notes)
    assert resolve(EngineConfig(**asked), files, GPU)[0].spec.topk == 4
    with pytest.raises(ConfigError, match="--speculative-eagle-topk: .*--enable-deterministic-inference"):
        settle(GPU, **TREES)
    assert settle(GPU, speculative_algorithm="NGRAM").spec.topk == 1
    with pytest.raises(ConfigError, match="--speculative-ngram-max-bfs-breadth: .*--enable-deterministic-inference"):
        settle(GPU, speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=4)


@pytest.mark.parametrize(
    ("flag", "asked"),
    [
        ("dtype", {"dtype": "bfloat16"}),
        ("dtype", {"dtype": "float64"}),
        ("logit-processor", {"logit_processor": "some:processor"}),
        ("feature", {"feature": ("some_package",)}),
        ("enable-torch-compile", {"enable_torch_compile": True}),
        ("speculative-use-rejection-sampling", {"speculative_use_rejection_sampling": True}),
        ("speculative-accept-threshold-single", {"speculative_accept_threshold_single": 0.5}),
        ("kv-cache-dtype", {"kv_cache_dtype": "fp8_e4m3"}),
        ("quantization", {"quantization": "awq"}),
        ("tp-size", {"tp_size": 2}),
    ],
)
def test_flags_that_cannot_go_with_it_are_named(flag: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}: .*cannot go with --enable-deterministic-inference"):
        settle(**asked)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "is for models of Llama, .*GptOssForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "is for models of Llama, .*Qwen3MoeForCausalLM"),
        ({"architectures": []}, "is for models of Llama, .* of no name"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"head_dim": 72}, "multiple of 16 up to 256, and this model's have 72"),
        ({"num_attention_heads": 1, "hidden_size": 512}, "up to 256, and this model's have 512"),
    ],
)
def test_models_that_cannot_keep_it_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"--enable-deterministic-inference: .*{said}"):
        settle(changed=changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["Step3p5ForCausalLM"]}, "is on a GPU for models of Llama, .*Step3p5ForCausalLM"),
        ({"architectures": ["Olmo2ForCausalLM"], "head_dim": 72}, "up to 256, or of 512, and this model's have 72"),
        ({"architectures": ["Gemma4ForCausalLM"], "global_head_dim": 384}, "or of 512, and this model's have 384"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "is quantised to mxfp4: on a GPU it is for fp8, awq"),
    ],
)
def test_models_that_cannot_keep_it_on_a_gpu_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"--enable-deterministic-inference: .*{said}"):
        settle(GPU, changed=changed)


def settings_of(directory: Path) -> Settings:
    write_checkpoint(directory, tiny_target(7))
    config = EngineConfig(
        model_path=str(directory), skip_tokenizer_init=True, device="cpu", speculative_algorithm="NONE",
        enable_deterministic_inference=True,
    )  # fmt: skip
    return resolve(config, resolve_model(config), CPU)[0]


def test_no_linear_of_the_target_is_left_to_a_blas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "GroupedKernel", lambda cache: grouped_kernel())
    models = build.load_models(settings_of(tmp_path), torch.device("cpu"), lambda done, total: None)
    assert not list(linears_of(models.target)) and models.kernel is grouped_kernel()


def test_weights_keep_their_values() -> None:
    """In float32; in 16 bits where they are bfloat16 numbers."""
    for matrix, bits in ((torch.randn(48, 32), 32), (torch.randn(48, 32).bfloat16().float(), 16)):
        moved = by_kernel((Linear(matrix, torch.randn(48)),), grouped_kernel())[0]
        assert isinstance(moved, GroupedLinear) and moved.operand.parts[0].bits == bits
        assert torch.equal(moved.operand.parts[0].dequantised(), matrix)
        x = torch.randn(3, 32)
        torch.testing.assert_close(moved(x), torch.nn.functional.linear(x, matrix, moved.bias), atol=1e-5, rtol=1e-5)


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(cache: Path) -> None:
        raise NoLibraryError("there is no C++ compiler")

    monkeypatch.setattr(build, "GroupedKernel", missing)
    with pytest.raises(ConfigError, match="--enable-deterministic-inference: needs .* there is no C\\+\\+ compiler"):
        build.load_models(settings_of(tmp_path), torch.device("cpu"), lambda done, total: None)
