"""What is measured of real traffic on one H200, and how each figure is read from the result files.

A quantity takes the worst of its cells (batch sizes, samplings), so a part that was not measured cannot hide behind one
that was: `Measured.values` are counted against `Quantity.cells`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]
Reports = Mapping[str, Report]  # by file name
Pick = Callable[[Report], Iterable[float]]

CHAIN, PLAIN = "chain", "plain"
GAP, RATIO = "longest_gap_ms", "first_token_ratio"
PERCENT, WHOLE = "{:.1%}", "{:,.0f}"
CHAINS = tuple(f"{CHAIN} {batch}" for batch in (1, 8, 32))


@dataclass(frozen=True)
class Measured:
    """The cells of a quantity. `files`: the result files that have them."""

    files: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Quantity:
    """One figure, the worst of `cells`. `row`: what `real_traffic.py` calls it. `pick`: the cells of a `benchmark`.

    Several with the same `work` make a line of the table; `of` names each in it. `is_ratio`: to something that it is
    slower than on the wrong side of 1.
    """

    row: int
    work: str
    of: str
    benchmark: str
    pick: Pick
    cells: int = 1
    is_ratio: bool = False
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

    def is_slower(self, value: float) -> bool:
        """Than what it is compared with."""
        return self.is_ratio and (value < 1 if self.more_is_better else value > 1)


def _own(row: int, part: str, work: str, of: str, **more: Any) -> Quantity:
    """One that `benchmarks/real_traffic.py` measures. `part`: the name of its cells within the row."""

    def pick(report: Report) -> list[float]:
        return [each["value"] for each in report["cells"] if (each["row"], each["part"]) == (row, part)]

    return Quantity(row, work, of, "real_traffic", pick, **more)


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


def _traffic(row: int, work: str, of: str, pick: Pick, **more: Any) -> Quantity:
    """One that `benchmarks/traffic.py` measures."""
    return Quantity(row, work, of, "traffic", pick, **more)


POISSON = "16 requests a second, ms"
QUANTITIES: tuple[Quantity, ...] = (
    *(_own(1, way, "sampled step / greedy step", way, cells=12, is_ratio=True) for way in (PLAIN, CHAIN)),
    *(_own(2, each, "first token of a prompt of random tokens, ms", each, style=WHOLE)
      for each in ("8k", "32k", "100k")),
    *(_traffic(3, "longest gap of 8 streams while a prompt arrives, ms", f"{each}k", _interruption(GAP, 1000 * each))
      for each in (16, 40)),
    *(_traffic(3, "first token of that prompt / alone", f"{each}k", _interruption(RATIO, 1000 * each), is_ratio=True)
      for each in (16, 40)),
    _traffic(4, POISSON, "first token p99", _poisson("first_token_ms", "p99")),
    _traffic(4, POISSON, "time per token p99", _poisson("time_per_token_ms", "p99")),
    _traffic(4, POISSON, "longest gap", _poisson(GAP, "max")),
    _traffic(5, "requests a second / plain decoding's", "", _rate, is_ratio=True, more_is_better=True),
    *(_own(6, each, "step at a context of tokens, ms", each) for each in ("8k", "32k", "100k")),
    *(_own(16, each, "the same with KV pages of 8 bits, ms", each) for each in ("32k", "100k")),
    _own(7, "turn", "first token of a turn with 8k cached and 200 new tokens, ms", ""),
    *(_own(15, f"8B {each}", "one token of new prompts, ms", f"{each} prompts") for each in (8, 32)),
    *(_own(15, f"SmolLM2 {each}", "SmolLM2, one token of new prompts, ms", f"{each} prompts") for each in (32, 64)),
    *(_own(10, way, "SmolLM2, step of 256 requests, ms", way) for way in (PLAIN, CHAIN)),
    *(_own(11, f"{each} tok/s", "SmolLM2, tok/s of SSE connections / one batched request", str(each), is_ratio=True,
           more_is_better=True) for each in (64, 256)),
    *(_own(11, f"{each} gap", "SmolLM2, gap p99 of SSE connections, ms", str(each)) for each in (64, 256)),
    *(_own(12, f"{size} {way}", f"Llama-3.2-{size} shape, step efficiency", way, more_is_better=True, style=PERCENT)
      for size in ("1B", "3B") for way in (PLAIN, CHAIN)),
    *(_own(13, f"{model} {caches}", f"{model}, start to ready, s", f"{caches} kernel caches")
      for model in ("SmolLM2", "8B") for caches in ("warm", "cold")),
    *(_own(17, f"fp8 {each}", "step with fp8 weights, ms", each) for each in (f"{PLAIN} 1", *CHAINS)),
    *(_own(17, f"int4 {each}", "step with int4 weights, groups of 128, ms", each)
      for each in (f"{PLAIN} 1", CHAINS[0])),
)  # fmt: skip
