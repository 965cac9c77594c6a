"""`overlap-spec bench serve`: its own flags, the traffic that they ask for, and its tables.

A table has the hardest figure first, in 80 columns. While traffic runs, one line on stderr shows how it goes; without a
terminal, a line every few seconds.
"""

import argparse
import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from overlap_spec.bench.report import write_report
from overlap_spec.bench.traffic.arrivals import (
    ANSWERS,
    PROMPTS,
    Arrival,
    Lengths,
    Poisson,
    check_body,
    conversations,
    long_prompt,
    read_arrivals,
    write_arrivals,
)
from overlap_spec.bench.traffic.processes import Running, Target
from overlap_spec.bench.traffic.rate_search import Limits
from overlap_spec.bench.traffic.runs import Clients, Search, Traffic, run_against, run_own
from overlap_spec.bench.traffic.targets import PATHS
from overlap_spec.config.fields import config_fields, config_from
from overlap_spec.config.keys import read_keys
from overlap_spec.entrypoints.cli.flags import UsageError, engine_config, flag_name
from overlap_spec.entrypoints.cli.service import served

COLUMNS = 80
EVERY_S = 5.0  # between two lines where there is no terminal
NEWEST = 1000  # first tokens that the line's percentiles are of


class LiveLine:
    """Shows the newest report. `say`: where lines go if there is no terminal."""

    def __init__(self, say: Callable[[str], object]) -> None:
        console = Console(stderr=True)
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._say = say
        self._said_at = 0.0
        self._what = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, what: str, running: Running) -> None:
        if self._live is not None:
            self._live.update(Text(line_of(what, running), no_wrap=True), refresh=True)
        elif what != self._what or time.monotonic() - self._said_at > EVERY_S:
            self._what, self._said_at = what, time.monotonic()
            self._say(line_of(what, running))


def line_of(what: str, running: Running) -> str:
    """Progress, rates, first tokens (median and 99th percentile of the newest) and the longest gap, in 80 columns."""
    seconds = max(running.elapsed_s, 1e-3)
    ended, failed = running.total("ended"), running.total("failed")
    parts = [
        f"{what} {seconds:.0f} s",
        f"{ended}/{running.planned}" + (f" ({failed} failed)" if failed else ""),
        f"{ended / seconds:.1f} req/s",
        f"{running.total('tokens') / seconds:,.0f} tok/s",
    ]
    if newest := [1000 * each for each in running.first_tokens[-NEWEST:]]:
        slow = statistics.quantiles(newest, n=100, method="inclusive")[-1] if len(newest) > 1 else newest[0]
        parts.append(f"first {statistics.median(newest):.0f}/{slow:.0f} ms")
        parts.append(f"gap {1000 * running.longest_gap:.0f}")
    return "  ".join(parts)[:COLUMNS]


VERDICTS = {True: "met", False: "missed", None: "cut off"}
WORST_FIRST = ("max", "p99", "p90", "p50")
FIGURES = {
    "first_token_ms": "first token",
    "time_per_token_ms": "time per token",
    "longest_gap_ms": "longest gap of an answer",
    "gap_ms": "gap between arrivals of tokens",
}


def print_serve(console: Console, report: dict[str, Any]) -> None:
    """For each engine the hardest figure in a sentence, then all of them, the worst first."""
    console.width = min(console.width, COLUMNS)
    limits = Limits(**report["workload"]["limits"])
    for name in ("engine", "plain", "server"):
        if name not in report:
            continue
        part = report[name]
        if "search" in part:
            _print_search(console, name, part["search"])
        else:
            _print_figures(console, name, part, limits)
    for name, ratio in report.get("ratios", {}).items():
        console.print(f"{name}: {ratio}", highlight=False)


def _print_figures(console: Console, name: str, part: dict[str, Any], limits: Limits) -> None:
    _say(console, f"{name}: {hardest(part, limits)}")
    table = Table("ms", *WORST_FIRST)
    for key, label in FIGURES.items():
        table.add_row(label, *(f"{part[key][each]:.1f}" if part[key] else "" for each in WORST_FIRST))
    console.print(table)
    _say(
        console,
        f"{part['answered']} of {part['planned']} answered, {part['cut_off']} cut off, in {part['seconds']} s:"
        f" {part['requests_per_second']} requests/s, {part['goodput']} within limits,"
        f" {part['tokens_per_second']} tok/s",
    )
    if counted := {how for how in part["counted_by"] if how != "usage"}:
        _say(console, f"tokens were counted by {' and '.join(sorted(counted))}: the server sends no running usage")
    for kind, error in part["errors"].items():
        _say(console, f"{error['count']} x {kind}: {error['first']}")
    if part["stopped_because"]:
        _say(console, f"stopped: {part['stopped_because']}")
    for figure, value in part.get("interruption", {}).items():
        _say(console, f"{figure.replace('_', ' ')}: {value}")
    client = part["client"]
    shares = ", ".join(f"{share:.0%}" for share in client["cpu_shares"])
    _say(console, f"client processes used {shares} of a processor")
    if client["may_be_the_bottleneck"]:
        _say(console, "warning: the client may be the bottleneck; give more --client-processes")


def hardest(part: dict[str, Any], limits: Limits) -> str:
    """The figure that is farthest beyond its limit, or nearest to it."""
    shares = {
        f"{label} p99 {part[key]['p99']:.1f} ms, limit {limit:g}": part[key]["p99"] / limit
        for label, key, limit in (
            ("first token", "first_token_ms", limits.first_token_ms),
            ("time per token", "time_per_token_ms", limits.tpot_ms),
        )
        if part[key]
    }
    if not shares:
        return "no answer"
    words, share = max(shares.items(), key=lambda item: item[1])
    return f"{words}: {share:.2f} of it" + (", MISSED" if share > 1 else "")


def _print_search(console: Console, name: str, search: dict[str, Any]) -> None:
    missed = f"missed at {search['missed_at']:g}" if search["missed_at"] else "never missed"
    unfinished = "" if search["complete"] else "; the search was not finished"
    _say(console, f"{name}: {search['requests_per_second']:g} requests/s within limits, {missed}{unfinished}")
    table = Table("requests/s", "", "first token p99", "per token p99", "tok/s", "client")
    for trial in search["trials"]:
        table.add_row(
            f"{trial['rate']:g}",
            VERDICTS[trial["met"]],
            *(f"{trial[key].get('p99', math.nan):.1f}" for key in ("first_token_ms", "time_per_token_ms")),
            f"{trial['tokens_per_second']:g}",
            f"{max(trial['client']['cpu_shares']):.0%}",
        )
    console.print(table)
    for kind, error in {kind: error for trial in search["trials"] for kind, error in trial["errors"].items()}.items():
        _say(console, f"{kind}: {error['first']}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


POISSON, LONG_PROMPT, CONVERSATION = "poisson", "long-prompt", "conversation"
RATE, NUM_REQUESTS, DURATION_S, LONG_TOKENS = 4.0, 100, 20.0, 7000
NUM_STREAMS = {LONG_PROMPT: 8, CONVERSATION: 1}
ANSWER = {LONG_PROMPT: 4096, CONVERSATION: 64}
CONVERSATION_PROMPT, TURN_TOKENS, NUM_TURNS = 6000, 200, 8
KEYS = ("api_key", "api_key_file")  # flags of the engine that a server elsewhere has, too
VOCAB_SIZE = 32000  # ids below it are tokens of nearly every model


@dataclass(frozen=True)
class Flag:
    """A flag that only `serve` takes. `scenarios`: those that read it; empty: all, and files."""

    metavar: str
    text: str
    kind: Callable[[str], Any] = str
    scenarios: tuple[str, ...] = ()


_LENGTHS = "mean and sigma of the logarithm, least, most; default: "
FLAGS = {
    "url": Flag("URL", "a server that runs: http, https, or the engine's ZMQ endpoint; default: an engine of its own"),
    "endpoint": Flag("NAME", "completions (/v1/completions, default) or generate (/generate)"),
    "arrivals": Flag("FILE", "send the requests of this JSON-lines file"),
    "save_arrivals": Flag("FILE", "write the requests that are sent to this file"),
    "scenario": Flag("NAME", "poisson (default), long-prompt or conversation, instead of a file"),
    "request_rate": Flag("X", f"requests a second; inf: all at once (default: {RATE:g})", float, (POISSON,)),
    "num_requests": Flag("N", f"how many (default: {NUM_REQUESTS}, or rate times duration)", int, (POISSON,)),
    "duration_s": Flag(
        "X", f"seconds of arrivals; of each rate that is tried (there: {DURATION_S:g})", float, (POISSON,)
    ),
    "prompt_lognormal": Flag("X,X,N,N", f"prompt tokens: {_LENGTHS}6.6,1,64,7500", str, (POISSON,)),
    "output_lognormal": Flag("X,X,N,N", f"answer tokens: {_LENGTHS}5,0.7,16,600", str, (POISSON,)),
    "long_tokens": Flag(
        "N",
        f"the long prompt's (default: {LONG_TOKENS}), or a conversation's first (6000)",
        int,
        (LONG_PROMPT, CONVERSATION),
    ),
    "num_streams": Flag("N", "streams (default: 8), or conversations (1)", int, (LONG_PROMPT, CONVERSATION)),
    "num_turns": Flag(
        "N", f"turns of a conversation, {TURN_TOKENS} new tokens each (default: {NUM_TURNS})", int, (CONVERSATION,)
    ),
    "output_len": Flag(
        "N", "tokens of a stream's answer at most (default: 4096), or a turn's (64)", int, (LONG_PROMPT, CONVERSATION)
    ),
    "find_rate": Flag("", "search for the highest rate within the limits, from --request-rate on", bool, (POISSON,)),
    "slo_first_token_ms": Flag("X", "limit of first tokens, for goodput and --find-rate (default: 500)", float),
    "slo_tpot_ms": Flag("X", "limit of the time per token (default: 15)", float),
    "max_concurrency": Flag("N", "requests that are open at once, at most", int),
    "client_processes": Flag("N", "processes that send requests (default: 1)", int),
    "extra_body": Flag("JSON", "fields of every body (generate: of sampling_params); default: greedy, ignore_eos"),
    "vocab_size": Flag("N", f"random prompts are of ids below it (with --url; default: {VOCAB_SIZE})", int),
    "traffic_seed": Flag("N", "of arrivals and prompts (default: 0)", int),
    "limit_s": Flag("X", "end after so many seconds, with what was measured by then", float),
}
MAY_BE_ZERO = ("traffic_seed",)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that only `bench serve` takes. None is the default of each: then it was not given."""
    group = parser.add_argument_group("serve")
    for name, flag in FLAGS.items():
        if flag.kind is bool:
            group.add_argument(flag_name(name), action="store_true", default=None, help=f"{flag.text} (serve)")
        else:
            group.add_argument(flag_name(name), metavar=flag.metavar, help=f"{flag.text} (serve)")


def check_serve_arguments(arguments: argparse.Namespace) -> None:
    """A flag that would have no effect is refused. Raises: UsageError naming it."""
    given = {name for name in FLAGS if getattr(arguments, name) is not None}
    if arguments.what != "serve":
        if given:
            raise UsageError(f"{flag_name(min(given))} goes with serve only")
        return
    if arguments.num_tokens is not None:
        raise UsageError("--num-tokens does not go with serve: give --output-len or --output-lognormal")
    if arguments.temperature:
        raise UsageError("--temperature does not go with serve: give --extra-body")
    _check_scenario(arguments, given)
    if arguments.url is None:
        if arguments.vocab_size is not None:
            raise UsageError("--vocab-size goes with --url: an engine of its own has a known one")
        return
    if arguments.endpoint is not None and not arguments.url.startswith("http"):
        raise UsageError("--endpoint goes with HTTP, not with the engine's ZMQ endpoint")
    if arguments.with_plain:
        raise UsageError("--with-plain needs an engine of its own: leave out --url")
    for field in config_fields():
        if field.name in arguments and field.name not in KEYS:
            raise UsageError(f"{flag_name(field.name)} goes with an engine of its own: leave out --url")


async def measure_serve(arguments: argparse.Namespace, say: logging.Logger) -> dict[str, Any]:
    """Run it. What was measured goes to --output after every engine."""
    traffic = traffic_of(arguments)
    if arguments.save_arrivals is not None:
        write_arrivals(arguments.save_arrivals, traffic.arrivals)
    target = target_of(arguments)
    with LiveLine(lambda line: say.info("%s", line)) as show:
        if arguments.url is not None:
            return await run_against(target, traffic, show)
        config = engine_config(arguments, log_level="warning", audit_rate=0.0)

        def save(report: dict[str, Any]) -> None:
            if arguments.output:
                write_report(arguments.output, report)

        return await run_own(config, target, traffic, ["plain"] if arguments.with_plain else [], served, show, save)


def traffic_of(arguments: argparse.Namespace) -> Traffic:
    """What the flags ask for. Raises: UsageError, ConfigError."""
    seed = _value(arguments, "traffic_seed", 0)
    clients = Clients(
        _value(arguments, "client_processes", 1),
        _value(arguments, "max_concurrency", None),
        seed,
        _value(arguments, "limit_s", None),
    )
    limits = Limits(_value(arguments, "slo_first_token_ms", 500.0), _value(arguments, "slo_tpot_ms", 15.0))
    if arguments.arrivals is not None:
        return Traffic(read_arrivals(arguments.arrivals), clients, limits)
    scenario = arguments.scenario or POISSON
    if scenario != POISSON:
        return Traffic(_streams(arguments, scenario), clients, limits)
    poisson = Poisson(
        _value(arguments, "request_rate", RATE),
        _lengths(arguments, "prompt_lognormal", PROMPTS),
        _lengths(arguments, "output_lognormal", ANSWERS),
    )
    duration_s = _value(arguments, "duration_s", None)
    if poisson.rate == math.inf and (duration_s is not None or arguments.find_rate):
        raise UsageError("--request-rate inf goes with --num-requests, not with --duration-s or --find-rate")
    if arguments.find_rate:
        search = Search(poisson, duration_s or DURATION_S)
        return Traffic(poisson.arrivals(poisson.count_for(search.duration_s), seed), clients, limits, search)
    count = _value(arguments, "num_requests", poisson.count_for(duration_s) if duration_s else NUM_REQUESTS)
    return Traffic(poisson.arrivals(count, seed), clients, limits)


def target_of(arguments: argparse.Namespace) -> Target:
    """What requests are sent to. Raises: UsageError."""
    endpoint = arguments.endpoint or "completions"
    if endpoint not in PATHS:
        raise UsageError(f"--endpoint: must be {' or '.join(PATHS)}, got {endpoint!r}")
    url = arguments.url or "http://"
    if not url.startswith(("http://", "https://", "ipc://", "tcp://")):
        raise UsageError(f"--url: must begin with http://, https://, ipc:// or tcp://, got {url!r}")
    try:
        body = msgspec.json.decode(arguments.extra_body or "{}", type=dict[str, Any])
        check_body(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"--extra-body: must be a JSON object of other fields: {error}") from None
    vocab_size = _value(arguments, "vocab_size", VOCAB_SIZE)
    key = read_keys(config_from({name: getattr(arguments, name) for name in KEYS if name in arguments})).first
    return Target(url=url, endpoint=endpoint, api_key=key, vocab_size=vocab_size, body=body)


def _check_scenario(arguments: argparse.Namespace, given: set[str]) -> None:
    """Raises: UsageError for a flag that the scenario does not read."""
    scenario = "a file" if arguments.arrivals is not None else arguments.scenario or POISSON
    if scenario == "a file" and "scenario" in given:
        raise UsageError("--scenario does not go with --arrivals: give one")
    if scenario not in ("a file", *(POISSON, LONG_PROMPT, CONVERSATION)):
        raise UsageError(f"--scenario: must be {POISSON}, {LONG_PROMPT} or {CONVERSATION}, got {scenario!r}")
    for name in FLAGS:
        allowed = FLAGS[name].scenarios
        if name in given and allowed and scenario not in allowed:
            raise UsageError(f"{flag_name(name)} goes with --scenario {' or '.join(allowed)}, not with {scenario}")
    if arguments.num_requests is not None and (arguments.duration_s is not None or arguments.find_rate):
        raise UsageError("--num-requests does not go with --duration-s or --find-rate: the rate gives the number")


def _streams(arguments: argparse.Namespace, scenario: str) -> list[Arrival]:
    num_streams = _value(arguments, "num_streams", NUM_STREAMS[scenario])
    answer = _value(arguments, "output_len", ANSWER[scenario])
    if scenario == LONG_PROMPT:
        return long_prompt(_value(arguments, "long_tokens", LONG_TOKENS), num_streams, answer)
    first = _value(arguments, "long_tokens", CONVERSATION_PROMPT)
    return conversations(num_streams, _value(arguments, "num_turns", NUM_TURNS), first, TURN_TOKENS, answer)


def _value(arguments: argparse.Namespace, name: str, default: Any) -> Any:
    """A flag's number. Raises: UsageError naming it."""
    given = getattr(arguments, name)
    if given is None:
        return default
    least = "from 0 on" if name in MAY_BE_ZERO else "above 0"
    try:
        value = FLAGS[name].kind(given)
    except ValueError:
        value = math.nan
    endless = value == math.inf and name != "request_rate"
    if not (value > 0 or (value == 0 and name in MAY_BE_ZERO)) or endless:
        kind = "an integer" if FLAGS[name].kind is int else "a number"
        raise UsageError(f"{flag_name(name)}: must be {kind} {least}, got {given!r}")
    return value


def _lengths(arguments: argparse.Namespace, name: str, default: Lengths) -> Lengths:
    given = getattr(arguments, name)
    if given is None:
        return default
    try:
        mean, sigma, least, most = given.split(",")
        lengths = Lengths(float(mean), float(sigma), int(least), int(most))
    except ValueError:
        lengths = Lengths(math.nan, 0, 0, 0)
    if not (math.isfinite(lengths.mean) and 0 <= lengths.sigma < math.inf and 1 <= lengths.least <= lengths.most):
        wanted = "mean and sigma of the logarithm, least and most tokens, such as 6.6,1,64,7500"
        raise UsageError(f"{flag_name(name)}: must be {wanted}, got {given!r}")
    return lengths
