"""Compares ways of drawing and verifying guesses at temperature > 0, by accept length on the 20 chats.

    python benchmarks/draft_noise.py --output benchmarks/results/draft_noise_cpu.json

shared: with the noise that the target will use, as the engine does; greedy: the draft's argmax; independent: with noise
of another seed. All three are verified by matching and commit the same tokens, which the script checks; only accept
length differs. rejection: drawn from the draft and verified by rejection sampling
(--speculative-use-rejection-sampling), which keeps the distribution but commits other tokens.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _tests_path import ROOT
from support.solo import Solo
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams
from overlap_spec.sampling.context import SAMPLING_WORK, Sampling
from overlap_spec.speculative.interfaces import Proposer, SlotBatch

NUM_TOKENS = 64
TEMPERATURES = (0.7, 1.0)
WAYS: dict[str, Callable[[Sampling], Sampling]] = {
    "shared": lambda sampling: sampling,
    "greedy": lambda sampling: dataclasses.replace(sampling, work=SAMPLING_WORK[0]),
    "independent": lambda sampling: dataclasses.replace(sampling, seed=sampling.seed + 1),
}


class OtherDraws:
    """A proposer whose guesses are drawn another way; everything else is the proposer's own."""

    def __init__(self, proposer: Proposer, way: Callable[[Sampling], Sampling]) -> None:
        self._proposer = proposer
        self._way = way
        self.prefill, self.extend = proposer.prefill, proposer.extend
        self.defer, self.catch_up = proposer.defer, proposer.catch_up

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Tensor:
        drawn = dataclasses.replace(batch, sampling=self._way(batch.sampling))
        return self._proposer.propose(drawn, learnt, num_guesses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--num-seeds", type=int, default=1, help="answers to each chat")
    arguments = parser.parse_args()
    rows = json.loads((ROOT / "tests/data/greedy64.json").read_text())["rows"][:20] * arguments.num_seeds
    figures = by_matching(rows, arguments.num_threads) + by_rejection(rows, arguments.num_threads)
    run = describe_run("cpu", arguments.num_threads)
    write_report(arguments.output, {"benchmark": "draft_noise", "run": run, "figures": figures})


def by_matching(rows: list[dict[str, Any]], num_threads: int) -> list[dict[str, Any]]:
    """The three ways of drawing guesses."""
    solo = start(num_threads)
    step = solo.executor.decode_step
    method = step.method
    figures = []
    for temperature in TEMPERATURES:
        committed: dict[str, list[list[int]]] = {}
        for name, way in WAYS.items():
            step.method = dataclasses.replace(method, proposer=OtherDraws(method.proposer, way))
            figure, committed[name] = measure(solo, rows, temperature, name)
            figures.append(figure)
        assert committed["greedy"] == committed["shared"] == committed["independent"]
    solo.close()
    return figures


def by_rejection(rows: list[dict[str, Any]], num_threads: int) -> list[dict[str, Any]]:
    """Guesses with coins of their own."""
    solo = start(num_threads, speculative_use_rejection_sampling=True)
    figures = [measure(solo, rows, temperature, "rejection")[0] for temperature in TEMPERATURES]
    solo.close()
    return figures


def start(num_threads: int, **flags: object) -> Solo:
    """The default target and head; its accept length does not depend on the number of threads."""
    solo = Solo(resolve_model(EngineConfig()), device="cpu", **flags)
    torch.set_num_threads(num_threads)  # after the engine has set its own
    return solo


def measure(
    solo: Solo, rows: list[dict[str, Any]], temperature: float, name: str
) -> tuple[dict[str, Any], list[list[int]]]:
    """One way at one temperature: its figure, and the tokens."""
    answers = [
        solo.answer(row["prompt_ids"], SamplingParams(max_new_tokens=NUM_TOKENS, temperature=temperature, seed=i))
        for i, row in enumerate(rows)
    ]
    runs = [len(run) for answer in answers for run in answer.runs]
    figure = {
        "temperature": temperature,
        "draws": name,
        "accept_length": statistics.mean(runs),
        "standard_error": statistics.stdev(runs) / len(runs) ** 0.5,
        "verify_steps": len(runs),
    }
    print(figure, flush=True)
    return figure, [answer.tokens for answer in answers]


if __name__ == "__main__":
    main()
