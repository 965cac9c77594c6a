"""Flags that people paste from SGLang's and vLLM's commands, and what `--help` shows first."""

import logging
import re

import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_fields
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli import serve
from overlap_spec.entrypoints.cli.flags import (
    ALIASES,
    FIRST,
    GRANTED,
    GROUPS,
    UsageError,
    engine_config,
    flag_name,
    instead_of,
    reasons,
)

STATES = "recurrent states are kept in one way, see --mamba-ssm-dtype and --max-mamba-cache-size; leave it out"


def parsed(*words: str) -> EngineConfig:
    words = ("serve", *words)
    return engine_config(cli._parser(list(words)).parse_args(list(words)))


OURS = {flag_name(field.name) for field in config_fields()} | {name for names in ALIASES.values() for name in names}
FOREIGN = [flag for flags in reasons().values() for flag in flags]


def test_every_flag_is_known_in_one_way() -> None:
    every = [*OURS, *GRANTED, *FOREIGN]
    assert sorted(every) == sorted(set(every))
    assert len(FOREIGN) > 700


def test_there_are_few_answers() -> None:
    """Besides "use X", which names what is used instead."""
    assert len([reason for reason in reasons() if not reason.startswith("use ")]) <= 11


NNODES = "only --tp-size divides an engine, among GPUs of one machine; more engines are replicas; leave it out"
EXPERTS = "--tp-size gives every GPU a part of every expert, none has experts of its own; leave it out"


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--nnodes", NNODES),
        ("--ep-size", EXPERTS),
        ("--mamba-backend", STATES),
        ("--seed", "use --random-seed"),
        ("--lora-paths", "use weights that your adapters are merged into (peft: merge_and_unload)"),
    ],
)
def test_answers_to_flags_that_many_commands_have(flag: str, answer: str) -> None:
    assert instead_of(flag) == answer


def test_every_reason_tells_what_to_do() -> None:
    ways = ("leave it out", "use ", "--", "a request chooses", "belong in")
    for reason, flags in reasons().items():
        assert any(words in reason for words in ways), (reason, flags)
        for word in re.findall(r"--[a-z-]*[a-z]", reason):
            assert word in OURS or word == "--speculative", f"{reason}: {word} is no flag of ours"


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("value", [(), ("x",)], ids=["bare", "with a value"])
@pytest.mark.parametrize("flag", FOREIGN[::23])
def test_a_foreign_flag_is_refused_by_its_name(flag: str, value: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        parsed("--dtype", "float32", flag, *value)
    assert str(caught.value) == f"{flag}: {instead_of(flag)}"
    with pytest.raises(UsageError, match=f"^{flag}: "):
        parsed(f"{flag}=x")


def test_what_is_always_so_is_granted_with_a_note() -> None:
    words = ["serve", "--enable-metrics", "--scheduling-policy", "fcfs"]
    arguments = cli._parser(words).parse_args(words)
    assert engine_config(arguments) == EngineConfig()
    assert arguments.granted == [
        "--enable-metrics changes nothing: figures are always at /metrics",
        "--scheduling-policy changes nothing: clients take turns, each one's requests in the order of arrival",
    ]
    with pytest.raises(UsageError, match="--scheduling-policy: .*give fcfs"):
        parsed("--scheduling-policy", "priority")


def test_names_of_vllm_are_understood() -> None:
    words = ["--max-model-len", "512", "--max-num-seqs", "8", "--block-size", "32", "--enforce-eager"]
    words += ["--tokenizer", "t"]
    assert parsed(*words) == EngineConfig(
        context_length=512, max_running_requests=8, page_size=32, disable_cuda_graph=True, tokenizer_path="t"
    )


def test_a_model_may_have_several_names() -> None:
    assert parsed("--served-model-name", "a", "b").served_model_name == "a,b"


def test_help_begins_with_ten_flags_and_has_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    first = text[text.index("most used:") : text.index("\nmodel:")]
    assert [name for name in FIRST if f"  {flag_name(name)} " in first] == list(FIRST)
    assert len(FIRST) == 10
    for field in config_fields():
        assert text.count(f"\n  {flag_name(field.name)}") >= 1
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(each.name for each in config_fields())
    assert text.startswith("usage: overlap-spec serve [--model PATH] [flags]\n")


def test_serve_names_its_model_before_anything_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("uvloop.run", lambda work: work.close() or 0)
    words = ["serve", "--model", "m", "--log-level-http", "error", "--enable-cache-report"]
    try:
        assert serve.run(cli._parser(words).parse_args(words)) == 0
        assert logging.getLogger(serve.ACCESS_LOG).level == logging.ERROR
    finally:
        logging.getLogger(serve.ACCESS_LOG).setLevel(logging.NOTSET)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "starting m, on 127.0.0.1 port 30000"
    assert "--enable-cache-report changes nothing: usage always counts cached tokens" in said
