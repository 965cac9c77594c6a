"""Values of a config.json that cannot be right: refused by name, before anything is allocated by them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny.models import tiny_config, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.config import EngineConfig, ModelFiles, SpecSettings
from overlap_spec.entrypoints.cli import main
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import resolve_drafting, resolve_model
from overlap_spec.hub.config_values import check_values
from overlap_spec.models.loading.loader import read_target_config
from overlap_spec.models.targets.llama import LlamaConfig

NAN, INF = float("nan"), float("inf")
THETA = "rope_theta must be a finite number above 1, or a list of such"

WRONG = [
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number up to 1, found -1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number up to 1, found 0.0"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive number up to 1, found nan"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number up to 1, found '1e-5'"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number up to 1, found True"),
    ({"rope_theta": -1}, f"{THETA}, found -1"),
    ({"rope_theta": INF}, f"{THETA}, found inf"),
    ({"rope_parameters": {"rope_theta": -1.0}}, f"{THETA}, found -1.0"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, f"{THETA}, found 0"),
    ({"rope_scaling": 5}, "rope_scaling must be null or an object, found 5"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be a positive, finite number, found 0"),
    ({"head_dim": 10**9}, "head_dim must be an even integer from 2 to 4096, found 1000000000"),
    ({"head_dim": 15}, "head_dim must be an even integer from 2 to 4096, found 15"),
    ({"head_dim": None, "hidden_size": 60, "num_attention_heads": 4}, "head_dim, which is hidden_size 60 / .* even"),
    ({"hidden_size": 10**9}, "hidden_size must be an integer from 1 to 1048576, found 1000000000"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to 4096, found 1000000"),
    ({"num_attention_heads": True}, "num_attention_heads must be an integer from 1 to 4096, found True"),
    ({"vocab_size": 10**12}, "vocab_size must be an integer from 1 to 16777216"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings must be an integer from 1 to 16777216"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, found 'no'"),
    ({"attention_bias": 1}, "attention_bias must be true or false, found 1"),
    ({"rope_theta": []}, rf"{THETA}, found \[\]"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type must be a name, found \['yarn'\]"),
    ({"rope_scaling": {"type": "yarn", "mscale": "x"}}, "mscale must be a finite number from 0, found 'x'"),
    ({"routed_scaling_factor": INF}, "routed_scaling_factor must be a positive, finite number, found inf"),
    ({"norm_topk_prob": "no"}, "norm_topk_prob must be true or false, found 'no'"),
    ({"num_experts": 10**9}, "num_experts must be an integer from 0 to 16384, found 1000000000"),
    ({"kv_lora_rank": 10**9}, "kv_lora_rank must be an integer from 0 to 1048576, found 1000000000"),
    ({"yarn_only_types": NAN}, "yarn_only_types must be a list of names, found nan"),
    ({"dflash_config": "x"}, "dflash_config must be null or an object, found 'x'"),
    ({"eagle_config": {"use_aux_hidden_state": 1}}, "use_aux_hidden_state must be true or false, found 1"),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": True}},
        "eagle_aux_hidden_state_layer_ids must be a list of integers, found True",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
]


def model_directory(path: Path, **changes: Any) -> Path:
    write_checkpoint(path, tiny_target(1))
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return write_tokenizer(path)


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_a_value_that_cannot_be_right_names_file_key_value_and_what_would_be_right(
    changes: dict[str, Any], message: str
) -> None:
    config = tiny_config() | changes
    with pytest.raises(CheckpointError, match=rf"^some/config\.json: {message}"):
        check_values(config, "some/config.json")
    files = ModelFiles(
        weights="/nowhere", config=config, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128
    )  # the worker checks too, before it reads a weight
    with pytest.raises(CheckpointError, match=message):
        read_target_config(files)


def test_every_value_of_an_ordinary_config_passes_and_nulls_are_left_to_their_readers() -> None:
    check_values(tiny_config(), "config.json")
    check_values(dict.fromkeys(tiny_config()), "config.json")


@pytest.mark.parametrize(
    "nulls", [("rms_norm_eps",), ("rope_theta", "rope_parameters"), ("max_window_layers", "layer_types")], ids=str
)
def test_a_null_is_what_a_config_without_the_key_has(nulls: tuple[str, ...]) -> None:
    config = tiny_config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8)
    without = {key: value for key, value in config.items() if key not in nulls}
    found, expected = (LlamaConfig.from_hf(each, "config.json") for each in (config | dict.fromkeys(nulls), without))
    assert found == expected


def test_serve_ends_with_status_2_before_a_process_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = model_directory(tmp_path, rms_norm_eps=-1)
    assert main(["serve", "--model", str(directory), "--port", "0", "--log-level", "error"]) == 2
    said = capsys.readouterr().err
    assert f"--model-path: {directory}/config.json: rms_norm_eps must be a positive number up to 1, found -1" in said


def test_a_drafts_config_is_checked_with_the_targets(tmp_path: Path) -> None:
    model, head = model_directory(tmp_path / "model"), tmp_path / "head"
    write_checkpoint(head, tiny_eagle3(1, tiny_target(1)))
    config = head / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_output": "no"}))
    files = resolve_model(EngineConfig(model_path=str(model)))
    spec = SpecSettings(method="EAGLE3", draft_path=str(head), num_steps=3, topk=1, width=4)
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-path: .*norm_output must be true or false"):
        resolve_drafting(spec, files, EngineConfig())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (list(range(100)), r"eos_token_id must be at most 64 token ids, found 100"),
        ([2, 128], r"eos_token_id must be token ids from 0 to 127, found 128"),
        ([True], r"eos_token_id must be token ids from 0 to 127, found True"),
        ([[2]], r"eos_token_id must be token ids from 0 to 127, found \[2\]"),
    ],
)
def test_end_tokens_that_no_request_could_be_run_with_are_refused_at_the_start(
    ids: list[Any], message: str, tmp_path: Path
) -> None:
    directory = model_directory(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ConfigError, match=f"--model-path: .*{message}"):
        resolve_model(EngineConfig(model_path=str(directory)))


def test_so_many_end_tokens_as_a_row_holds_are_taken(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(64))}))
    assert len(resolve_model(EngineConfig(model_path=str(directory))).eos_token_ids) == 64
