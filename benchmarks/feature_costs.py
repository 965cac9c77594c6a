"""What request features cost: step times with penalties, log-probs, seeds and the live audit, over those without.

    python benchmarks/feature_costs.py --output benchmarks/results/feature_costs_h200.json

Two engines of each shape run side by side, one of them audited (`--audit-rate 0.01`), one not, and one of them is busy
at a time. Every round measures every kind of request on the engine that serves it; medians of the rounds are compared.
`greedy` and `sampled` ask for nothing more. `all` asks for the three penalties, the log-probs of five tokens at every
position and a seed, and is answered by the audited engine. The 8B shape has random weights: it accepts next to no
guess, which changes no step's time.
"""

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.bench.methods import Tokens, run_load, warm_up
from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.bench.workload import random_prompts
from overlap_spec.config.fields import config_from
from overlap_spec.engine import Engine
from overlap_spec.messages import LogProbParams, SamplingParams

SHAPES = Path(__file__).parent / "shapes"
CHAIN = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
BOUNDS = {
    "speculative_num_draft_tokens": 4,
    "skip_tokenizer_init": True,
    "log_level": "warning",
    "max_running_requests": 32,
    "max_total_tokens": 65536,
    "context_length": 4096,
}
EIGHT_B = {
    "model_path": str(SHAPES / "llama-3.1-8b"),
    "load_format": "dummy",
    "speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3"),
}
ENGINES: dict[str, dict[str, Any]] = {"8b": CHAIN | BOUNDS | EIGHT_B, "smollm2": CHAIN | BOUNDS}
AUDIT_RATE = 0.01
NUM_TOKENS = 512  # short runs would be decided by the prompt of an audit that falls among them
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What requests ask for, what they are compared with, and whether they are audited."""

    asked: dict[str, Any]
    over: str = ""
    audited: bool = False


GREEDY, SAMPLED = {"temperature": 0.0, "seed": 0}, {"temperature": 1.0, "seed": 7}
LOG_PROBS = {"log_probs": LogProbParams(top=5)}
KINDS = {
    "greedy": Kind(GREEDY),
    "greedy, audited": Kind(GREEDY, over="greedy", audited=True),
    "greedy, penalties": Kind(GREEDY | PENALTIES, over="greedy"),
    "greedy, log-probs": Kind(GREEDY | LOG_PROBS, over="greedy"),
    "greedy, all": Kind(GREEDY | PENALTIES | LOG_PROBS, over="greedy", audited=True),
    "sampled": Kind(SAMPLED),
    "sampled, all": Kind(SAMPLED | PENALTIES | LOG_PROBS, over="sampled", audited=True),
}


async def measure(shape: str, batch_sizes: list[int], rounds: int, report: Row) -> None:
    """Adds a row for each batch size and kind."""
    flags = ENGINES[shape]
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(config_from(flags | {"audit_rate": 0.0})))]
        engines.append(await stack.enter_async_context(Engine(config_from(flags | {"audit_rate": AUDIT_RATE}))))
        report["run"] = report.get("run") or describe_engine(engines[0])
        report["settings"][shape] = describe_settings(engines[0])
        vocab_size = engines[0].settings.model.files.vocab_size
        for batch in batch_sizes:
            prompts, cold = random_prompts(batch, vocab_size), random_prompts(batch, vocab_size, first=1000)
            runs = await measure_kinds(engines, prompts, cold, rounds)
            report["rows"] += (rows := rows_of(shape, batch, runs))
            for row in rows:
                print(*(f"{row[name]:>18}" for name in ("shape", "batch", "kind", "step_ms", "ratio")), flush=True)


async def measure_kinds(
    engines: list[Engine], prompts: list[Tokens], cold: list[Tokens], rounds: int
) -> dict[str, list[Row]]:
    """Every kind's figures in every round, in an order that turns from round to round."""
    runs: dict[str, list[Row]] = {name: [] for name in KINDS}
    names = list(KINDS)
    for turn in range(rounds):
        for shift in range(len(names)):
            name = names[(turn + shift) % len(names)]
            kind = KINDS[name]
            client = engines[kind.audited].client
            sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **kind.asked)
            await warm_up(client, cold, SamplingParams(max_new_tokens=16, ignore_eos=True, **kind.asked))
            runs[name].append((await run_load(client, prompts, len(prompts), sampling)).figures)
    return runs


def rows_of(shape: str, batch: int, runs: dict[str, list[Row]]) -> list[Row]:
    """Medians, and their ratios."""
    steps = {name: statistics.median(run["step_ms"] for run in rows) for name, rows in runs.items()}
    return [
        {
            "shape": shape,
            "batch": batch,
            "kind": name,
            "step_ms": steps[name],
            "ratio": round(steps[name] / steps[KINDS[name].over or name], 4),
            "runs": rows,
        }
        for name, rows in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--shapes", default="8b,smollm2")
    parser.add_argument("--batch-sizes", default="1,32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    report: Row = {"benchmark": "feature_costs", "run": {}, "rounds": arguments.rounds, "settings": {}, "rows": []}
    for shape in arguments.shapes.split(","):
        sizes = [int(size) for size in arguments.batch_sizes.split(",")]
        asyncio.run(measure(shape, sizes, arguments.rounds, report))
        if arguments.output is not None:
            write_report(arguments.output, report)


if __name__ == "__main__":
    main()
