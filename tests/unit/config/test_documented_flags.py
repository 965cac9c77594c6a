"""SGLang's flags: honoured, or refused with a sentence that names the flag and says what to do instead."""

from typing import Any

import msgspec
import pytest

from overlap_spec.config import (
    NGRAM,
    AttentionSettings,
    EngineConfig,
    Machine,
    ModelFiles,
    Settings,
    decode_settings,
    encode_settings,
    forces_greedy_verify,
)
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli.flags import UsageError, engine_config
from overlap_spec.errors import ConfigError

CPU = Machine(num_cores=2, has_cuda=False)
GPU = Machine(num_cores=16, has_cuda=True)
FILES = ModelFiles(
    weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
    preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip
REFUSED = (  # of SGLang's page on speculative decoding
    *("--ep-size", "--speculative-enable-w4a4-mxfp4-megamoe"),
    *("--prefill-attention-backend", "--decode-attention-backend"),
    *("--enable-dp-attention", "--speculative-skip-dp-mlp-sync"),
)
PLAIN = {"speculative_algorithm": "NONE"}


def settle(machine: Machine = GPU, **asked: Any) -> tuple[Settings, list[str]]:
    return resolve(EngineConfig(**asked), FILES, machine)


def said(words: str, machine: Machine = GPU, **asked: Any) -> bool:
    """Whether a log line at the start says so."""
    return any(words in note for note in settle(machine, **asked)[1])


def info(machine: Machine = GPU, **asked: Any) -> dict[str, Any]:
    return settled_flags(EngineConfig(**asked), settle(machine, **asked)[0])


def parsed(*words: str) -> EngineConfig:
    words = ("serve", *words)
    return engine_config(cli._parser(list(words)).parse_args(list(words)))


@pytest.mark.parametrize("flag", REFUSED)
@pytest.mark.parametrize("value", [(), ("fp8",)], ids=["bare", "with a value"])
def test_what_cannot_be_honoured_is_refused_by_its_name(flag: str, value: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: .*(leave it out|use --)"):
        parsed(flag, *value, "--dtype", "float32")


def test_refused_flags_stay_out_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--speculative-draft-window-size" in shown and "--ep-size" not in shown


@pytest.mark.parametrize("flag", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_ranks_by_any_name(flag: str) -> None:
    assert resolve(parsed(flag, "2"), FILES, msgspec.structs.replace(GPU, num_gpus=2))[0].ranks == 2


def test_ranks_do_not_compile_by_torch() -> None:
    machine = msgspec.structs.replace(GPU, num_gpus=2)
    with pytest.raises(ConfigError, match="--enable-torch-compile: has not been tried with several ranks"):
        resolve(parsed("--enable-torch-compile", "--tp", "2"), FILES, machine)


def test_the_share_of_memory_has_an_older_name() -> None:
    assert parsed("--mem-fraction", "0.6").mem_fraction_static == 0.6
    assert said("mem_fraction_static 0.6 is not used", CPU, mem_fraction_static=0.6)
    assert not said("mem_fraction", GPU, mem_fraction_static=0.6)


def test_remote_code_is_never_needed() -> None:
    assert said("no remote code is ever needed or run", trust_remote_code=True)


@pytest.mark.parametrize(
    ("machine", "asked", "settled"),
    [
        (GPU, {}, AttentionSettings()),
        (GPU, {"attention_backend": "triton"}, AttentionSettings()),
        (GPU, {"attention_backend": "torch"}, AttentionSettings(target_torch=True, draft_torch=True)),
        (
            GPU,
            {"attention_backend": "torch", "speculative_draft_attention_backend": "auto"},
            AttentionSettings(target_torch=True),
        ),
        (GPU, {"speculative_draft_attention_backend": "torch"}, AttentionSettings(draft_torch=True)),
        (GPU, {"speculative_attention_mode": "prefill"}, AttentionSettings(prefill_kernel=True)),
        (GPU, {"speculative_attention_mode": "decode"}, AttentionSettings()),
        (GPU, {"speculative_draft_window_size": 64}, AttentionSettings(draft_window=64)),
        (CPU, {"attention_backend": "torch", "speculative_attention_mode": "prefill"}, AttentionSettings()),
    ],
)
def test_what_runs_attention(machine: Machine, asked: dict[str, Any], settled: AttentionSettings) -> None:
    settings, _ = settle(machine, **asked)
    assert settings.attention == settled
    assert decode_settings(encode_settings(settings)) == settings


@pytest.mark.parametrize("asked", ["attention_backend", "speculative_draft_attention_backend"])
def test_torch_attention_runs_without_graphs(asked: str) -> None:
    assert settle(**{asked: "torch"})[0].graph_batch_sizes == ()
    assert said("cannot be captured", **{asked: "torch"})


@pytest.mark.parametrize(
    ("field", "words", "machine", "asked"),
    [
        ("attention_backend", "no other library is needed", GPU, {"attention_backend": "fa3"}),
        ("attention_backend", "no other library is needed", CPU, {"attention_backend": "torch_native"}),
        ("attention_backend", "use auto or torch", CPU, {"attention_backend": "triton"}),
        (
            "speculative_draft_attention_backend",
            "no other library is needed",
            GPU,
            {"speculative_draft_attention_backend": "flashinfer"},
        ),
        (
            "speculative_draft_attention_backend",
            "use auto or torch",
            CPU,
            {"speculative_draft_attention_backend": "triton"},
        ),
        (
            "cuda_graph_max_bs",
            "use --attention-backend auto",
            GPU,
            {"attention_backend": "torch", "cuda_graph_max_bs": 4},
        ),
        (
            "enable_torch_compile",
            "use --attention-backend auto",
            GPU,
            {"attention_backend": "torch", "enable_torch_compile": True},
        ),
        ("enable_torch_compile", "leave it out", CPU, {"enable_torch_compile": True}),
        ("moe_runner_backend", "no other library is needed", GPU, {"moe_runner_backend": "flashinfer_cutlass"}),
        ("moe_runner_backend", "use auto$", CPU, {"moe_runner_backend": "triton"}),
        ("speculative_moe_runner_backend", "got 'none'", GPU, {"speculative_moe_runner_backend": "none"}),
        ("speculative_moe_runner_backend", "use auto$", CPU, {"speculative_moe_runner_backend": "triton"}),
        ("moe_a2a_backend", "got 'deepep'.*use none", GPU, {"moe_a2a_backend": "deepep"}),
        ("speculative_moe_a2a_backend", "got 'mooncake'.*use none", CPU, {"speculative_moe_a2a_backend": "mooncake"}),
        *(
            (field, "leave it out", GPU, {field: value, "speculative_algorithm": NGRAM})
            for field, value in {
                "speculative_moe_runner_backend": "auto",
                "speculative_moe_a2a_backend": "none",
            }.items()
        ),
        *(
            (field, "leave it out", GPU, {field: value, **PLAIN})
            for field, value in {
                "speculative_attention_mode": "prefill",
                "speculative_draft_attention_backend": "torch",
                "speculative_draft_window_size": 8,
                "speculative_moe_runner_backend": "auto",
                "speculative_moe_a2a_backend": "none",
                "speculative_draft_model_revision": "v1",
                "speculative_draft_model_quantization": "unquant",
            }.items()
        ),
    ],
)
def test_what_is_refused_and_what_to_do_instead(
    field: str, words: str, machine: Machine, asked: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: .*{words}") as caught:
        settle(machine, **asked)
    assert caught.value.field == field


@pytest.mark.parametrize(("machine", "runner"), [(CPU, "torch"), (GPU, "triton")])
def test_what_multiplies_by_experts(machine: Machine, runner: str) -> None:
    for asked in ("auto", "triton") if machine is GPU else ("auto",):
        fields = ("moe_runner_backend", "speculative_moe_runner_backend")
        told = info(machine, **dict.fromkeys(fields, asked), moe_a2a_backend="none", speculative_moe_a2a_backend="none")
        assert [told[field] for field in fields] == [runner, runner]
        assert (told["moe_a2a_backend"], told["speculative_moe_a2a_backend"]) == ("none", "none")
    assert info(machine, **PLAIN)["speculative_moe_runner_backend"] is None


def test_a_plain_target_has_no_draft_to_say_anything_of() -> None:
    plain = ModelFiles(
        weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128
    )
    for field, value in {"speculative_draft_window_size": 8, "speculative_draft_model_revision": "v1"}.items():
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: has no effect without speculation"):
            resolve(EngineConfig(**{field: value}), plain, CPU)


@pytest.mark.parametrize("asked", ["unquant", "fp8", None])
def test_a_draft_has_a_format_of_its_own(asked: str | None) -> None:
    assert info(speculative_draft_model_quantization=asked)["speculative_draft_model_quantization"] == asked


def test_server_info_says_what_is_in_force() -> None:
    mixed = info(attention_backend="torch", speculative_draft_attention_backend="triton")
    assert (mixed["attention_backend"], mixed["speculative_draft_attention_backend"]) == ("torch", "triton")
    assert mixed["speculative_attention_mode"] == "prefill", "torch attends in one way"
    assert info()["speculative_attention_mode"] == "decode"
    assert info(CPU)["attention_backend"] == "torch"
    assert info(**PLAIN)["speculative_draft_attention_backend"] is None


def test_where_the_numbers_come_from_is_said() -> None:
    given = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    assert info()["speculative_numbers_from"] == "the default of this alias"
    assert info(speculative_algorithm="EAGLE3", **given)["speculative_numbers_from"] == "given"
    assert info(**PLAIN)["speculative_numbers_from"] is None
    assert said("(3, 1, 4): the default of this alias")
    assert not said("(2, 1, 3)", speculative_algorithm="EAGLE3", **given)


@pytest.mark.parametrize(
    ("value", "forced"), [("1", True), ("True", True), ("0", False), ("false", False), ("", False)]
)
def test_the_environment_may_force_greedy_verification(
    value: str, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", value)
    assert forces_greedy_verify() == forced
    monkeypatch.delenv("SGLANG_NGRAM_FORCE_GREEDY_VERIFY")
    assert not forces_greedy_verify()


def test_it_is_of_ngram_alone_and_said_to_be_lossy() -> None:
    forcing = Machine(num_cores=2, has_cuda=False, forces_greedy_verify=True)
    assert not settle(forcing)[0].spec.accept.ngram_force_greedy_verify
    accept = settle(forcing, speculative_algorithm=NGRAM)[0].spec.accept
    assert accept.ngram_force_greedy_verify and "LOSSY at temperature > 0" in str(accept)
    told = info(forcing, speculative_algorithm=NGRAM)
    assert told["ngram_force_greedy_verify"] is True and "LOSSY" in told["verification"]
    assert not settle(CPU, speculative_algorithm=NGRAM)[0].spec.accept.ngram_force_greedy_verify
