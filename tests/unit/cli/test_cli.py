"""The command line without an engine: flags from fields, one sentence for a mistake, nothing heavy imported."""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.config import EngineConfig, is_loopback
from overlap_spec.entrypoints.cli import COMMANDS, fill_standard_files, main
from overlap_spec.entrypoints.cli.chat import add_arguments as add_chat_arguments
from overlap_spec.entrypoints.cli.flags import Parser, UsageError, add_engine_flags, engine_config, result_file
from overlap_spec.errors import ConfigError
from overlap_spec.version import __version__


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    add_engine_flags(parser)
    namespace = parser.parse_args(list(words))
    assert isinstance(namespace, argparse.Namespace)
    return namespace


def test_without_flags_every_field_keeps_its_default() -> None:
    assert engine_config(parsed()) == EngineConfig()


def test_every_field_has_its_flag() -> None:
    parser = Parser(prog="test")
    add_engine_flags(parser)
    text = parser.format_help()
    for field in EngineConfig.__struct_fields__:
        assert f"--{field.replace('_', '-')}" in text
    assert "(default: 16)" in text
    assert "{auto,cpu,cuda}" in text


def test_flags_become_typed_fields() -> None:
    words = "--page-size 4 --mem-fraction-static 0.5 --disable-radix-cache --dtype float64 --random-seed=7"
    config = engine_config(parsed(*words.split(), "--chunked-prefill-size", "-1"))
    assert config == EngineConfig(
        page_size=4,
        mem_fraction_static=0.5,
        disable_radix_cache=True,
        dtype="float64",
        random_seed=7,
        chunked_prefill_size=-1,
    )


def test_aliases_of_other_servers_are_understood() -> None:
    config = engine_config(parsed("--model", "m", "--speculative-draft-model", "d"))
    assert (config.model_path, config.speculative_draft_model_path) == ("m", "d")


def test_text_stays_text() -> None:
    config = engine_config(parsed("--api-key", "null", "--served-model-name", "42"))
    assert (config.api_key, config.served_model_name) == ("null", "42")


def test_a_command_may_have_defaults_of_its_own() -> None:
    assert engine_config(parsed(), log_level="warning").log_level == "warning"
    assert engine_config(parsed("--log-level", "debug"), log_level="warning").log_level == "debug"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--page-size", "0"), "--page-size: must be a whole number at least 1 and at most 256, got 0"),
        (("serve", "--page-size", "x"), "--page-size: must be a whole number at least 1 and at most 256, got 'x'"),
        (("serve", "--mem-fraction-static", "nan"), "--mem-fraction-static: must be a number above 0 and below 1"),
        (("serve", "--device", "tpu"), "--device: must be one of auto, cpu, cuda, got 'tpu'"),
        (("serve", "--port", "99999"), "--port: must be a whole number at least 0 and at most 65535"),
        (("serve", "--port"), "--port: expected one argument"),
        (("serve", "--pagesize", "4"), "unknown flag --pagesize: did you mean --page-size?"),
        (("serve", "--page-siz", "4"), "unknown flag --page-siz: did you mean --page-size?"),
        (("serve", "--xyzzy=4"), "unknown flag --xyzzy"),
        (("serve", "extra"), "unknown argument 'extra'"),
        (("chat", "--temperature", "-1"), "--temperature must be a finite number >= 0, got -1.0"),
        (("chat", "--temperature", "nan"), "--temperature must be a finite number >= 0, got nan"),
        (("chat", "--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
        (("chat", "--max-tokens", "few"), "--max-tokens: invalid int value: 'few'"),
        (("chat", "--seed", str(2**64)), "--seed must be a 64-bit integer"),
        (("chat", "--skip-tokenizer-init"), "--skip-tokenizer-init: a chat needs the tokenizer"),
        (("chat", "--model", "/nowhere/at/all"), "--model-path: /nowhere/at/all does not exist"),
        (("bench", "latency", "--trace", "x"), "--trace goes with step only"),
        (("bench", "throughput", "--batch-size", "2"), "--batch-size goes with step only"),
        (("bench", "step", "--with-plain"), "--with-plain goes with latency and throughput and serve only"),
        (
            ("bench", "serve", "--prompts", "chat20"),
            "--prompts goes with latency and throughput and step and methods only",
        ),
        (("bench", "latency", "--batch-sizes", "4"), "--batch-sizes goes with throughput and methods only"),
        (("bench", "scheduler", "--num-tokens", "4"), "--num-tokens goes with latency and throughput"),
        (("bench", "latency", "--temperature", "nan"), "--temperature: must be a finite number >= 0, got nan"),
        (("bench", "latency", "--prompts", "random"), "--prompts: random is no set of prompts"),
        (("bench", "throughput", "--with-chats", "no/file"), "--with-chats: no/file is no set of prompts"),
        (("bench", "step", "--port", "1"), "--port: bench step starts no HTTP server; leave it out"),
        (("bench", "scheduler", "--page-size", "8"), "--page-size: bench scheduler times the scheduler alone"),
        (("bench", "step", "--batch-size", "0"), "--batch-size: must be at least 1, got 0"),
        (("bench", "latency", "--num-tokens", "0"), "--num-tokens: must be at least 1, got 0"),
        (("bench", "throughput", "--num-tokens", "-5"), "--num-tokens: must be at least 1, got -5"),
        (("bench", "latency", "--runs", "0"), "--runs: must be at least 1, got 0"),
        (("check", "--gpu-capability", "9.0"), "--gpu-capability goes with --gpu-memory"),
        (("check", "--gpu-memory", "much"), "--gpu-memory: expected a size such as 141GiB"),
        (("check", "--gpu-memory", "8GB", "--gpu-capability", "nine"), "--gpu-capability: expected two numbers"),
        (("check", "nowhere/at-all"), "nowhere/at-all is not on this machine; --load-format dummy"),
        (("check", "a", "--model", "b"), "MODEL and --model-path are the same"),
        (("top", "--interval", "nan"), "--interval: must be seconds, at most 86400, got nan"),
        (("fly",), "invalid choice: 'fly'"),
        ((), "the following arguments are required"),
        (("bench",), "the following arguments are required: latency|throughput|"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path))  # without the default model
    monkeypatch.setattr("signal.signal", lambda *handler: None)
    monkeypatch.setattr("overlap_spec.entrypoints.cli.bench._measure", None)  # no engine starts
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("overlap-spec: ")
    assert said in output.err
    assert output.err.count("\n") == 1


def test_a_standard_file_that_was_closed_is_opened() -> None:
    kept = os.dup(0)
    try:
        os.close(0)
        fill_standard_files()
        assert os.path.samestat(os.fstat(0), os.stat(os.devnull))
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_bad_value_of_a_parsed_field_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--context-length: must be a whole number at least 16, got 3"):
        engine_config(parsed("--context-length", "3"))


def test_flags_are_never_abbreviated() -> None:
    with pytest.raises(UsageError, match="unknown flag --model-pa"):
        parsed("--model-pa", "x")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in ((["--version"], __version__), (["--help"], "chat"), (["chat", "--help"], "--max-tokens")):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        assert expected in capsys.readouterr().out


def test_chats_own_flags_do_not_hide_the_engines() -> None:
    parser = Parser(prog="chat")
    add_chat_arguments(parser)
    namespace: Any = parser.parse_args(["Why?", "--system", "Be brief", "--max-tokens", "5", "--page-size", "8"])
    assert (namespace.prompt, namespace.system, namespace.max_tokens) == ("Why?", "Be brief", 5)
    assert engine_config(namespace).page_size == 8


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "scheduler", "--output"],
        ["bench", "step", "--trace"],
        ["bench", "serve", "--output"],
        ["verify", "--output"],
    ],
)
def test_a_result_that_cannot_be_written_is_refused_before_the_run(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        assert main([*words, str(path)]) == 2
        assert f"argument {words[-1]}: no file can be written at '{path}'" in capsys.readouterr().err
    for path in (tmp_path / "file", tmp_path / "new" / "folder" / "x.json"):
        assert result_file(str(path)) == str(path)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *[(host, True) for host in ("127.0.0.1", "localhost", "LOCALHOST", "::1", "[::1]", "127.9.9.9", "127.1")],
        *[(host, False) for host in ("0.0.0.0", "::", "", "10.0.0.1", "no name")],
    ],
)
def test_loopback_is_recognised(host: str, local: bool) -> None:
    """A name may be one of the loopback: on Debian that of the machine itself is 127.0.1.1."""
    assert is_loopback(host) is local


def test_the_command_line_imports_nothing_heavy(tmp_path: Path) -> None:
    """Told with the modules that were imported by then."""
    modules = ["overlap_spec", "overlap_spec.entrypoints.cli", *(command.module for command in COMMANDS.values())]
    heavy = {"torch", "numpy", "transformers", "huggingface_hub", "gguf"}
    code = f"""
import importlib, sys
sys.path[:] = {sys.path!r}
for module in {modules!r}:
    importlib.import_module(module)
    print(module, *sorted({heavy!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == modules, done.stdout


def test_public_names_load_when_they_are_used() -> None:
    import overlap_spec

    for name in overlap_spec.__all__:
        assert getattr(overlap_spec, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = overlap_spec.Nothing


def test_the_version_is_the_packages() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert pyproject["project"]["version"] == __version__
