"""What a step takes when requests of one batch are speculated for, are not, or half of them are.

    python benchmarks/mixed_speculation.py --output benchmarks/results/mixed_speculation_h200.json
    python benchmarks/mixed_speculation.py --case smollm2 --batch-sizes 2,8

One engine of fixed numbers of draft steps serves batches of random prompts. All requests of a batch start together, and
those that are speculated for answer as many more tokens as a step of theirs commits, so that all end at about the same
time. Each repeat measures the three mixtures in turn. A step's time is the engine's own: device time and gaps of decode
steps, between two reports. `over_slower`: half and half over the slower of the other two.
"""

import argparse
import asyncio
import statistics
from typing import Any

from msgspec.structs import replace
from width_policy import SHAPES, numbers

from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.bench.workload import random_prompts
from overlap_spec.client import Client
from overlap_spec.config.fields import config_from
from overlap_spec.engine import Engine
from overlap_spec.messages import SamplingParams, Speculative, Stats

EAGLE3 = {"speculative_algorithm": "EAGLE3", **numbers(3, 1, 4)}
CASES: dict[str, dict[str, Any]] = {
    "8b": EAGLE3
    | {
        "model_path": str(SHAPES / "llama-3.1-8b"),
        "load_format": "dummy",
        "speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3"),
        "speculative_simulate_acc_len": (2.5,),
    },
    "smollm2": EAGLE3,
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
}
TOKENS_PER_STEP = {"8b": 2.5, "smollm2": 1.5, "ngram": 1.3}  # committed by requests with speculation, about
MIXTURES = {"on": 0.0, "half": 0.5, "off": 1.0}  # the share of requests without speculation
ROOM = 1024  # positions for a request: its prompt, its answer, and windows in flight
POLL_S = 0.01
WARM_UP_ROWS = 1000  # random prompts from that row on are never measured

Row = dict[str, Any]


async def measure(client: Client, prompts: list[list[int]], share_off: float, lengths: tuple[int, int]) -> float:
    """Mean milliseconds of a decode step. `lengths`: tokens of answers without speculation, and with it."""
    plain = SamplingParams(max_new_tokens=lengths[0], temperature=0.0, seed=0, ignore_eos=True)
    sampling = replace(plain, max_new_tokens=lengths[1])
    plain = replace(plain, speculative=Speculative(num_steps=0))
    num_off = round(share_off * len(prompts))
    before = await at_rest(client)
    asked = [plain if index < num_off else sampling for index in range(len(prompts))]
    await asyncio.gather(*(client.complete(prompt, each) for prompt, each in zip(prompts, asked, strict=True)))
    after = await at_rest(client)
    return (
        1000
        * (after.decode_time_total - before.decode_time_total)
        / (after.decode_steps_total - before.decode_steps_total)
    )


async def at_rest(client: Client) -> Stats:
    """The counters once nothing runs, with the caches empty."""
    while not await client.flush_cache():
        await asyncio.sleep(POLL_S)
    return await client.stats()


async def measure_case(case: str, batch_sizes: list[int], num_steps: int, report: Row) -> None:
    """Adds one row for each batch size to the report."""
    most, lengths = max(batch_sizes), (num_steps, round(num_steps * TOKENS_PER_STEP[case]))
    bounds = {"max_running_requests": most, "max_total_tokens": most * ROOM, "log_level": "warning"}
    config = config_from(bounds | {"context_length": ROOM, "skip_tokenizer_init": True} | CASES[case])
    async with Engine(config) as engine:
        report["run"], report["settings"] = describe_engine(engine), describe_settings(engine)
        vocab_size = engine.settings.model.files.vocab_size
        for batch in batch_sizes:
            await measure(engine.client, random_prompts(batch, vocab_size, first=WARM_UP_ROWS), 0.5, lengths)
            prompts = random_prompts(batch, vocab_size)
            runs: dict[str, list[float]] = {name: [] for name in MIXTURES}
            for _ in range(report["repeats"]):
                for name, share_off in MIXTURES.items():
                    runs[name].append(await measure(engine.client, prompts, share_off, lengths))
            report["rows"].append(row_of(case, batch, runs))
            print(report["rows"][-1], flush=True)


def row_of(case: str, batch: int, runs: dict[str, list[float]]) -> Row:
    """Medians, and every run."""
    step_ms = {name: round(statistics.median(times), 4) for name, times in runs.items()}
    over = round(step_ms["half"] / max(step_ms["on"], step_ms["off"]), 4)
    return {"case": case, "batch": batch, "step_ms": step_ms, "over_slower": over, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--case", default="8b", choices=CASES)
    parser.add_argument("--batch-sizes", default="2,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=128, help="decode steps of a batch, about")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    report: Row = {"benchmark": "mixed_speculation", "repeats": arguments.repeats, "rows": []}
    asyncio.run(measure_case(arguments.case, sizes, arguments.num_steps, report))
    if arguments.output is not None:
        write_report(arguments.output, report)


if __name__ == "__main__":
    main()
