"""`bench serve`: which flags go together, what they ask for, and what is printed in 80 columns."""

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from overlap_spec.bench.traffic.figures import Limits
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli.bench_serve import check_serve_arguments, hardest, print_serve, target_of, traffic_of
from overlap_spec.entrypoints.cli.flags import UsageError
from overlap_spec.errors import OverlapSpecError


def parsed(*words: str, what: str = "serve") -> argparse.Namespace:
    arguments: argparse.Namespace = cli._parser(["bench", what, *words]).parse_args(["bench", what, *words])
    check_serve_arguments(arguments)
    return arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--request-rate 0", "--request-rate: must be a number above 0, got '0'"),
        ("--request-rate nan", "--request-rate: must be a number above 0"),
        ("--request-rate x", "--request-rate: must be a number above 0, got 'x'"),
        ("--duration-s inf", "--duration-s: must be a number above 0, got 'inf'"),
        ("--num-requests 2.5", "--num-requests: must be an integer above 0"),
        ("--traffic-seed -1", "--traffic-seed: must be an integer from 0 on"),
        ("--client-processes 0", "--client-processes: must be an integer above 0"),
        ("--prompt-lognormal 6,1,64", "--prompt-lognormal: must be mean and sigma"),
        ("--output-lognormal 6,1,64,8", "--output-lognormal: must be mean and sigma"),
        ("--scenario chaos", "--scenario: must be poisson, long-prompt or conversation, got 'chaos'"),
        (
            "--scenario long-prompt --request-rate 4",
            "--request-rate goes with --scenario poisson, not with long-prompt",
        ),
        ("--scenario conversation --find-rate", "--find-rate goes with --scenario poisson, not with conversation"),
        ("--num-turns 4", "--num-turns goes with --scenario conversation, not with poisson"),
        ("--arrivals f --scenario poisson", "--scenario does not go with --arrivals"),
        ("--arrivals f --request-rate 4", "--request-rate goes with --scenario poisson, not with a file"),
        ("--arrivals f --find-rate", "--find-rate goes with --scenario poisson, not with a file"),
        ("--num-requests 4 --duration-s 4", "--num-requests does not go with --duration-s"),
        ("--request-rate inf --find-rate", "--request-rate inf goes with --num-requests"),
        ("--url ftp://x", "--url: must begin with http://"),
        ("--endpoint chat", "--endpoint: must be completions or generate, got 'chat'"),
        ("--extra-body [1]", "--extra-body: must be a JSON object"),
        (
            '--extra-body {"max_tokens":3}',
            "--extra-body: must be a JSON object of other fields: body: max_tokens is set",
        ),
        ("--url ipc:///x --endpoint generate", "--endpoint goes with HTTP"),
        ("--request-rate Infinity --duration-s 3", "--request-rate inf goes with --num-requests"),
        ("--url http://x --page-size 4", "--page-size goes with an engine of its own"),
        ("--url http://x --with-plain", "--with-plain needs an engine of its own"),
        ("--vocab-size 100", "--vocab-size goes with --url"),
        ("--num-tokens 7", "--num-tokens does not go with serve"),
        ("--temperature 0.5", "--temperature does not go with serve"),
    ],
)
def test_flags_that_are_wrong_or_have_no_effect(words: str, message: str) -> None:
    with pytest.raises(OverlapSpecError) as error:
        arguments = parsed(*words.split())
        target_of(arguments), traffic_of(arguments)
    assert str(error.value).startswith(message)


def test_flags_of_serve_are_refused_elsewhere() -> None:
    with pytest.raises(UsageError, match="--find-rate goes with serve only"):
        parsed("--find-rate", what="latency")


def test_what_flags_ask_for(tmp_path: Path) -> None:
    traffic = traffic_of(parsed("--request-rate", "16", "--duration-s", "20", "--slo-tpot-ms", "8", "--limit-s", "9"))
    assert len(traffic.arrivals) == 320 and traffic.limits == Limits(500.0, 8.0) and traffic.clients.limit_s == 9.0
    assert len({each.prompt_len for each in traffic.arrivals}) > 100 and traffic.search is None
    assert len(traffic_of(parsed("--request-rate", "inf", "--num-requests", "7")).arrivals) == 7
    searched = traffic_of(parsed("--find-rate", "--prompt-lognormal", "3,0,20,20")).search
    assert searched is not None and (searched.duration_s, searched.poisson.prompts.most) == (20.0, 20)
    long = traffic_of(parsed("--scenario", "long-prompt", "--num-streams", "3", "--long-tokens", "40000")).arrivals
    assert (
        [each.prompt_len for each in long] == [40000, 128, 128, 128, 40000]
        and long[1].output_len == 4096
        and long[-1].ends_run
    )
    turns = traffic_of(parsed("--scenario", "conversation", "--num-turns", "2")).arrivals
    assert [(each.prompt_len, each.output_len) for each in turns] == [(6000, 64), (6200, 64)]
    (tmp_path / "a").write_text('{"at": 1, "prompt_len": 3, "output_len": 2}')
    assert traffic_of(parsed("--arrivals", str(tmp_path / "a"))).arrivals[0].at == 1
    target = target_of(parsed("--url", "https://x/v1", "--api-key", "k", "--extra-body", '{"top_p": 0.9}'))
    assert (target.api_key, target.body, target.vocab_size, target.is_http) == ("k", {"top_p": 0.9}, 32000, True)
    assert not target_of(parsed("--url", "ipc:///x")).is_http


def test_a_server_elsewhere_is_given_the_key_of_a_file_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("me:k")
    (tmp_path / "keys").chmod(0o600)
    assert target_of(parsed("--url", "http://x", "--api-key-file", str(tmp_path / "keys"))).api_key == "k"
    monkeypatch.setenv("OVERLAP_SPEC_API_KEY", "e")
    assert target_of(parsed("--url", "http://x")).api_key == "e"


SPREAD = {"p50": 10.0, "p90": 20.0, "p99": 1234.5, "max": 123456.7}
FIGURES: dict[str, Any] = {
    "planned": 300, "sent": 300, "answered": 290, "cut_off": 1, "errors": {"HTTP 503": {"count": 9, "first": "x" * 90}},
    "seconds": 20.123, "requests_per_second": 15.123, "tokens_per_second": 2000.1, "goodput": 14.1,
    "first_token_ms": SPREAD, "time_per_token_ms": {"p50": 4.0, "p90": 5.0, "p99": 7.5, "max": 9.0}, "gap_ms": SPREAD,
    "longest_gap_ms": SPREAD, "counted_by": {"events": 290}, "stopped_because": "the time limit",
    "client": {"processes": 2, "cpu_shares": [0.3, 0.8], "may_be_the_bottleneck": True, "sent_late_ms": SPREAD},
}  # fmt: skip


def printed(report: dict[str, Any]) -> str:
    file = io.StringIO()
    print_serve(
        Console(file=file, width=140), {"workload": {"limits": {"first_token_ms": 500.0, "tpot_ms": 15.0}}} | report
    )
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return " ".join(lines)


def test_the_hardest_figure_is_named_first() -> None:
    text = printed({"server": FIGURES})
    assert text.startswith("server: first token p99 1234.5 ms, limit 500: 2.47 of it, MISSED")
    assert "290 of 300 answered, 1 cut off" in text and "9 x HTTP 503:" in text
    assert "counted by events" in text and "warning: the client may be the bottleneck" in text
    assert hardest(FIGURES, Limits(5000.0, 10.0)) == "time per token p99 7.5 ms, limit 10: 0.75 of it"
    assert hardest(FIGURES | {"first_token_ms": {}, "time_per_token_ms": {}}, Limits()) == "no answer"


def test_a_search_shows_every_rate() -> None:
    trials = [{"rate": 16.0, "met": True, **FIGURES}, {"rate": 32.0, "met": False, **FIGURES, "first_token_ms": {}}]
    trials.append(trials[0] | {"rate": 20.0, "met": None})
    search = {"requests_per_second": 16.0, "missed_at": 32.0, "complete": False, "trials": trials}
    text = printed({"engine": {"search": search}, "ratios": {"engine / plain": 1.6}})
    assert text.startswith("engine: 16 requests/s within limits, missed at 32; the search was not finished")
    assert "nan" in text and "cut off" in text and "80%" in text and text.endswith("engine / plain: 1.6")
