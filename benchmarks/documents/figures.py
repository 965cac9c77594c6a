"""Figures inside sentences, each read from the files that a table shows too."""

import json
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rows.quantities import QUANTITIES

from documents.age import commits_of, documents
from documents.beside import MODELS, Row, behind, compared, speeds, times
from documents.models import ON_CPU, ON_GPU
from documents.own import own_reports
from documents.peers import CHAIN, LLAMA, PEERS, SMOLLM2, Cell
from documents.real_traffic import committed
from documents.result_tables import DEFAULT_NUMBERS, MARKED, recorded
from documents.side_by_side import ANSWERS, FILES as SIDE_BY_SIDE, GRID, GRID_SMOLLM2, GRIDS, cells_of
from documents.two_gpus import FILES as TWO_GPUS

Report = dict[str, Any]


def shown(root: Path) -> dict[str, Report]:
    """The results that documents show, by file name. Some tables read several, or a record."""
    text, results = "".join(path.read_text() for path in documents(root)), root / "benchmarks/results"
    paths = {root / match[2] for match in MARKED.finditer(text)}
    listed = (*committed(results), *own_reports(results), *SIDE_BY_SIDE, *TWO_GPUS.values(), ON_CPU, ON_GPU)
    paths |= {results / name for name in listed if (results / name).is_file()}
    return {path.name: json.loads(path.read_text()) for path in sorted(paths)}


class Results:
    """The committed results of a checkout."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def commits(self) -> list[str]:
        """At which the results were measured that documents show."""
        return commits_of(shown(self._root))

    @cached_property
    def compared(self) -> list[Row]:
        """This engine beside its peers."""
        return compared(self._root)

    def __getitem__(self, name: str) -> Report:
        report: Report = json.loads((self._root / f"benchmarks/results/{name}.json").read_text())
        return report

    def recorded(self, name: str) -> Report:
        """A report of the card's record, by `PART, COMMAND`. Raises: KeyError for one that is not measured."""
        return recorded(self._root / "benchmarks/results", name)[name]

    def lines_of(self, path: str) -> int:
        """Length of a file of the repository."""
        return len((self._root / path).read_text().splitlines())

    def worst(self, row: int, work: str, of: str = "") -> float:
        """The worst figure of real traffic in a row, of the quantities whose `work` and `of` begin with these."""
        reports = committed(self._root / "benchmarks/results")
        own = [each for each in QUANTITIES if each.row == row and each.work.startswith(work) and each.of.startswith(of)]
        found = [measured for each in own if (measured := each.measured(reports)) is not None]
        return own[0].worst(value for measured in found for value in measured.values)


def at_most(value: float, digits: int = 0) -> str:
    """An upper bound, rounded up."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_CEILING))


def at_least(value: float, digits: int = 0) -> str:
    """A lower bound, rounded down."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR))


def _beside(results: Results, models: Sequence[str], first: bool = False) -> str:
    """How many times as long as ours each peer takes, with short prompts: both ends are rounded down."""
    spans = [times(results.compared, peer, models, first) for peer in PEERS]
    return " and ".join(f"{at_least(min(span), 1)} to {at_least(max(span), 1)}" for span in spans)


def _speeds(results: Results) -> list[str]:
    """tok/s of an EAGLE-3 chain at batch 32 in the 8B shape, ours at the end."""
    return list(speeds(results.compared, Cell(LLAMA, CHAIN, 32)))


def _depth(results: Results, batch: int) -> str:
    """tok/s with two steps in flight over tok/s with one."""
    report = results["throughput_h200"]
    return f"{_of_batch(report, 'engine', batch) / _of_batch(report, 'depth1', batch):.2f}"


def _defaults(results: Results) -> str:
    """Default numbers of a warm engine over plain decoding, the 8B shape: all batch sizes, both ends rounded down."""
    report = results.recorded(DEFAULT_NUMBERS)
    batches = [row["batch"] for row in report["plain"]["batches"]]
    ratios = [_of_batch(report, "engine", batch) / _of_batch(report, "plain", batch) for batch in batches]
    return f"{at_least(min(ratios), 2)} to {at_least(max(ratios), 2)}"


def _of_batch(report: Report, part: str, batch: int) -> float:
    return next(float(row["tokens_per_second"]) for row in report[part]["batches"] if row["batch"] == batch)


def _gap(results: Results) -> str:
    steps = [results[name]["step"] for name in ("step_h200", "step_8b_h200")]
    return f"{at_most(max(100 * step['gap_ms'] / step['step_ms'] for step in steps), 1)}%"


def _schedules(results: Results) -> str:
    found = (
        entry["figures"]["schedules"]
        for name, entry in results["full_tests_cpu"].items()
        if name.startswith("schedules_")
    )
    return f"{sum(found):,}"


def _noise(results: Results, draws: str) -> str:
    rows = results["draft_noise_cpu"]["figures"]
    return f"{next(row['accept_length'] for row in rows if row['temperature'] == 1 and row['draws'] == draws):.2f}"


def _over_transformers(results: Results) -> str:
    report = results["latency_cpu"]
    ratio = report["engine"]["tokens_per_second"] / report["transformers"]["tokens_per_second"]
    return f"{ratio:.1f}"


def _over_llama_cpp(results: Results, engine: str) -> str:
    return f"{results['llama_cpp_cpu']['times llama.cpp'][engine]:.1f}"


def _over_transformers_on_xeon(results: Results, engine: str) -> str:
    return f"{results['cpu_check_h200_machine'][engine]['times transformers']:.1f}"


def _sampled(results: Results) -> str:
    """SmolLM2 at temperature 1: speculation over plain decoding, the worst batch size."""
    report = results["throughput_h200"]

    def speeds(part: str) -> list[float]:
        drawn = [next(way for way in row["sampled"] if way["temperature"] == 1) for row in report[part]["batches"]]
        return [float(way["tokens_per_second"]) for way in drawn]

    return at_least(min(ours / plain for ours, plain in zip(speeds("engine"), speeds("plain"), strict=True)), 2)


def _verdict(results: Results, name: str) -> str:
    found = results["bf16_divergences_h200"]["verdict"][name]
    return f"{found:.0%}" if name == "greedy_positions_above_bound" else f"{found:.2f}"


def _divergences(results: Results, method: str) -> str:
    counts = [row["divergences"] for row in results["bf16_divergences_h200"]["answers"] if row["method"] == method]
    *first, last = map(str, counts)
    return f"{', '.join(first)} and {last}"


def _constrained(results: Results, batch: int) -> str:
    """A step of requests with a JSON schema over one of requests without."""
    rows = results["structured_cost_h200"]["step_times"]["EAGLE-3 chain"]
    return f"{next(row['ratio'] for row in rows if row['batch'] == batch):.2f}"


def _of_hybrids(results: Results, kind: str, name: str) -> int:
    """A count of all their runs."""
    return sum(run[name] for run in results["hybrid_proofs_h200"][kind])


def _planted_audits(results: Results, rate: str) -> list[Report]:
    """Runs with planted errors at an audit rate, one entry for each plant."""
    entries = results["full_tests_cpu"].items()
    return [entry["figures"] for name, entry in entries if name.startswith("audit_") and name.endswith(f"_{rate}")]


def _audits_found(results: Results, rate: str) -> str:
    found, runs = (sum(figures[name] for figures in _planted_audits(results, rate)) for name in ("found", "runs"))
    return f"{found} of {runs}"


def _audits_most(results: Results, rate: str) -> str:
    return f"{max(figures['tokens_to_the_fault']['most'] for figures in _planted_audits(results, rate)):,}"


def _replies(results: Results) -> list[Report]:
    """Replies to JSON schemas, a row for each way to draft and temperature."""
    return list(results["structured_output_h200"]["figures"])


def _plain_again(results: Results) -> str:
    """How far plain decoding is below itself in calls that were repeated while batches grew and shrank."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in (row for row in results[GRID.removesuffix(".json")]["rows"] if row["kind"] == "turns"):
        for batch, speed in zip(row["batch"], row["plain"], strict=True):
            found.setdefault((row["case"], batch), []).append(speed)
    return f"{at_most(max(100 - 100 * min(speeds) / max(speeds) for speeds in found.values()), 1)}%"


def _grids(results: Results, files: Sequence[str]) -> list[Report]:
    return [results[file.removesuffix(".json")] for file in files]


def _grid_least(results: Results, kinds: Sequence[str], files: Sequence[str] = GRIDS) -> str:
    """The least of these calls with default numbers over plain decoding, rounded down."""
    calls = (call for report in _grids(results, files) for kind in kinds for call in cells_of(report, kind))
    return at_least(min(ratio for *_, ratio in calls), 2)


def _grid_best(results: Results, files: Sequence[str] = GRIDS) -> str:
    """The least of default numbers over the fastest fixed width, or plain decoding, in answers of one length."""
    default: dict[tuple[str, int], float] = {}
    best: dict[tuple[str, int], float] = {}
    for report in _grids(results, files):
        default |= {(case, batch): ratio for case, batch, tokens, ratio in cells_of(report) if tokens == max(ANSWERS)}
        for kind in {row["kind"] for row in report["rows"] if row["kind"].startswith("fixed")}:
            for case, batch, _, ratio in cells_of(report, kind):
                best[case, batch] = max(best.get((case, batch), 1.0), ratio)
    return at_least(min(default[cell] / ratio for cell, ratio in best.items()), 2)


def _forced(results: Results, proposed: bool) -> str:
    """Accept length of a greedy chain with a grammar."""
    rows = (row for row in _replies(results) if (row["method"], row["temperature"]) == ("EAGLE-3 chain", 0))
    return f"{next(row['accept_length'] for row in rows if row.get('proposes_forced', True) == proposed):.2f}"


def _fails_from(results: Results) -> str:
    return str(min(row["fails_from"] for row in results["bf16_divergences_h200"]["verdict"]["rates"]))


def _price(results: Results, model: str, kind: str) -> str:
    """The largest price of the flag of one order, rounded up, with equal methods."""
    cells = f"{model} plain", f"{model} chain", f"{model} plain, fp8", f"{model} chain, fp8"
    rows = results["deterministic_price_h200"]["rows"]
    return at_most(max(row["price"] for row in rows if row["kind"] == kind and row["cell"] in cells), 2)


def _on_hits(results: Results, of: str) -> str:
    """The accept length of prompts that the prefix cache has."""
    return format(results["adapt_draft_h200"]["parts"]["hits"][of]["accept_length"], ".2f")


def _adapted(results: Results, name: str, form: str = ".2f") -> str:
    """On records, of each seed; with `--adapt-draft` in the last quarter of the time."""
    values = [format(seed[name], form) for seed in results["adapt_draft_h200"]["summary"]]
    return " and ".join([", ".join(values[:-1]), values[-1]] if values[1:] else values)


def _trained(results: Results) -> str:
    """Accept length on chat20 of a head that `train-draft` has trained for eight minutes."""
    return f"{results['trained_draft_h200']['engine']['accept_length']:.2f}"


def _trained_wide(results: Results) -> str:
    """The same with chains of seven guesses."""
    return f"{results['trained_draft_h200']['wide']['accept_length']:.2f}"


FIGURES: dict[str, Callable[[Results], str]] = {
    "steps-8b": partial(_beside, models=[LLAMA]),
    "steps-smollm2": partial(_beside, models=[SMOLLM2]),
    "steps-behind": lambda results: behind(results.compared, first=False),
    "speed-ours": lambda results: _speeds(results)[-1],
    "speed-peers": lambda results: " and ".join(_speeds(results)[:-1]),
    "prompts": partial(_beside, models=MODELS, first=True),
    "prompts-behind": lambda results: behind(results.compared, first=True),
    "default-over-plain": _defaults,
    "overlap-1": lambda results: _depth(results, 1),
    "overlap-64": lambda results: _depth(results, 64),
    "gap": _gap,
    "schedules": _schedules,
    "noise-shared": lambda results: _noise(results, "shared"),
    "noise-rejection": lambda results: _noise(results, "rejection"),
    "noise-greedy": lambda results: _noise(results, "greedy"),
    "over-transformers": _over_transformers,
    "avx2-over-plain": lambda results: f"{results['latency_avx2_cpu']['ratios']['engine / plain']:.2f}",
    "over-llama-cpp": lambda results: _over_llama_cpp(results, "eagle3"),
    "plain-over-llama-cpp": lambda results: _over_llama_cpp(results, "plain"),
    "over-transformers-xeon": lambda results: _over_transformers_on_xeon(results, "engine"),
    "plain-over-transformers-xeon": lambda results: _over_transformers_on_xeon(results, "plain"),
    "sampled-worst": _sampled,
    "sampled-over-greedy": lambda results: at_most(results.worst(1, "sampled step"), 2),
    "gap-16k": lambda results: at_most(results.worst(3, "longest gap", "16k")),
    "gap-40k": lambda results: at_most(results.worst(3, "longest gap", "40k")),
    "constrained-1": lambda results: _constrained(results, 1),
    "constrained-8": lambda results: _constrained(results, 8),
    "soak-served": lambda results: f"{results['audit_soak_h200']['served_tokens']:,}",
    "soak-audited": lambda results: f"{results['audit_soak_h200']['audit']['figures']['tokens']:,}",
    "soak-faults": lambda results: str(results["audit_soak_h200"]["audit"]["figures"]["faults"]),
    "hybrid-audited": lambda results: f"{_of_hybrids(results, 'audits', 'tokens'):,}",
    "hybrid-faults": lambda results: str(_of_hybrids(results, "audits", "faults")),
    "hybrid-recovered": lambda results: str(_of_hybrids(results, "recoveries", "equal")),
    "hybrid-kills": lambda results: str(_of_hybrids(results, "recoveries", "kills")),
    "fuzzed-requests": lambda results: f"{results['fuzz_cpu']['fuzzed_http']['figures']['cases']:,}",
    "fuzzed-frames": lambda results: f"{results['fuzz_cpu']['fuzzed_frames']['figures']['frames']:,}",
    "attacks": lambda results: str(len(results["attacks_cpu"]["attacks"]["cases"])),
    "method-lines": lambda results: str(results.lines_of("examples/05_toy_proposer.py")),
    "trained": _trained,
    "trained-wide": _trained_wide,
    "kinds-time": lambda results: results["trained_drafters_h200"]["time_limit"],
    "adapt-without": partial(_adapted, name="without"),
    "adapt-learns": partial(_adapted, name="learns_last"),
    "adapt-trained": lambda results: f"{results['adapt_draft_h200']['summary'][0]['trained']:.2f}",
    "adapt-throughput": partial(_adapted, name="throughput"),
    "adapt-faults": lambda results: str(sum(seed["faults"] for seed in results["adapt_draft_h200"]["summary"])),
    "adapt-older-hits": partial(_on_hits, of="newer head, hits of the older one"),
    "adapt-own-hits": partial(_on_hits, of="newer head, hits"),
    "adapt-before-hits": partial(_on_hits, of="older head, hits"),
    "adapt-gained": partial(_adapted, name="gained", form=".0%"),
    "price-8b": lambda results: _price(results, "8B", "step"),
    "price-smollm2": lambda results: _price(results, "SmolLM2", "step"),
    "price-prompt": lambda results: _price(results, "8B", "prompt"),
    "bf16-largest": lambda results: _verdict(results, "largest_margin"),
    "bf16-bound": lambda results: _verdict(results, "margin_bound"),
    "bf16-above": lambda results: _verdict(results, "greedy_positions_above_bound"),
    "bf16-eagle3": lambda results: _divergences(results, "eagle3"),
    "bf16-plain": lambda results: _divergences(results, "plain"),
    "bf16-fails": _fails_from,
    "replies": lambda results: f"{sum(row['requests'] for row in _replies(results)):,}",
    "replies-invalid": lambda results: str(sum(row["requests"] - row["valid"] for row in _replies(results))),
    "replies-faults": lambda results: str(sum(row["different"]["fault"] for row in _replies(results))),
    "plain-again": _plain_again,
    "grid-turns": partial(_grid_least, kinds=("turns",)),
    "grid-decreases": partial(_grid_least, kinds=("low", "mixed")),
    "grid-arrivals": partial(_grid_least, kinds=("arrivals",)),
    "smollm2-arrivals": partial(_grid_least, kinds=("arrivals",), files=(GRID_SMOLLM2,)),
    "smollm2-best": partial(_grid_best, files=(GRID_SMOLLM2,)),
    "grid-best": _grid_best,
    "commits": lambda results: f"{len(results.commits):,}",
    "first-commit": lambda results: results.commits[0],
    "last-commit": lambda results: results.commits[-1],
    "forced": partial(_forced, proposed=True),
    "forced-not": partial(_forced, proposed=False),
    "audits-found": partial(_audits_found, rate="0.5"),
    "audits-most": partial(_audits_most, rate="0.5"),
    "audits-found-rarely": partial(_audits_found, rate="0.05"),
    "audits-most-rarely": partial(_audits_most, rate="0.05"),
    "audits-clean": lambda results: f"{results['full_tests_cpu']['audit_200000']['figures']['tokens']:,}",
}
