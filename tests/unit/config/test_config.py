"""`resolve`: every automatic value, every refusal, by hand."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from overlap_spec import config as config_module
from overlap_spec.config import (
    EngineConfig,
    Machine,
    ModelFiles,
    asks_for_spec_v2,
    cache_directory,
    child_environment,
    decode_settings,
    encode_settings,
)
from overlap_spec.config.keys import read_keys
from overlap_spec.config.resolve import resolve, settled_flags, without_speculation
from overlap_spec.errors import ConfigError
from overlap_spec.runtime import machine as this_machine

CPU = Machine(num_cores=2, has_cuda=False)
GPU = Machine(num_cores=16, has_cuda=True)
LLAMA = ModelFiles(
    weights="/models/tiny",
    config={"architectures": ["LlamaForCausalLM"]},
    tokenizer_dir="/models/tiny",
    eos_token_ids=(2,),
    context_length=2048,
    vocab_size=100,
)
ALIAS = msgspec.structs.replace(LLAMA, preset_draft="/heads/tiny", preset_spec=("EAGLE3", 3, 1, 4))


def resolved(files: ModelFiles = LLAMA, machine: Machine = CPU, **flags: Any) -> config_module.Settings:
    config = EngineConfig(**flags)
    return resolve(config, files, machine, read_keys(config))[0]


def test_defaults_on_a_cpu() -> None:
    settings = resolved()
    assert (settings.model.dtype, settings.model.device, settings.model.max_len) == ("float32", "cpu", 2048)
    assert (settings.spec.method, settings.spec.width) == ("NONE", 1)
    assert (settings.scheduler.depth, settings.scheduler.max_running_requests) == (2, 48)
    assert (settings.cache.page_size, settings.cache.prefix_cache, settings.cache.max_total_tokens) == (16, True, None)
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 30000)
    assert settings.num_threads == 2


@pytest.mark.parametrize(
    ("quantization", "flag", "kv_dtype"),
    [
        (None, "auto", None),
        (None, "fp8_e5m2", "float8_e5m2"),
        (None, "bf16", None),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "auto", "float8_e4m3fn"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "bfloat16", None),
        ({"kv_cache_quant_algo": "FP8"}, "auto", "float8_e4m3fn"),
        ({"kv_cache_scheme": None}, "auto", None),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "auto", None),
    ],
)
def test_the_format_of_kv_pages(quantization: dict[str, Any] | None, flag: str, kv_dtype: str | None) -> None:
    """The flag's, else the checkpoint's if it can be read, else that of --dtype."""
    files = msgspec.structs.replace(LLAMA, config=LLAMA.config | {"quantization_config": quantization})
    settings, notes = resolve(EngineConfig(dtype="bfloat16", kv_cache_dtype=flag), files, CPU)
    assert settings.cache.kv_dtype == kv_dtype
    assert settled_flags(EngineConfig(), settings)["kv_cache_dtype"] == {
        None: "bfloat16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"
    }[kv_dtype]  # fmt: skip
    assert any("kv_cache_scheme" in note for note in notes) == ("int" in str(quantization))


def test_kv_pages_of_another_16_bit_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv-cache-dtype: bfloat16 beside --dtype float16"):
        resolved(kv_cache_dtype="bf16", dtype="float16")
    with pytest.raises(msgspec.ValidationError, match="fp4_e2m1"):
        msgspec.convert({"kv_cache_dtype": "fp4_e2m1"}, EngineConfig)


def test_defaults_on_a_gpu() -> None:
    settings = resolved(machine=GPU)
    assert (settings.model.dtype, settings.model.device) == ("bfloat16", "cuda")
    assert settings.scheduler.max_running_requests == 256
    assert resolved(ALIAS, GPU).scheduler.max_running_requests == 48


def test_the_same_request_gives_the_same_settings_and_survives_the_wire() -> None:
    settings = resolved(ALIAS, max_total_tokens=512, random_seed=7)
    assert settings == resolved(ALIAS, max_total_tokens=512, random_seed=7)
    assert decode_settings(encode_settings(settings)) == settings


def test_chunks_are_bound_by_time_on_a_gpu_and_where_it_is_asked() -> None:
    gpu = Machine(8, has_cuda=True)
    assert resolved(ALIAS).scheduler.max_gap_s is None
    assert resolved(ALIAS, max_gap_ms=80).scheduler.max_gap_s == 0.08
    on_gpu, _ = resolve(EngineConfig(), ALIAS, gpu)
    assert on_gpu.scheduler.max_gap_s == 0.025 and on_gpu.scheduler.schedule_policy == "fcfs"
    on_gpu, _ = resolve(EngineConfig(max_gap_ms=40.0, schedule_policy="lpm"), ALIAS, gpu)
    assert on_gpu.scheduler.max_gap_s == 0.04 and on_gpu.scheduler.schedule_policy == "lpm"


def test_an_alias_brings_its_preset() -> None:
    spec = resolved(ALIAS).spec
    assert (spec.method, spec.draft_path, spec.num_steps, spec.topk, spec.width) == ("EAGLE3", "/heads/tiny", 3, 1, 4)


def test_explicit_flags_replace_the_preset_as_a_set() -> None:
    assert resolved(ALIAS, speculative_algorithm="NONE").spec.width == 1
    spec = resolved(
        ALIAS,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="/heads/other",
        speculative_num_steps=5,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=6,
    ).spec
    assert (spec.draft_path, spec.num_steps, spec.width) == ("/heads/other", 5, 6)


def test_a_preset_head_is_for_its_own_method() -> None:
    with pytest.raises(ConfigError, match="--speculative-draft-model-path: "):
        resolved(ALIAS, speculative_algorithm="EAGLE")
    with pytest.raises(ConfigError, match="--speculative-algorithm: missing"):
        resolved(ALIAS, speculative_token_map="map.pt")


def test_a_token_map_reaches_the_worker() -> None:
    flags = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/h", "speculative_token_map": "map.pt"}
    spec = resolved(**flags).spec
    assert (spec.method, spec.draft_path, spec.token_map) == ("EAGLE", "/h", "map.pt")


def test_the_default_numbers_of_an_architecture_are_said() -> None:
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/heads/other"}
    settings, notes = resolve(EngineConfig(**flags), LLAMA, CPU)
    assert (settings.spec.num_steps, settings.spec.topk, settings.spec.width) == (5, 4, 8)
    assert "(5, 4, 8): the default for Llama" in notes[0]


def test_what_judges_chains_alone_gets_the_default_as_a_chain() -> None:
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/heads/other"}
    settings, notes = resolve(EngineConfig(**flags, speculative_use_rejection_sampling=True), LLAMA, CPU)
    assert (settings.spec.num_steps, settings.spec.topk, settings.spec.width) == (5, 1, 6)
    assert "as a chain for --speculative-use-rejection-sampling" in notes[0]


def test_more_draft_tokens_than_a_chain_holds_are_lowered_with_a_note() -> None:
    flags = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 9}
    settings, notes = resolve(EngineConfig(speculative_algorithm="EAGLE3", **flags), ALIAS, CPU)
    assert settings.spec.width == 4
    assert "from 9 to 4" in notes[0]


def test_a_tree_has_as_many_nodes_as_its_levels_hold() -> None:
    flags = {"speculative_num_steps": 2, "speculative_eagle_topk": 2}
    settings, notes = resolve(
        EngineConfig(speculative_algorithm="EAGLE3", **flags, speculative_num_draft_tokens=8), ALIAS, CPU
    )
    assert (settings.spec.topk, settings.spec.width) == (2, 7)
    assert "from 8 to 7" in notes[0]
    assert resolved(ALIAS, speculative_algorithm="EAGLE3", **flags, speculative_num_draft_tokens=5).spec.width == 5


@pytest.mark.parametrize(
    ("field", "flags"),
    [
        ("device", {"device": "cuda"}),
        ("context_length", {"context_length": 4096}),
        ("chunked_prefill_size", {"chunked_prefill_size": 8}),
        ("chunked_prefill_size", {"chunked_prefill_size": 0}),
        ("max_total_tokens", {"max_total_tokens": 16, "page_size": 32}),
        ("zmq_endpoint", {"zmq_endpoint": "udp://1.2.3.4:5"}),
        ("zmq_endpoint", {"zmq_endpoint": "tcp://127.0.0.1"}),
        ("zmq_endpoint", {"zmq_endpoint": "tcp://127.0.0.1:99999"}),
        ("zmq_endpoint", {"zmq_endpoint": "tcp://:5555"}),
        ("zmq_endpoint", {"zmq_endpoint": "tcp://0.0.0.0:5555"}),
        ("speculative_algorithm", {"speculative_num_steps": 3}),
        ("speculative_draft_model_path", {"speculative_algorithm": "EAGLE3"}),
        ("speculative_num_steps", {"speculative_algorithm": "NONE", "speculative_num_steps": 3}),
        ("speculative_algorithm", {"speculative_token_map": "map.pt"}),
        ("speculative_token_map", {"speculative_algorithm": "NONE", "speculative_token_map": "map.pt"}),
        (
            "speculative_token_map",
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "/h",
                "speculative_token_map": "map.pt",
            },
        ),
        (
            "speculative_eagle_topk",
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "/h",
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 17,
                "speculative_num_draft_tokens": 16,
            },
        ),
        (
            "speculative_num_draft_tokens",
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "/h",
                "speculative_num_steps": 5,
                "speculative_eagle_topk": 8,
                "speculative_num_draft_tokens": 65,
            },
        ),
        (
            "speculative_eagle_topk",
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "/h",
                "speculative_num_steps": 3,
                "speculative_num_draft_tokens": 4,
            },
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_flag(field: str, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: ") as caught:
        resolved(**flags)
    assert caught.value.field == field


def test_float64_is_for_the_cpu() -> None:
    assert resolved(dtype="float64").model.dtype == "float64"
    with pytest.raises(ConfigError, match="--dtype"):
        resolved(machine=GPU, dtype="float64")


@pytest.mark.parametrize("endpoint", ["ipc:///run/me.sock", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_a_local_zmq_endpoint_needs_no_key(endpoint: str) -> None:
    assert resolved(zmq_endpoint=endpoint).link.client_endpoint == endpoint


def test_a_public_zmq_endpoint_takes_a_key() -> None:
    link = resolved(zmq_endpoint="tcp://0.0.0.0:5555", api_key="secret").link
    assert (link.client_endpoint, link.api_key) == ("tcp://0.0.0.0:5555", "secret")


WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def without_threads_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WAITING, "KMP_LIBRARY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_threads_of_children_wait_passively_and_only_the_worker_has_many(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads_of_the_user(monkeypatch)
    settings = resolved()
    assert child_environment(settings, "worker")["OMP_NUM_THREADS"] == "2"
    assert child_environment(settings, "scheduler")["OMP_NUM_THREADS"] == "1"
    assert child_environment(settings, "worker").items() >= {"OMP_WAIT_POLICY": "PASSIVE"}.items()
    assert child_environment(settings, "worker").items() >= {"PATH": os.environ["PATH"]}.items()


@pytest.mark.parametrize("has_bytecode", [False, True])
def test_children_keep_bytecode_where_none_may_be_kept_and_torch_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_bytecode: bool
) -> None:
    spec = SimpleNamespace(cached=str(tmp_path / "torch.pyc"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    if has_bytecode:
        (tmp_path / "torch.pyc").touch()
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    for forbidden in (True, False):
        monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
        found = child_environment(resolved(), "scheduler").items()
        assert (found >= kept.items()) == (forbidden and not has_bytecode)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for folder in (tmp_path, tmp_path / "bytecode"):  # others may write what would be run
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        assert child_environment(resolved(), "worker")["PYTHONDONTWRITEBYTECODE"] == "1"
        folder.chmod(0o755)
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")  # the user has said where
    assert child_environment(resolved(), "worker")["PYTHONDONTWRITEBYTECODE"] == "1"


def test_many_threads_poll_before_they_sleep_and_no_other_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads_of_the_user(monkeypatch)
    settings = resolved()
    assert child_environment(settings, "worker")["GOMP_SPINCOUNT"] == "3000"
    assert child_environment(settings, "worker")["KMP_BLOCKTIME"] == "1"
    single = msgspec.structs.replace(settings, num_threads=1)
    assert child_environment(single, "worker").items() >= WAITING.items()
    for role in ("frontend", "scheduler"):
        assert child_environment(settings, role).items() >= WAITING.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_WAIT_POLICY", "ACTIVE"),
        ("GOMP_SPINCOUNT", "5"),
        ("KMP_BLOCKTIME", "200"),
        ("KMP_LIBRARY", "turnaround"),
        ("OMP_NUM_THREADS", "7"),
        ("MKL_NUM_THREADS", "1"),
        ("OMP_PROC_BIND", "true"),
    ],
)
def test_what_the_user_says_of_threads_stands(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of several ways to wait, one overrides another, so none of ours is beside the user's."""
    without_threads_of_the_user(monkeypatch)
    monkeypatch.setenv(name, value)
    settings = resolved()
    environment = child_environment(settings, "worker")
    assert environment[name] == value
    ours = {other: found for other, found in environment.items() if other in WAITING and other != name}
    assert not ours or name not in (*WAITING, "KMP_LIBRARY")


def test_the_threads_that_the_user_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads_of_the_user(monkeypatch)
    assert this_machine.inspect().num_threads is None
    for said, wanted in (("3", 3), ("4,2", 4), ("0", None), ("many", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert this_machine.inspect().num_threads == wanted
    given, own = (resolved(machine=Machine(8, has_cuda=False, num_threads=number)) for number in (3, None))
    assert (given.num_threads, given.threads_given) == (3, True)
    assert (own.num_threads, own.threads_given) == (8, False)


def test_the_blas_of_16_bit_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own choice is kept, and float32 uses the interface that it was tested with."""
    name = "TORCH_BLAS_PREFER_CUBLASLT"
    monkeypatch.delenv(name, raising=False)
    exact, rounded = resolved(machine=GPU, dtype="float32"), resolved(machine=GPU)
    assert child_environment(rounded, "worker")[name] == "1"
    assert name not in child_environment(exact, "worker") | child_environment(rounded, "scheduler")
    monkeypatch.setenv(name, "0")
    assert child_environment(rounded, "worker")[name] == "0"


def test_what_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)
    assert not asks_for_spec_v2()
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    assert asks_for_spec_v2()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("OVERLAP_SPEC_CACHE", raising=False)
    assert cache_directory() == "/x/overlap-spec"
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", "/y")
    assert cache_directory() == "/y"


NUMBERS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
HEAD = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/h"}


def test_steps_get_narrower_unless_numbers_were_given() -> None:
    assert resolved(ALIAS).spec.narrower == (1, 2, 3)
    assert resolved(**HEAD).spec.narrower == (1, 2, 4), "of a tree of 8 nodes"
    chain = resolved(**HEAD, speculative_use_rejection_sampling=True).spec
    assert chain.narrower == (1, 2, 3, 4), "of a window of 6, every other width above 3"
    assert resolved(**HEAD, **NUMBERS).spec.narrower == ()
    assert resolved(**HEAD, **NUMBERS, speculative_adaptive=True).spec.narrower == (1, 2, 3)
    assert resolved().spec.narrower == ()


def adaptive(path: Path, content: object, **flags: Any) -> config_module.Settings:
    path.write_text(json.dumps(content))
    return resolved(**HEAD, speculative_adaptive=True, speculative_adaptive_config=str(path), **flags)


def test_an_adaptive_config_says_which_widths_there_are(tmp_path: Path) -> None:
    content = {
        "1": {"candidate_steps": [1, 3, 7]},
        "8": {"candidate_steps": [3, 0], "up_hysteresis": 0.5},
        "ema_alpha": 1,
    }
    settings = adaptive(tmp_path / "adaptive.json", content)
    assert (settings.spec.width, settings.spec.num_steps, settings.spec.narrower) == (8, 7, (1, 2, 4))
    one, eight = settings.scheduler.width_rules
    assert (one.batch_size, one.candidate_steps, one.initial_steps, one.up_hysteresis) == (1, (1, 3, 7), 3, 0.0)
    assert (eight.batch_size, eight.candidate_steps, eight.initial_steps, eight.up_hysteresis) == (8, (0, 3), 3, 0.5)
    assert one.ema_alpha == eight.ema_alpha == 1 and one.down_hysteresis == -0.25
    assert decode_settings(encode_settings(settings)) == settings


def test_explicit_steps_are_where_an_adaptive_config_begins(tmp_path: Path) -> None:
    numbers = {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2}
    content = {"1": {"candidate_steps": [1, 3, 5]}, "4": {"candidate_steps": [0, 3]}}
    settings = adaptive(tmp_path / "adaptive.json", content, **numbers)
    assert [rule.initial_steps for rule in settings.scheduler.width_rules] == [1, 3], "or the middle"
    assert settings.spec.width == 6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"candidate_steps": [1, 3]}, "names no batch size"),
        ([1], "JSON object"),
        ({"1": [1, 3]}, "must be an object"),
        ({"1": {"candidate_steps": [1]}, "strategy": "throughput_aware"}, "strategy is not supported"),
        ({"1": {}}, "candidate_steps"),
        ({"1": {"candidate_steps": []}}, "one or more"),
        ({"1": {"candidate_steps": [1, 99]}}, "at most 8"),
        ({"1": {"candidate_steps": [-1]}}, "batch size 1"),
        ({"1": {"candidate_steps": [0]}}, "--speculative-algorithm NONE"),
        ({"1": {"candidate_steps": [1], "ema_alpha": 2}}, "ema_alpha"),
    ],
)
def test_what_an_adaptive_config_must_not_hold(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-adaptive-config: .*{words}"):
        adaptive(tmp_path / "adaptive.json", content)


@pytest.mark.parametrize(
    ("field", "flags"),
    [
        ("speculative_adaptive", {"speculative_adaptive": True}),
        ("speculative_adaptive", {"speculative_adaptive": True, "speculative_algorithm": "NONE"}),
        ("speculative_adaptive_config", {**HEAD, "speculative_adaptive_config": "/x.json"}),
        ("speculative_adaptive_config", {**HEAD, "speculative_adaptive": True, "speculative_adaptive_config": "/no"}),
        ("cuda_graph_bs", {"cuda_graph_bs": (1, 2), "disable_cuda_graph": True}),
        ("cuda_graph_bs", {"cuda_graph_bs": (8, 9), "max_running_requests": 4}),
        ("cuda_graph_bs", {"cuda_graph_bs": ()}),
        ("cuda_graph_max_bs", {"cuda_graph_bs": (1, 2), "cuda_graph_max_bs": 4}),
    ],
)
def test_width_and_graph_flags_that_cannot_be_honoured(field: str, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: ") as caught:
        resolved(machine=GPU, **flags)
    assert caught.value.field == field


def test_named_graph_sizes_replace_the_automatic_ones() -> None:
    assert resolved(machine=GPU, cuda_graph_bs=(8, 1, 3, 8), max_running_requests=6).graph_batch_sizes == (1, 3)
    assert resolved(machine=GPU, cuda_graph_bs=(1, 8), cuda_graph_max_bs=8).graph_batch_sizes == (1, 8)
    assert resolved(machine=GPU, max_running_requests=9).graph_batch_sizes == (1, 2, 4, 8, 9)
    settings, notes = resolve(EngineConfig(cuda_graph_bs=(1, 2)), LLAMA, CPU)
    assert settings.graph_batch_sizes == () and "cuda_graph_bs (1, 2) is not used" in notes[0]


def test_plain_decoding_of_the_same_engine_drops_every_speculative_flag() -> None:
    plain = without_speculation(EngineConfig(**HEAD, **NUMBERS, speculative_adaptive=True))
    assert resolve(plain, LLAMA, CPU)[0].spec.width == 1
