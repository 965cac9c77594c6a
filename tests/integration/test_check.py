"""`overlap-spec check` and a start refuse the same, in the same words: every bad input goes through both."""

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from overlap_spec_kernels.launch import assuming, runs_gluon
from overlap_spec_kernels.nvrtc import runs_hopper
from safetensors.torch import save_file
from support.bad_checkpoints import (
    FORMAT_ERRORS,
    HEAD_ERRORS,
    IN_VALUES,
    QUANTISED_SIZES,
    STALE_INDEXES,
    TARGET_ERRORS,
    TRUNCATED,
    badly_quantised,
    rewrite_index,
    write_shards,
)
from support.bad_mixtures import MIXTURE_ERRORS
from support.gguf_files import KIND, write_gguf
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.quantized import SIZES, quantised
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import hub
from overlap_spec.check import Asked, parse_bytes
from overlap_spec.check.check import check as check_with, stored_formats
from overlap_spec.config import MIB, EngineConfig
from overlap_spec.config.resolve import resolve
from overlap_spec.entrypoints.cli import main
from overlap_spec.entrypoints.cli.check import check_rows
from overlap_spec.entrypoints.parsers.formats import format_names
from overlap_spec.errors import OverlapSpecError
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.runtime import machine
from overlap_spec.worker.build import load_models
from overlap_spec.worker.startup.geometry import LoadedModels, demand_of, settle_geometry

TARGETS = TARGET_ERRORS | MIXTURE_ERRORS
BAD_VALUES = (0, -1, 7, 10**9, 0.5, float("nan"), float("inf"), None, True, "x", [], [1], ["x"], {"x": 1})
NO_GPU = Asked()
check = partial(check_with, formats=format_names)
EAGLE3: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}


def config_of(target: Path, draft: Path | None = None, **flags: Any) -> EngineConfig:
    """On a CPU, without a tokenizer."""
    drafting = {} if draft is None else EAGLE3 | {"speculative_draft_model_path": str(draft)}
    return EngineConfig(model_path=str(target), skip_tokenizer_init=True, device="cpu", **drafting | flags)


def start(config: EngineConfig) -> LoadedModels:
    """What a start reads before its first step: flags and files, then in the worker all weights."""
    files = hub.resolve_model(config)
    settings, _ = resolve(config, files, machine.inspect())
    spec, _ = hub.resolve_drafting(settings.spec, files, config)
    first = Rank(0, settings.ranks)
    return load_models(replace(settings, spec=spec), CPU, lambda done, total: None, first)


def said_at_start(config: EngineConfig) -> str:
    with pytest.raises(OverlapSpecError) as caught:
        start(config)
    return " ".join(str(caught.value).split())


def assert_refused_alike(config: EngineConfig, in_values: bool = False) -> None:
    """`in_values`: headers do not show it, so only a start can tell."""
    said, report = said_at_start(config), check(config, NO_GPU)
    assert report.refused == (() if in_values else (said,))
    assert report.will_run == in_values


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), tiny_target(6))


@pytest.mark.slow_but_every(7)
@pytest.mark.parametrize("case", TARGETS)
def test_a_bad_target(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TARGETS[case][0](tiny_target(6)))
    assert_refused_alike(config_of(tmp_path), in_values=case in IN_VALUES)


@pytest.mark.slow_but_every(13)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_any_value_of_a_config_is_taken_or_refused_by_name(family: str, tmp_path: Path) -> None:
    """Drawn keys with values that they seldom may have: nothing else is raised, by `check` or by a start."""
    write_checkpoint(tmp_path, tiny_target(6, **TINY_FAMILIES[family]))
    path, config = tmp_path / "config.json", config_of(tmp_path)
    right = json.loads(path.read_text())
    for place, value in random.Random(family).sample([*product(places_of(right), BAD_VALUES)], k=40):
        wrong = json.loads(json.dumps(right))
        holder = wrong
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value
        path.write_text(json.dumps(wrong))
        report = check(config, NO_GPU)
        if report.refused:
            assert said_at_start(config) == report.refused[0]
        elif place[-1] != "tie_word_embeddings":  # only values tell whether they are
            start(config)


def places_of(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Keys, and those of objects within."""
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *inner) for inner in places_of(value))


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("case", HEAD_ERRORS)
def test_a_bad_head(case: str, target: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, HEAD_ERRORS[case][0](tiny_eagle3(7, tiny_target(6))))
    assert_refused_alike(config_of(target, tmp_path), in_values=case in IN_VALUES)


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("case", FORMAT_ERRORS)
def test_a_bad_format(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, badly_quantised(case))
    assert_refused_alike(config_of(tmp_path), in_values=case in IN_VALUES)


@pytest.mark.parametrize("case", STALE_INDEXES)
def test_a_stale_index(case: str, tmp_path: Path) -> None:
    write_shards(tmp_path, tiny_target(2), "model.safetensors", save_file)
    rewrite_index(tmp_path, STALE_INDEXES[case][0])
    assert_refused_alike(config_of(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (3, {}),
        (4, {"num_attention_heads": 6}),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}),
        (4, {"intermediate_size": 66}),
        (2, {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}),
    ],
)
def test_a_model_that_ranks_cannot_share(ranks: int, changes: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_target(6, **changes))
    assert_refused_alike(config_of(tmp_path, tp_size=ranks))


def test_few_bits_that_ranks_cannot_share(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, quantised(tiny_target(6, **SIZES), "awq")[0])
    assert_refused_alike(config_of(tmp_path, tp_size=2))
    write_gguf(tmp_path / "tiny.gguf", tiny_target(6), {})
    assert_refused_alike(config_of(tmp_path / "tiny.gguf", tp_size=2))


def test_of_several_ranks_a_part_is_told(target: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(7, tiny_target(6)))
    config = config_of(target, tmp_path, dtype="float64", tp_size=2)
    whole, report, models = check(replace(config, tp_size=1), NO_GPU), check(config, NO_GPU), start(config)
    assert report.will_run and report.ranks == 2 and whole.ranks == 1
    assert report.memory is not None and whole.memory is not None
    assert report.memory.held["of target weights"] == models.target.num_bytes
    assert report.memory.held["of target weights"] < 0.6 * whole.memory.held["of target weights"]
    own, of_one = (each.memory.held["of draft weights"] for each in (report, whole))
    assert own == models.proposer.profile.num_bytes and 0.5 * of_one < own < of_one, "embedding and head are whole"
    assert ("ranks" in dict(check_rows(report))) and "ranks" not in dict(check_rows(whole))


@pytest.mark.parametrize("kept", TRUNCATED)
def test_a_truncated_file(kept: int, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, tiny_target(2)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert_refused_alike(config_of(tmp_path))


@pytest.mark.parametrize("wrong", ["target", "draft", "both"])
def test_a_target_is_checked_by_itself_where_its_draft_is_refused(wrong: str, target: Path, tmp_path: Path) -> None:
    head = HEAD_ERRORS["missing norm"][0] if wrong != "target" else lambda c: c
    write_checkpoint(tmp_path / "draft", head(tiny_eagle3(7, tiny_target(6))))
    if wrong != "draft":
        target = write_checkpoint(tmp_path / "target", TARGETS["missing tensor"][0](tiny_target(6)))
    report = check(config_of(target, tmp_path / "draft"), NO_GPU)
    assert [("q_proj" in said, "norm.weight" in said) for said in report.refused] == [
        (wrong != "draft", wrong == "draft")
    ]
    assert (report.model is not None) == (wrong == "draft") and report.draft is None


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_sizes_are_those_of_a_start(binary: bool, target: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(7, tiny_target(6)), binary=binary)
    config = config_of(target, tmp_path, dtype="float64")
    report, models = check(config, NO_GPU), start(config)
    settings, _ = resolve(config, hub.resolve_model(config), machine.inspect())
    demand, geometry = demand_of(settings, models), settle_geometry(settings, models, CPU)
    assert report.will_run and report.memory is not None and report.draft is not None
    assert report.memory.held == {
        "of target weights": demand.target_weights,
        "of draft weights": demand.draft_weights,
    }
    assert report.memory.kv_tokens == (geometry.num_pages - 1) * geometry.page_size
    assert report.draft.fits["vocabulary"] == "112 of the target's 128 tokens, by d2t"
    assert report.draft.fits["aux layers"] == "0, 1 of 2"


def test_what_a_draft_that_learns_takes_is_told(target: Path, tmp_path: Path) -> None:
    """Its ring, its copy with gradients and moments, and a step of training."""
    write_checkpoint(tmp_path, tiny_eagle3(7, tiny_target(6)))
    config = config_of(target, tmp_path, dtype="float64", adapt_draft=True)
    report, models = check(config, NO_GPU), start(config)
    settings, _ = resolve(config, hub.resolve_model(config), machine.inspect())
    assert report.memory is not None
    assert report.memory.held["of features"] == demand_of(settings, models).feature_bytes > 16 * 1024


def test_weights_that_are_shared_count_once(target: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_target(6, tie_word_embeddings=True))
    apart, tied = (check(config_of(path, dtype="float64"), NO_GPU).memory for path in (target, tmp_path))
    assert apart is not None and tied is not None
    assert apart.formats["float64"] - tied.formats["float64"] == 128 * 32 * 8
    assert tied.held["of target weights"] <= sum(tied.formats.values())


@pytest.mark.parametrize("kind", [KIND.Q4_0, KIND.Q4_1, KIND.Q8_0], ids=str)
def test_weights_of_a_gguf_keep_their_bits_on_a_cpu(kind: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_target(6), dict.fromkeys(("q_proj", "o_proj", "down_proj"), kind))
    config = config_of(tmp_path / "tiny.gguf")
    report, models = check(config, NO_GPU), start(config)
    assert report.memory is not None
    assert report.memory.held["of target weights"] == models.target.num_bytes
    assert any("of a .gguf file" in name for name in report.kernels)


def test_formats_of_8_bits_take_a_byte(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5, dtype=torch.float8_e4m3fn), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_formats(tmp_path, "auto") == {"F8_E4M3": 15, "bfloat16": 14}


def test_headers_alone_are_read(target: Path) -> None:
    with patch("overlap_spec.models.loading.sources.SafetensorsSource.read", side_effect=AssertionError):
        assert check(config_of(target), NO_GPU).will_run


def test_a_gpu_that_is_not_here(target: Path) -> None:
    config = EngineConfig(model_path=str(target), skip_tokenizer_init=True)
    report = check(config, Asked(gpu_bytes=parse_bytes("8GiB")))
    assert report.will_run and report.dtype == "bfloat16" and report.memory is not None
    assert report.memory.total == 8192 * MIB and "of workspace" in report.memory.held
    assert "dependent" in report.kernels["launches"]
    small = check(config, Asked(gpu_bytes=parse_bytes("700MiB")))
    assert not small.will_run and "MiB are missing for" in small.refused[0]
    assert "--max-running-requests 4" in small.refused[0], "it says what to turn down"
    (none,) = check(replace(config, device="cuda"), NO_GPU).refused
    assert "--gpu-memory" in none


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_ops_answer_for_a_gpu_that_is_not_here_as_on_it(capability: tuple[int, int]) -> None:
    device, meta = torch.device("cuda", 10 * capability[0] + capability[1]), torch.device("meta")  # in no cache yet
    with (
        patch("torch.cuda.get_device_capability", return_value=capability),
        patch("overlap_spec_kernels.launch._has_gluon", return_value=True),
        patch("overlap_spec_kernels.nvrtc._has_bindings", return_value=True),
        assuming(capability),
    ):
        assert (runs_gluon(meta), runs_hopper(meta)) == (runs_gluon(device), runs_hopper(device))
    assert not runs_gluon(meta), "elsewhere it stands for a CPU"


@pytest.mark.parametrize(("capability", "names"), [((8, 0), "Triton"), ((9, 0), "warpgroup"), ((10, 0), "Gluon")])
def test_kernels_by_capability(capability: tuple[int, int], names: str, target: Path) -> None:
    config = EngineConfig(model_path=str(target), skip_tokenizer_init=True)
    kernels = check(config, Asked(parse_bytes("8GiB"), capability)).kernels
    linears = next(text for name, text in kernels.items() if name.startswith("linears in bfloat16"))
    assert names in linears
    assert ("wide_linear" in linears) == (capability == (9, 0))
    assert ("cuDNN" in kernels["attention, prompts"]) == (capability >= (9, 0))
    assert ("short_decode" in kernels["attention, decode"]) == (capability == (9, 0))


@pytest.mark.parametrize(
    ("kind", "stored_as"),
    [(None, "bfloat16"), ("nvfp4", "4-bit floats, groups of 16"), ("awq", "4 bits, groups of 32")],
)
def test_how_experts_are_stored(kind: str | None, stored_as: str, tmp_path: Path) -> None:
    sizes = {"hidden": 128, "moe_intermediate_size": 128}
    plain = tiny_target(3, **TINY_FAMILIES["qwen3 moe"] | sizes)
    write_checkpoint(tmp_path, plain if kind is None else quantised(plain, kind)[0])
    config = EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True)
    kernels = check(config, Asked(parse_bytes("8GiB"), (9, 0))).kernels
    (named,) = [name for name in kernels if name.startswith("experts")]
    assert named.startswith(f"experts in {stored_as} (")
    on_cpu = check(replace(config, device="cpu"), NO_GPU).kernels
    assert not any(name.startswith("experts") for name in on_cpu), "linears there"


@pytest.mark.parametrize(
    ("family", "state", "column"),
    [("qwen3 next", 4 * 8 * 12 + 3 * 80, 88), ("granite 4", 4 * 12 * 16 + 3 * 112, 116)],
)
def test_the_memory_of_recurrent_states(family: str, state: int, column: int, tmp_path: Path) -> None:
    """Of each slot and the dummy: a state, and the inputs of a window."""
    write_checkpoint(tmp_path, tiny_target(3, **TINY_FAMILIES[family]))
    flags = {"skip_tokenizer_init": True, "max_running_requests": 5}
    config = EngineConfig(model_path=str(tmp_path), **flags, device="cpu", speculative_algorithm="NGRAM")
    report = check(replace(config, speculative_num_draft_tokens=4), NO_GPU)
    assert report.will_run and report.memory is not None
    assert report.kernels["recurrent layers"] == "torch: windows token by token, prompts by chunks of 64"
    assert report.memory.held["of recurrent states"] == 6 * 4 * (state + 4 * column)
    assert report.memory.held["of their snapshots"] % (4 * state) == 0
    on_gpu = check(replace(config, device="cuda"), Asked(parse_bytes("8GiB"), (9, 0))).kernels
    assert on_gpu["recurrent layers"].startswith("gated_delta (Triton): windows token by token")


def test_pages_of_8_bits(target: Path) -> None:
    config = EngineConfig(model_path=str(target), skip_tokenizer_init=True)
    reports = [
        check(replace(config, kv_cache_dtype=dtype), Asked(parse_bytes("8GiB"), capability))
        for dtype, capability in (("auto", (9, 0)), ("fp8_e4m3", (9, 0)), ("fp8_e4m3", (8, 0)))
    ]
    wide, narrow = (report.memory.kv_bytes_per_token for report in reports[:2] if report.memory is not None)
    assert wide == 2 * narrow
    assert "8.9 or later, found 8.0" in reports[2].refused[0]


@pytest.mark.parametrize(("capability", "bits"), [((9, 0), 8), ((8, 0), 16)])
def test_weights_keep_their_format_where_a_kernel_multiplies_by_it(
    capability: tuple[int, int], bits: int, tmp_path: Path
) -> None:
    stored, _ = quantised(tiny_target(3, **QUANTISED_SIZES), "fp8 by row")
    write_checkpoint(tmp_path, stored)
    config = EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True)
    report = check(config, Asked(parse_bytes("8GiB"), capability))
    assert report.will_run and report.memory is not None
    in_layers = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
    assert (report.memory.formats.get("uint8", 0) >= in_layers) == (bits == 8)
    assert any("8 bits" in name for name in report.kernels) == (bits == 8)


@pytest.mark.parametrize(("capability", "kernel"), [((9, 0), "packed_stream"), ((10, 0), "quantized_stream")])
def test_the_order_of_weights_decides_their_kernel(capability: tuple[int, int], kernel: str, tmp_path: Path) -> None:
    stored, _ = quantised(tiny_target(3, **QUANTISED_SIZES), "awq")
    write_checkpoint(tmp_path, stored)
    config = EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True)
    report = check(config, Asked(parse_bytes("8GiB"), capability))
    assert any("4 bits" in name and kernel in text for name, text in report.kernels.items())


def test_a_draft_tells_its_method(target: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(7, tiny_target(6)))
    flags = {"speculative_algorithm": None}
    report = check(config_of(target, tmp_path, **flags), NO_GPU)
    assert report.will_run and report.draft is not None and report.draft.method == "EAGLE3"
    assert any("serve wants it named" in note for note in report.notes)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(("check", *words))
    return status, capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, tiny_target(6))
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    status, said = run(capsys, str(tmp_path), "--device", "cpu")
    assert status == 0 and said.endswith("it will run\n")
    for words in ("LlamaForCausalLM: 2 layers of 32, 128 tokens", "float64", "temperature 0.6", "tool calls"):
        assert words in said
    status, said = run(capsys, str(tmp_path), "--device", "cpu", "--json", "--context-length", "9999")
    assert status == 2 and "9999 exceeds" in json.loads(said)["refused"][0]


def test_keys_and_a_function_of_ones_own_are_read_as_at_a_start(target: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one:k1\n")
    keys.chmod(0o600)
    config = config_of(target, api_key_file=str(keys), zmq_endpoint="tcp://0.0.0.0:0")
    assert check(config, NO_GPU).will_run  # that address needs a key
    wrong: tuple[tuple[dict[str, str], str], ...] = (
        ({"api_key_file": str(tmp_path / "nowhere")}, "--api-key-file: .*nowhere cannot be read"),
        ({"admin_api_key": "k1"}, "--admin-api-key: is also one of the API keys"),
        ({"logit_processor": "no_such:function"}, "--logit-processor: no_such:function: No module named 'no_such'"),
    )
    for flags, said in wrong:
        (reason,) = check(replace(config, **flags), NO_GPU).refused
        assert re.match(said, reason)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        "(num_experts 60), which is not supported yet; the nearest one is Qwen3MoeForCausalLM, which does not read"
        " shared_expert_intermediate_size 5632",
    ),
    "Llama-4": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {"num_local_experts": 16, "attention_chunk_size": 8192, "use_qk_norm": True},
        },
        "Llama4ForConditionalGeneration is a mixture of experts (num_local_experts 16), which is not supported yet; the"
        " nearest one is Gemma4ForConditionalGeneration, which does not read rope_theta 10000.0,"
        " num_local_experts 16, attention_chunk_size 8192, use_qk_norm True",
    ),
    "MiniMax-M2": (
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            **{"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
            **{"use_routing_bias": True, "rotary_dim": 64, "qk_norm_type": "per_layer"},
        },
        "MiniMaxM2ForCausalLM is a mixture of experts (num_local_experts 256), which is not supported yet; the nearest"
        " one is MixtralForCausalLM, which does not read use_routing_bias True, rotary_dim 64,"
        " qk_norm_type 'per_layer'; of that one scoring_func 'sigmoid' is not supported",
    ),
    "Grok-2": (
        {"architectures": ["Grok1ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "residual_moe": True},
        "Grok1ForCausalLM is a mixture of experts (num_local_experts 8), which is not supported yet; the nearest one is"
        " Glm4MoeForCausalLM; of that one n_routed_experts must be a positive integer, it is missing",
    ),
    "Nemotron-H": (
        {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*", "mlp_hidden_act": "relu2"},
        "the nearest one is Qwen2ForCausalLM, which does not read hybrid_override_pattern 'M-M*', mlp_hidden_act"
        " 'relu2'",
    ),
    "Nemotron-H with experts": (
        {"architectures": ["NemotronHForCausalLM"], "n_routed_experts": 128, "hybrid_override_pattern": "MEM*E"},
        "NemotronHForCausalLM is a mixture of experts (n_routed_experts 128), which is not supported yet; the nearest"
        " one is Gemma4ForCausalLM, which does not read rope_theta 10000.0, n_routed_experts 128,"
        " hybrid_override_pattern 'MEM*E'",
    ),
    "capped logits": (
        {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "the nearest one is Gemma3ForCausalLM; of that one attn_logit_softcapping 50.0 is not supported,"
        " final_logit_softcapping 30.0 is not supported",
    ),
    "keys that change nothing": (
        {"architectures": ["Llama9ForCausalLM"], "torch_dtype": "bfloat16", "mlp_only_layers": []},
        "the nearest one is LlamaForCausalLM",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_architecture_names_the_nearest(case: str, tmp_path: Path) -> None:
    changes, said = UNKNOWN[case]
    checkpoint = tiny_target(6)
    config = {key: value for key, value in checkpoint.config.items() if key != "hidden_act"} | changes
    write_checkpoint(tmp_path, type(checkpoint)(config, checkpoint.tensors))
    (sentence,) = check(config_of(tmp_path), NO_GPU).refused
    assert sentence.endswith(said)
    assert sentence == said_at_start(config_of(tmp_path))


@pytest.mark.slow
def test_the_default_model() -> None:
    report = check(EngineConfig(device="cpu"), NO_GPU)
    assert report.will_run and report.model is not None and report.text is not None
    assert set(report.model.stored) == {"Q4_1", "Q8_0", "F32"}
    assert report.text.has_chat_template and report.draft is not None and report.draft.method == "EAGLE3"
