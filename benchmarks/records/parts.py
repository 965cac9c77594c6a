"""The parts of a record: what each runs, on which cards, how long that takes, and what it depends on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows.quantities import QUANTITIES

from overlap_spec.runtime.source import code_hash

Report = Mapping[str, Any]
Whole = Callable[[Report], bool]
Hashes = dict[str, str]  # path -> hash of its code

MOST_S = 540  # of a call
ALL_TIME = f"--limit-s {MOST_S}"  # `record.py` ends what takes too long


@dataclass(frozen=True)
class Command:
    """One run of a benchmark. `words`: of a shell; `{output}` is the JSON file that it writes.

    `whole`: whether that file has all that was asked for: a benchmark that its own limit ends has status 0. `resumes`:
    begun again with its own file, it goes on.
    """

    name: str
    seconds: int
    words: str
    whole: Whole = bool
    resumes: bool = False


@dataclass(frozen=True)
class Part:
    """Commands whose reports make one file. `depends`: files and folders; `cards`: whose record it belongs to."""

    name: str
    commands: tuple[Command, ...]
    depends: tuple[str, ...]
    cards: tuple[str, ...] = ("h200",)

    @property
    def seconds(self) -> int:
        return sum(command.seconds for command in self.commands)


Parts = Sequence[Part]


def has_rows(count: int) -> Whole:
    """The report has so many rows, or more."""
    return lambda report: len(report["rows"]) >= count


def grid_whole(rows: int) -> Whole:
    """The report has so many rows, and three rounds of every cell."""
    return lambda report: (
        has_rows(rows)(report)
        and all(len(row["runs"]["plain"]) >= ROUNDS for row in report["rows"] if row["kind"] == "cell")
    )


def has_cells(*rows: int) -> Whole:
    """The report has every cell of its benchmark's quantities in these rows of real traffic, and nothing failed."""

    def whole(report: Report) -> bool:
        own = [each for each in QUANTITIES if each.row in rows and each.benchmark == report["benchmark"]]
        return not report.get("failed") and all(len(tuple(each.pick(report))) >= each.cells for each in own)

    return whole


def mixtures_whole(report: Report) -> bool:
    """Every row is there, and as many distinct experts were counted as are expected, within 3%."""
    counted = [row for row in report["rows"] if "distinct" in row]
    is_near = all(abs(row["distinct"] / row["expected_distinct"] - 1) <= 0.03 for row in counted)
    return len(report["rows"]) >= MIXTURE_ROWS and is_near


def two_ranks_whole(report: Report) -> bool:
    """Every row is there, and no engine was refused."""
    return len(report["rows"]) >= TWO_RANKS_ROWS and not any("refused" in row for row in report["rows"])


def all_passed(report: Report) -> bool:
    """Tests ran, and none failed."""
    files = report.get("files", {}).values()
    return any(row["passed"] for row in files) and not any(row["failed"] for row in files)


def script(name: str, seconds: int, words: str, whole: Whole = bool, resumes: bool = False) -> Command:
    """A script of this folder."""
    return Command(name, seconds, f"python benchmarks/{words} --output {{output}}", whole, resumes)


def bench(name: str, seconds: int, words: str) -> Command:
    return Command(name, seconds, f"overlap-spec bench {words} --output {{output}}")


def tests(name: str, seconds: int, words: str) -> Command:
    # pytest-benchmark, where it is installed, ends a run of several processes by a warning.
    return Command(name, seconds, f"python -m pytest -q -p no:benchmark {words} --summaries {{output}}", all_passed)


def traffic_rows(seconds: int, *rows: int) -> Command:
    """Rows of real traffic."""
    words = f"real_traffic.py --rows {','.join(map(str, rows))} {ALL_TIME}"
    return script("rows_" + "_".join(map(str, rows)), seconds, words, has_cells(*rows), resumes=True)


def eagle3(steps: int, topk: int, tokens: int) -> str:
    numbers = (("num-steps", steps), ("eagle-topk", topk), ("num-draft-tokens", tokens))
    return " ".join(("--speculative-algorithm EAGLE3", *(f"--speculative-{name} {value}" for name, value in numbers)))


STEP = (
    *(f"overlap_spec/{name}" for name in ("features", "models", "sampling", "scheduler", "speculative", "worker")),
    *("kernels/overlap_spec_kernels", "benchmarks/shapes"),
)
SERVER = (*STEP, "overlap_spec/entrypoints", "overlap_spec/frontend")
ROWS = ("benchmarks/real_traffic.py", "benchmarks/rows")
TRAFFIC = "benchmarks/traffic.py"
SLOWER = ("benchmarks/never_slower.py", "benchmarks/grid", "benchmarks/width_policy.py", TRAFFIC)  # what it imports
SLOWER_CASES = {  # those that are measured by turns, seconds, rows
    "slower": ("8b-2.5,8b-1.3", 430, 84),
    "slower_more": ("8b-3.5,8b-standalone", 350, 61),
    "slower_small": ("eagle3-chat,ngram-chat,ngram-copy", 260, 96),
}
FEATURES = tuple(f"benchmarks/{name}.py" for name in ("feature_costs", "mixed_speculation", "structured_output"))
BOTH = ("h200", "h100")
MIXTURES = tuple(f"benchmarks/{name}.py" for name in ("mixtures", "mixture_routers", "prefill_profile", "step_profile"))
MIXTURE_ROWS = 23
TWO_RANKS_ROWS = 43
ROUNDS = 3  # of a cell of the grid
HYBRIDS = ("benchmarks/hybrids.py", *MIXTURES)
HYBRID_ROWS = 12

CHAIN = eagle3(3, 1, 4)
SHAPE = (
    "--model-path benchmarks/shapes/llama-3.1-8b --speculative-draft-model benchmarks/shapes/llama-3.1-8b-eagle3 "
    "--load-format dummy --speculative-simulate-acc-len 2.5 --prompts random --context-length 4096"
)
FEW = f"{SHAPE} --max-total-tokens 65536 --num-tokens 512 --batch-sizes 1,8,32"
MANY = f"{SHAPE} --max-total-tokens 196608 --num-tokens 512 --batch-sizes 1,8,32,64,128,256 --with-plain"
SMOLLM2 = "--prompts peer64 --num-tokens 512"

# fmt: off
# Of the core: at most twelve. What takes 300 s on one host takes 400 s on a slow one.
TABLES = (  # the 8B's shape, from 1 to 256 requests
    bench("throughput_8b", 110, f"throughput {CHAIN} {MANY}"),
    bench("throughput_default_8b", 100, f"throughput --speculative-algorithm EAGLE3 {MANY}"),
    bench("throughput_tree_8b", 45, f"throughput {eagle3(5, 8, 32)} {FEW}"),
)
MORE_TABLES = (  # SmolLM2; then sampled steps, first tokens and gaps of both models
    bench("throughput", 45, f"throughput {CHAIN} {SMOLLM2} --batch-sizes 1,8,32,64 --with-plain"),
    bench("throughput_tree", 25, f"throughput {eagle3(5, 4, 16)} {SMOLLM2} --batch-sizes 1,64"),
    traffic_rows(140, 1, 2),
    script("traffic", 60, f"traffic.py --engines chain --parts interruption {ALL_TIME}", has_cells(3)),
)
PARTS = (
    # The core: the GPU tests, and what README quotes.
    Part("tests", (tests("gpu_tests", 510, "-m cuda -n 12 --dist loadgroup tests/gpu"),), (*SERVER, "tests"), BOTH),
    Part("tables", TABLES, SERVER),
    Part("more_tables", MORE_TABLES, (*SERVER, *ROWS, TRAFFIC)),
    # One for each later feature.
    Part("long", (traffic_rows(120, 6, 16, 7),), (*STEP, *ROWS)),
    Part("weights", (traffic_rows(75, 17),), (*STEP, *ROWS)),
    Part("sizes", (traffic_rows(65, 12),), (*STEP, *ROWS), BOTH),
    Part("batches", (traffic_rows(95, 15, 10),), (*STEP, *ROWS)),
    Part("starts", (traffic_rows(130, 13),), (*SERVER, *ROWS)),
    Part("crowds", (traffic_rows(45, 11),), (*SERVER, *ROWS)),
    Part("rate", (script("traffic_rate", 260, f"traffic.py --parts poisson,rate {ALL_TIME}", has_cells(4, 5)),),
         (*SERVER, TRAFFIC)),
    *(Part(name, (script("never_slower", seconds, f"never_slower.py --cases {cases} {ALL_TIME}", grid_whole(rows),
                         resumes=True),), (*STEP, *SLOWER)) for name, (cases, seconds, rows) in SLOWER_CASES.items()),
    Part("attacks", (tests("attacks", 150, "-m attack tests/attacks --cases worst"),),
         (*SERVER, "tests/attacks", "tests/support")),
    Part("features", (
        script("feature_costs", 300, "feature_costs.py --rounds 1"),
        script("mixed_speculation", 60, "mixed_speculation.py --case smollm2 --repeats 2"),
        script("structured_cost", 60, "structured_output.py --requests 0"),
    ), (*STEP, "overlap_spec/features/grammar", *FEATURES)),
    Part("steps", (
        bench("step", 40, f"step {CHAIN} {SMOLLM2} --batch-size 1"),
        bench("step_8b", 60, f"step {CHAIN} {SHAPE} --max-total-tokens 65536 --skip-tokenizer-init "
              "--batch-size 1 --num-tokens 256"),
    ), STEP),
    Part("kernels", (script("kernels", 300, "kernels.py --jobs 14 --rows 1 32"),),
         ("kernels/overlap_spec_kernels", "benchmarks/kernels.py", "benchmarks/kernel_cases")),
    Part("mixtures", (
        script("mixtures", 290, "mixtures.py", mixtures_whole, resumes=True),
        script("mixtures_others", 150, "mixtures.py --others", has_rows(5), resumes=True),
    ), (*STEP, *MIXTURES)),
    Part("mixtures_slower", (script("never_slower", 200, f"never_slower.py --cases 30b --rounds 1 {ALL_TIME}",
                                    has_rows(25), resumes=True),), (*STEP, *SLOWER)),
    Part("hybrids", (
        script("hybrids", 270, "hybrids.py", has_rows(HYBRID_ROWS), resumes=True),
        script("hybrids_slower", 180, f"never_slower.py --cases 9b --rounds 1 {ALL_TIME}", has_rows(25),
               resumes=True),
    ), (*STEP, *HYBRIDS, *SLOWER)),
    Part("tp2", (  # on two GPUs; both say so
        script("reductions", 80, "reductions.py", has_rows(14)),
        script("tensor_parallel", 440, f"tensor_parallel.py {ALL_TIME}", two_ranks_whole, resumes=True),
    ), (*STEP, "benchmarks/reductions.py", "benchmarks/tensor_parallel.py", "benchmarks/rows")),
    Part("small", (bench("throughput_8b", 70, f"throughput {CHAIN} {FEW} --with-plain"),), SERVER, ("h100",)),
)
# fmt: on


def parts_of(card: str, parts: Parts = PARTS) -> tuple[Part, ...]:
    """Those of the record of a card."""
    return tuple(part for part in parts if card in part.cards)


def hashes_of(root: Path, parts: Parts) -> Hashes:
    """The hash of all that any of them depends on, without comments and docstrings."""
    paths = sorted({path for part in parts for path in part.depends})
    return {path: code_hash(root / path) if (root / path).exists() else "" for path in paths}
