"""Whole runs of `bench serve`: against a server that runs already, or an engine of its own beside plain decoding.

An engine of its own is served over HTTP by this process, as `overlap-spec serve` does; clients are other processes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from msgspec.structs import replace

from overlap_spec.bench.report import Serve, acceptance_of, describe_engine, describe_run, describe_settings, variants
from overlap_spec.bench.traffic.arrivals import Arrival, Poisson
from overlap_spec.bench.traffic.processes import Load, Played, Running, Target, play_load
from overlap_spec.bench.traffic.rate_search import Limits, RateSearch
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError

NUM_WARM_UPS, WARM_UP_TOKENS, WARM_UP_SEED = 8, 32, 1 << 20
SETTLE_S = 0.5  # after requests were left
LATE_SHARE = 0.01  # of answers may be late where the 99th percentile is to be met
ASK_S = 10.0
OVER = "the time limit"

Json = dict[str, Any]
Show = Callable[[str, Running], None]  # what runs, and how far it is


@dataclass(frozen=True)
class Clients:
    """How requests are sent, and for how long at most."""

    num_processes: int = 1
    max_concurrency: int | None = None
    seed: int = 0
    limit_s: float | None = None


@dataclass(frozen=True)
class Search:
    """A search for the highest rate: each one is tried for `duration_s`. `precision`, `growth`: see `RateSearch`."""

    poisson: Poisson
    duration_s: float
    precision: float = 0.08
    growth: float = 2.0


@dataclass(frozen=True)
class Traffic:
    """What a run sends, how, and what is promised: `arrivals` once, or those of `search` at many rates."""

    arrivals: Sequence[Arrival]
    clients: Clients
    limits: Limits
    search: Search | None = None

    def describe(self) -> Json:
        """The fields of a report."""
        prompts = [each.prompt_len or len(each.prompt or "") for each in self.arrivals]
        sent = {
            "requests": len(self.arrivals),
            "prompt_tokens": sum(prompts),
            "longest_prompt": max(prompts),
            "output_tokens": sum(each.output_len for each in self.arrivals),
        }
        searched = {} if self.search is None else {"search": asdict(self.search)}
        return {**sent, "clients": asdict(self.clients), "limits": asdict(self.limits), **searched}


class Measurement:
    """Plays traffic against one target, within the time limit of the whole run."""

    def __init__(self, target: Target, traffic: Traffic, show: Show, ends_at: float) -> None:
        self._target = target
        self._traffic = traffic
        self._show = show
        self._ends_at = ends_at
        self._num_played = 0

    async def figures(self) -> Json:
        """Warm up, then measure."""
        few = [
            Arrival(at=0.0, prompt=each.prompt, prompt_len=each.prompt_len, output_len=WARM_UP_TOKENS, body=each.body)
            for each in self._traffic.arrivals[:NUM_WARM_UPS]
        ]
        warm_up = await self._play("warm-up", few, WARM_UP_SEED)
        if errors := self._figures_of(warm_up)["errors"]:
            kind, found = next(iter(errors.items()))
            raise OverlapSpecError(f"{self._target.url} does not answer the first requests: {kind} {found['first']}")
        if self._traffic.search is not None:
            return await self._search(self._traffic.search)
        played = await self._play("measuring", self._traffic.arrivals, self._traffic.clients.seed)
        return self._figures_of(played)

    def _figures_of(self, played: Played) -> Json:
        from overlap_spec.bench.traffic.figures import figures_of  # numpy, which no command line waits for

        return figures_of(played, self._traffic.limits)

    async def _search(self, search: Search) -> Json:
        rates = RateSearch(search.poisson.rate, search.precision, search.growth)
        return {"search": await rates.run(self._try, lambda: time.monotonic() < self._ends_at)}

    async def _try(self, rate: float) -> tuple[bool | None, Json]:
        assert self._traffic.search is not None
        poisson = Poisson(rate, self._traffic.search.poisson.prompts, self._traffic.search.poisson.answers)
        seed = self._traffic.clients.seed
        arrivals = poisson.arrivals(poisson.count_for(self._traffic.search.duration_s), seed)
        self._num_played += 1  # prompts that no trial before has sent
        played = await self._play(f"{rate:g} requests/s", arrivals, seed + self._num_played, is_trial=True)
        figures = self._figures_of(played)
        return None if played.stopped_because == OVER else self._traffic.limits.are_met(figures), figures

    async def _play(self, what: str, arrivals: Sequence[Arrival], seed: int, is_trial: bool = False) -> Played:
        clients = self._traffic.clients
        slow_s = self._traffic.limits.first_token_ms / 1000 if is_trial else None
        load = Load(self._target, arrivals, clients.num_processes, seed, clients.max_concurrency, slow_s)

        def watch(running: Running) -> str:
            self._show(what, running)
            if time.monotonic() >= self._ends_at:
                return OVER
            return _why_missed(running) if is_trial else ""

        played = await play_load(load, watch)
        if played.stopped_because:
            await asyncio.sleep(SETTLE_S)
        return played


async def run_against(target: Target, traffic: Traffic, show: Show) -> Json:
    """Measure a server that runs. Raises: OverlapSpecError if it does not answer."""
    ends_at = _ends_at(traffic)
    if target.is_http and target.endpoint == "completions":
        target = replace(target, model=await asyncio.to_thread(_model_name, target))
    figures = await Measurement(target, traffic, show, ends_at).figures()
    return {
        "benchmark": "serve",
        "run": describe_run("not known: a server elsewhere", 0),
        "workload": traffic.describe(),
        "server": {"url": target.url, "endpoint": target.endpoint, "model": target.model, **figures},
    }


async def run_own(
    config: EngineConfig,
    target: Target,
    traffic: Traffic,
    compared: Sequence[str],
    serve: Serve,
    show: Show,
    save: Callable[[Json], None],
) -> Json:
    """Measure an engine and those of `compared` (`variants`), one after another. `save` gets every partial report.

    `target.url` is set here. Raises: OverlapSpecError.
    """
    ends_at = _ends_at(traffic)
    report: Json = {"benchmark": "serve", "workload": traffic.describe()}
    for name, asked in variants(config, compared).items():
        async with Engine(asked) as engine, serve(engine) as (host, port):
            if "run" not in report:
                report |= {"run": describe_engine(engine), "acceptance": acceptance_of(engine)}
            vocab_size = engine.settings.model.files.vocab_size
            own = replace(target, url=f"http://{host}:{port}", vocab_size=vocab_size)
            figures = await Measurement(own, traffic, _named(show, name if compared else ""), ends_at).figures()
            facts = {"settings": describe_settings(engine), "facts": engine.facts.report()}
            report[name] = {"endpoint": target.endpoint, **facts, **figures}
            save(report)
    if compared:
        report["ratios"] = {f"engine / {name}": _ratio(report["engine"], report[name]) for name in compared}
    return report


def _ratio(engine: Json, other: Json) -> float | None:
    """Of the rates that were found, or of tokens per second."""
    if "search" in engine:
        engine, other, name = engine["search"], other["search"], "requests_per_second"
    else:
        name = "tokens_per_second"
    return round(engine[name] / other[name], 3) if other[name] else None


def _why_missed(running: Running) -> str:
    """Why a trial cannot meet its limits any more; empty if it can."""
    if running.total("failed"):
        return "a request has failed"
    late = running.total("num_slow")
    return f"{late} first tokens are late" if late > LATE_SHARE * running.planned + 1 else ""


def _named(show: Show, name: str) -> Show:
    return (lambda what, running: show(f"{name}: {what}", running)) if name else show


def _ends_at(traffic: Traffic) -> float:
    limit = traffic.clients.limit_s
    return time.monotonic() + limit if limit is not None else float("inf")


def _model_name(target: Target) -> str:
    """The first model that the server lists. Raises: OverlapSpecError."""
    url = f"{target.url.rstrip('/').removesuffix('/v1')}/v1/models"
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=ASK_S)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise OverlapSpecError(f"{url} lists no model: {error}") from None
