"""What narrower steps gain and cost: one method with its widths fixed, adaptive, and without speculation.

    python benchmarks/width_policy.py --cases 8b,chain --output benchmarks/results/width_policy_h200.json
    python benchmarks/width_policy.py --cases standalone,tree,ngram --heads DIR   (DIR/standalone: a draft model)

The three engines of a case run side by side on one device, one of them busy at a time: each batch size is measured in
`--repeats` rounds, and every round measures all three. Medians count, and every run is in the JSON.
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec.structs import asdict

from overlap_spec.bench.engines import describe_engine, describe_settings
from overlap_spec.bench.methods_load import Tokens, repeated, run_load, warm_up
from overlap_spec.bench.report import write_report
from overlap_spec.bench.workload import RANDOM, chat_prompts, load_prompts, random_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams

SHAPES = Path(__file__).parent / "shapes"
WARM_UP_ROWS, WARM_UP_TOKENS = 1000, 24  # random prompts from that row on are never measured
ROOM = 256  # tokens for a request beside its own: windows in flight, pages that are not full
POLICIES = ("fixed", "adaptive", "plain")

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One method under some loads. `flags`: of the fixed engine."""

    flags: Mapping[str, Any]
    prompts: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    num_tokens: int

    @property
    def ends_itself(self) -> bool:
        """Random prompts of random weights have no end of turn."""
        return self.prompts != (RANDOM,)


def numbers(num_steps: int, topk: int, num_draft_tokens: int) -> dict[str, int]:
    return {
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": num_draft_tokens,
    }


def cases(heads: Path | None) -> dict[str, Case]:
    """All that can be measured. `heads`: a folder with draft models for SmolLM2."""
    eagle3 = {"speculative_algorithm": "EAGLE3"}
    dummy = eagle3 | {
        "model_path": str(SHAPES / "llama-3.1-8b"),
        "load_format": "dummy",
        "speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3"),
        "speculative_simulate_acc_len": 2.5,
    }
    found = {
        "8b": Case(dummy | numbers(3, 1, 4), (RANDOM,), (1, 8, 32, 64, 128), 256),
        "chain": Case(eagle3 | numbers(3, 1, 4), ("chat20",), (1, 8, 64), 128),
        "tree": Case(eagle3 | numbers(5, 4, 16), ("chat20",), (1, 8, 32), 128),
        "ngram": Case(
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12}, ("chat20", "copy20"), (1, 8), 128
        ),
    }
    if heads is not None:
        standalone = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(heads / "standalone")}
        found["standalone"] = Case(standalone | numbers(3, 1, 4), ("chat20",), (1, 8, 32), 128)
    return found


def configs_of(case: Case, longest: int) -> dict[str, EngineConfig]:
    """The engines that are compared. `longest`: tokens of a prompt."""
    most = max(case.batch_sizes)
    bounds = {
        "log_level": "warning",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "max_running_requests": most,
        "max_total_tokens": most * (longest + case.num_tokens + ROOM),
        "context_length": longest + case.num_tokens + ROOM,
    }
    fixed = config_from({**bounds, **case.flags})
    adaptive = config_from({**bounds, **case.flags, "speculative_adaptive": True})
    return {"fixed": fixed, "adaptive": adaptive, "plain": without_speculation(fixed)}


def prompts_of(case: Case) -> dict[str, list[Tokens]]:
    """Token ids by the name of the prompts."""
    model = config_from({name: case.flags[name] for name in ("model_path", "load_format") if name in case.flags})
    vocab_size = resolve_model(config_from(asdict(model) | {"skip_tokenizer_init": True})).vocab_size
    return {
        name: random_prompts(max(case.batch_sizes), vocab_size)
        if name == RANDOM
        else chat_prompts(model, load_prompts(name))
        for name in case.prompts
    }


async def measure_case(name: str, case: Case, repeats: int, report: Row) -> None:
    """Adds one row for each load and policy to the report."""
    prompts = prompts_of(case)
    configs = configs_of(case, max(len(prompt) for ids in prompts.values() for prompt in ids))
    async with AsyncExitStack() as stack:
        begun = perf_counter()
        together = ("fixed", "plain")
        engines = dict(
            zip(
                together,
                await asyncio.gather(*(stack.enter_async_context(Engine(configs[which])) for which in together)),
                strict=True,
            )
        )
        # It measures at its start what its steps cost, and so starts while no other engine works.
        engines["adaptive"] = await stack.enter_async_context(Engine(configs["adaptive"]))
        report["run"] = report.get("run") or describe_engine(engines["adaptive"])
        settings = {which: describe_settings(engine) for which, engine in engines.items()}
        report["cases"][name] = {"start_s": round(perf_counter() - begun, 1), "settings": settings}
        vocab_size = engines["plain"].settings.model.files.vocab_size
        for load, distinct in prompts.items():
            for batch in case.batch_sizes:
                count = batch if load == RANDOM else max(batch, len(distinct))
                sent = list(repeated(distinct[:count], batch))
                rows = await measure_load(engines, case, sent, batch, vocab_size, repeats)
                report["rows"] += [{"case": name, "prompts": load, **row} for row in rows]
                print_rows(report["rows"][-len(rows) :])


async def measure_load(
    engines: Mapping[str, Engine], case: Case, sent: list[Tokens], batch: int, vocab_size: int, repeats: int
) -> list[Row]:
    """One load: a row for each policy."""
    sampling = SamplingParams(max_new_tokens=case.num_tokens, temperature=0.0, seed=0, ignore_eos=not case.ends_itself)
    few = SamplingParams(max_new_tokens=WARM_UP_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
    cold = random_prompts(batch, vocab_size, first=WARM_UP_ROWS)
    runs: dict[str, list[Row]] = {name: [] for name in POLICIES}
    for turn in range(repeats):
        for shift in range(len(POLICIES)):
            name = POLICIES[(turn + shift) % len(POLICIES)]  # none of them is always the first
            await warm_up(engines[name].client, cold, few)
            runs[name].append((await run_load(engines[name].client, sent, batch, sampling)).figures)
    rows = []
    for name, figures in runs.items():
        rows.append(
            {
                "batch": batch,
                "policy": name,
                "num_requests": len(sent),
                "tokens_per_second": statistics.median(run["tokens_per_second"] for run in figures),
                "step_ms": statistics.median(run["step_ms"] for run in figures),
                "accept_length": statistics.median(run["accept_length"] for run in figures),
                "runs": figures,
            }
        )
    fixed, _, plain = (row["tokens_per_second"] for row in rows)
    for row in rows:
        row["over_fixed"] = round(row["tokens_per_second"] / fixed, 4)
        row["over_plain"] = round(row["tokens_per_second"] / plain, 4)
    return rows


def print_rows(rows: list[Row]) -> None:
    """One line for each policy of a load."""
    for row in rows:
        speeds = [run["tokens_per_second"] for run in row["runs"]]
        print(
            f"{row['case']:10} {row['prompts']:7} {row['batch']:5d}  {row['policy']:8} {row['tokens_per_second']:10.1f}"
            f" {row['step_ms']:8.3f} {row['accept_length']:7.3f} {row['over_fixed']:7.3f} {row['over_plain']:7.3f}"
            f"  {min(speeds):.0f}..{max(speeds):.0f}",
            flush=True,
        )


async def measure(chosen: Mapping[str, Case], repeats: int, output: str | None) -> None:
    report: Row = {"benchmark": "width_policy", "run": {}, "repeats": repeats, "cases": {}, "rows": []}
    print(
        f"{'case':10} {'prompts':7} {'batch':>5}  {'policy':8} {'tok/s':>10} {'step ms':>8} {'accept':>7}"
        f" {'/fixed':>7} {'/plain':>7}  slowest..fastest run"
    )
    for name, case in chosen.items():
        await measure_case(name, case, repeats, report)
        if output is not None:
            write_report(output, report)  # after each case: what was measured is kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--heads", type=Path, help="folder with draft models for SmolLM2")
    parser.add_argument("--cases", default="8b,chain", help="8b, chain, standalone (needs --heads), tree, ngram")
    parser.add_argument("--batch-sizes", help="default: each case's own")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    known = cases(arguments.heads)
    names = arguments.cases.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = {name: known[name] for name in names}
    if arguments.batch_sizes is not None:
        sizes = tuple(int(size) for size in arguments.batch_sizes.split(","))
        chosen = {name: Case(case.flags, case.prompts, sizes, case.num_tokens) for name, case in chosen.items()}
    asyncio.run(measure(chosen, arguments.repeats, arguments.output))


if __name__ == "__main__":
    main()
