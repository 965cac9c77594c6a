"""Which guesses should a draft make at temperature > 0? Accept length on the 20 chats, three ways of drawing them.

    python benchmarks/draft_noise.py --output benchmarks/results/draft_noise_cpu.json

shared: with the noise that the target will use (what the engine does); greedy: the draft's argmax; independent: with
noise of another seed. All three commit the same tokens, which the script checks; only accept length differs.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from solo import Solo  # noqa: E402  (a script: the path comes first)

from overlap_spec.bench.report import describe_run, write_report  # noqa: E402
from overlap_spec.config import EngineConfig  # noqa: E402
from overlap_spec.hub import resolve_model  # noqa: E402
from overlap_spec.messages import SamplingParams  # noqa: E402
from overlap_spec.spec.interfaces import Proposer  # noqa: E402
from overlap_spec.spec.types import SAMPLING_WORK, Sampling, SlotBatch  # noqa: E402

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

    def propose(self, batch: SlotBatch) -> Tensor:
        return self._proposer.propose(dataclasses.replace(batch, sampling=self._way(batch.sampling)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    rows = json.loads((ROOT / "tests/data/greedy64.json").read_text())["rows"][:20]
    solo = Solo(resolve_model(EngineConfig()), device="cpu")
    step = solo.executor.decode_step
    method = step.method
    figures = []
    for temperature in TEMPERATURES:
        committed: dict[str, list[list[int]]] = {}
        for name, way in WAYS.items():
            step.method = dataclasses.replace(method, proposer=OtherDraws(method.proposer, way))
            answers = [
                solo.answer(
                    row["prompt_ids"], SamplingParams(max_new_tokens=NUM_TOKENS, temperature=temperature, seed=i)
                )
                for i, row in enumerate(rows)
            ]
            committed[name] = [answer.tokens for answer in answers]
            runs = [len(run) for answer in answers for run in answer.runs]
            figures.append({"temperature": temperature, "draws": name, "accept_length": sum(runs) / len(runs)})
            print(figures[-1], flush=True)
        assert committed["greedy"] == committed["shared"] == committed["independent"]
    solo.close()
    run = describe_run("cpu", torch.get_num_threads())
    run["command"] = f"python benchmarks/draft_noise.py --output {arguments.output}"
    write_report(arguments.output, {"benchmark": "draft_noise", "run": run, "figures": figures})


if __name__ == "__main__":
    main()
