"""What real traffic should reach on one H200, and how each figure is read from the result files.

A goal takes the worst of its cells (batch sizes, samplings), so a part that was not measured cannot hide behind one
that was: `Measured.values` are counted against `Goal.cells`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Report = Mapping[str, Any]
Reports = Mapping[str, Report]  # by file name
Load = tuple[Any, ...]
Pick = Callable[[Report], Iterable[float]]
PickLoads = Callable[[Report], Mapping[Load, float]]

CHAIN, PLAIN = "chain", "plain"
GAP, RATIO = "longest_gap_ms", "first_token_ratio"
NUM_LOADS = 60  # 8B at two accept lengths, SmolLM2 with four methods on two sets of prompts; six batch sizes each
PERCENT = "{:.1%}"


@dataclass(frozen=True)
class Measured:
    """The cells of a goal. `files`: the result files that have them."""

    files: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Goal:
    """One figure, the worst of `cells`. `before`: the figure before the work on it. `must`, `aim`: its limits.

    `pick` finds the cells in a report of `benchmark`.
    """

    row: int
    work: str
    before: str
    must: float
    aim: float | None
    benchmark: str
    pick: Pick
    cells: int = 1
    more_is_better: bool = False
    style: str = "{:.4g}"

    def measured(self, reports: Reports) -> Measured | None:
        """From the newest report that has all of it, else from the newest that has any; None if none has."""
        found = [
            Measured((name,), values) for name, report in self._own(reports) if (values := tuple(self.pick(report)))
        ]
        return next((each for each in found if len(each.values) >= self.cells), found[0] if found else None)

    def _own(self, reports: Reports) -> list[tuple[str, Report]]:
        """Those of its benchmark, newest first."""
        own = [(name, report) for name, report in reports.items() if report["benchmark"] == self.benchmark]
        return sorted(own, key=lambda named: str(named[1]["run"]["when"]), reverse=True)

    def worst(self, values: Iterable[float]) -> float:
        """The cell that decides."""
        return min(values) if self.more_is_better else max(values)

    def meets(self, value: float, limit: float) -> bool:
        """Whether a figure is within a limit."""
        return value >= limit if self.more_is_better else value <= limit

    def verdict(self, values: tuple[float, ...]) -> str:
        """For a table. A goal is met once all of its cells were measured."""
        worst = self.worst(values)
        if not self.meets(worst, self.must):
            return "**missed**"
        word = "met, and the aim" if self.aim is not None and self.meets(worst, self.aim) else "met"
        return word if len(values) >= self.cells else f"{word}, as far as measured"


@dataclass(frozen=True)
class GoalOfLoads(Goal):
    """A goal whose cells may be in several reports, each of which has some loads: of each load the newest counts."""

    pick_loads: PickLoads = field(kw_only=True)

    def measured(self, reports: Reports) -> Measured | None:
        """From all reports that have the newest figure of some load; None if there are none."""
        newest: dict[Load, tuple[str, float]] = {}
        for name, report in self._own(reports):
            newest = {load: (name, value) for load, value in self.pick_loads(report).items()} | newest
        files = tuple(dict.fromkeys(name for name, _ in newest.values()))
        return Measured(files, tuple(value for _, value in newest.values())) if newest else None


def _own(row: int, part: str, work: str, before: str, must: float, aim: float | None, **more: Any) -> Goal:
    """A goal that `benchmarks/real_traffic.py` measures. `part`: the name of its cells within the row."""

    def pick(report: Report) -> list[float]:
        return [each["value"] for each in report["cells"] if (each["row"], each["part"]) == (row, part)]

    return Goal(row, work, before, must, aim, "real_traffic", pick, **more)


def _interruption(field: str, length: int) -> Pick:
    return lambda report: [
        row["interruption"][field]
        for row in report["rows"]
        if row["engine"] == CHAIN and row.get("long_prompt") == length and row.get("interruption")
    ]


def _poisson(field: str, share: str) -> Pick:
    return lambda report: [
        row[field][share] for row in report["rows"] if row["engine"] == CHAIN and row["part"] == "poisson"
    ]


def _rate(report: Report) -> list[float]:
    return [report["rate_over_plain"]] if "rate_over_plain" in report else []


def _width_loads(report: Report) -> Iterator[tuple[Load, dict[str, float]]]:
    """tok/s of each policy, for every load."""
    loads: dict[Load, dict[str, float]] = {}
    for row in report["rows"]:
        loads.setdefault((row["case"], row["prompts"], row["batch"]), {})[row["policy"]] = row["tokens_per_second"]
    yield from loads.items()


def _over_plain(report: Report) -> dict[Load, float]:
    return {load: speeds["adaptive"] / speeds[PLAIN] for load, speeds in _width_loads(report)}


def _regret(report: Report) -> dict[Load, float]:
    """How much slower than the better of the fixed width and plain decoding."""
    return {load: 1 - speeds["adaptive"] / max(speeds["fixed"], speeds[PLAIN]) for load, speeds in _width_loads(report)}


def _scheduler(report: Report) -> list[float]:
    return [row["mean_ms"] for row in report["batches"] if row["batch"] == 256]


def _widths(row: int, work: str, before: str, must: float, aim: float, pick: PickLoads, **more: Any) -> Goal:
    return GoalOfLoads(
        *(row, work, before, must, aim, "width_policy"),
        pick=lambda report: pick(report).values(),
        pick_loads=pick,
        cells=NUM_LOADS,
        **more,
    )


def _crowd(part: str, work: str, count: int, before: str, must: float, aim: float | None, more: bool) -> Goal:
    work = f"SmolLM2, {count} SSE connections, {work}"
    return _own(11, f"{count} {part}", work, before, must, aim, more_is_better=more)


def _efficiency(size: str, way: str, must: float, aim: float) -> Goal:
    work = f"Llama-3.2-{size} shape, {way}: step efficiency"
    return _own(12, f"{size} {way}", work, "", must, aim, more_is_better=True, style=PERCENT)


GOALS: tuple[Goal, ...] = (
    _own(1, "plain", "plain, sampled step / greedy step", "1.13-2.9", 1.06, 1.03, cells=12),
    _own(1, "chain", "chain, sampled step / greedy step", "1.13-2.9", 1.06, 1.03, cells=12),
    _own(2, "8k", "first token of 8k random tokens, ms", "250", 215, 200),
    _own(2, "32k", "first token of 32k random tokens, ms", "1,710", 1250, 1150),
    _own(2, "100k", "first token of 100k random tokens, ms", "11,700", 7200, 6400, style="{:,.0f}"),
    Goal(3, "longest gap of 8 streams, a 16k prompt arrives, ms", "350", 40, 20, "traffic", _interruption(GAP, 16_000)),
    Goal(3, "longest gap of 8 streams, a 40k prompt arrives, ms", "658", 40, 20, "traffic", _interruption(GAP, 40_000)),
    Goal(3, "first token of that 16k prompt / alone", "1.0", 1.25, 1.15, "traffic", _interruption(RATIO, 16_000)),
    Goal(3, "first token of that 40k prompt / alone", "1.0", 1.25, 1.15, "traffic", _interruption(RATIO, 40_000)),
    Goal(4, "Poisson, 16 a second: first token p99, ms", "343", 250, 150, "traffic", _poisson("first_token_ms", "p99")),
    Goal(4, "time per token p99, ms", "22.5", 10, 7, "traffic", _poisson("time_per_token_ms", "p99")),
    Goal(4, "longest gap, ms", "255", 60, 30, "traffic", _poisson(GAP, "max")),
    Goal(5, "requests a second within limits / plain decoding", "", 1.5, 1.8, "traffic", _rate, more_is_better=True),
    _own(6, "8k", "chain step at context 8k, ms", "5.49", 5.0, 4.85),
    _own(6, "32k", "chain step at context 32k, ms", "6.64", 5.9, 5.7),
    _own(6, "100k", "chain step at context 100k, ms", "9.36", 8.4, 8.0),
    _own(7, "turn", "turn of a conversation, 8k cached and 200 new tokens: first token, ms", "24", 12, 8),
    _widths(8, "adaptive tok/s / plain", "0.77-0.86", 0.98, 1.0, _over_plain, more_is_better=True),
    _widths(9, "adaptive tok/s below the better of fixed width and plain", "10%", 0.04, 0.02, _regret, style=PERCENT),
    _own(10, "plain", "SmolLM2, batch 256, plain step, ms", "1.89", 1.2, 1.0),
    _own(10, "chain", "SmolLM2, batch 256, chain step, ms", "1.91", 1.6, 1.4),
    Goal(10, "scheduler, CPU time a step at batch 256 (on a CPU), ms", "0.45", 0.28, 0.2, "scheduler", _scheduler),
    *(_crowd("tok/s", "tok/s / one batched request", count, "0.6", 0.85, 0.95, True) for count in (64, 256)),
    *(_crowd("gap", "gap p99, ms", count, "", 25, None, False) for count in (64, 256)),
    *(_efficiency("1B", way, 0.70, 0.80) for way in (PLAIN, CHAIN)),
    *(_efficiency("3B", way, 0.82, 0.88) for way in (PLAIN, CHAIN)),
    *(
        _own(13, f"{model} {caches}", f"{model}, start to ready, {caches} kernel caches, s", before, must, aim)
        for model in ("SmolLM2", "8B")
        for caches, before, must, aim in (("warm", "28-38", 12, 8), ("cold", "25-45", 30, 20))
    ),
    _own(14, "batch 8", "tree (5, 8, 32), batch 8, step, ms", "8.6-8.7", 8.0, 7.5),
    _own(14, "batch 32", "tree (5, 8, 32), batch 32, step, ms", "26.1-26.5", 26, 24),
    _own(15, "SmolLM2 32", "SmolLM2, one token of 32 new prompts, ms", "35-68", 15, 8),
    _own(15, "SmolLM2 64", "SmolLM2, one token of 64 new prompts, ms", "47-71", 20, 12),
    _own(15, "8B 8", "8B, one token of 8 new prompts, ms", "29-37", 26, 24),
    _own(15, "8B 32", "8B, one token of 32 new prompts, ms", "97-109", 92, 88),
    _own(16, "32k", "chain step at context 32k, KV pages of 8 bits, ms", "5.64", 5.5, 5.2),
    _own(16, "100k", "chain step at context 100k, KV pages of 8 bits, ms", "7.73", 7.2, 6.5),
    _own(17, "fp8 plain 1", "fp8 weights, plain step, batch 1, ms (bf16 before)", "3.87", 2.3, 2.1),
    _own(17, "fp8 chain 1", "fp8 weights, chain step, batch 1, ms", "4.60", 3.0, 2.75),
    _own(17, "fp8 chain 8", "fp8 weights, chain step, batch 8, ms", "4.85", 3.4, 3.1),
    _own(17, "fp8 chain 32", "fp8 weights, chain step, batch 32, ms", "6.29", 5.0, 4.4),
    _own(17, "int4 plain 1", "int4 weights, groups of 128, plain step, batch 1, ms", "3.87", 1.6, 1.4),
    _own(17, "int4 chain 1", "int4 weights, groups of 128, chain step, batch 1, ms", "4.60", 2.3, 2.1),
)
