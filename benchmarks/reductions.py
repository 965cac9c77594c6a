"""Times reductions between two GPUs by size: one-shot, two-shot and NCCL, and what the engine takes.

    python benchmarks/reductions.py --output FILE        about 60 s on two GPUs
    python benchmarks/reductions.py --ranks 4            on four

Each size is captured in a graph of 64 reductions, as many as a step of an 8B has; a figure is the least of several
replays, on the slowest rank, divided by 64. A replay begins at the same time on all ranks, as they wait for each other.
The limits of `models/layers/parallel.py`'s table follow from these rows.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from overlap_spec_kernels import one_shot_all_reduce, two_shot_all_reduce
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.models.layers.parallel import CAPACITY, SymmetricCommunicator, form_of

SIZES = tuple((rows, columns) for columns in (4096, 8192) for rows in (1, 2, 4, 8, 32, 128, 8192))
REDUCTIONS, ROUNDS = 64, 10
LIMIT_S = 300.0


def run_rank(rank: int, ranks: int, directory: str) -> None:
    """One rank's figures, in a file of its own."""
    torch.cuda.set_device(rank)
    communicator = SymmetricCommunicator(rank, ranks, Path(directory) / "store")
    rows = [measure(communicator, *size) for size in SIZES]
    communicator.close()
    (Path(directory) / f"{rank}.json").write_text(json.dumps(rows))


def measure(communicator: SymmetricCommunicator, rows: int, columns: int) -> dict[str, Any]:
    """Microseconds of a sum, by form."""
    part = torch.ones((rows, columns), dtype=torch.bfloat16, device="cuda")
    forms: dict[str, Callable[[Tensor], Tensor]] = {"nccl": communicator.nccl_all_reduce}
    if part.nbytes <= CAPACITY:
        peers = communicator.peers
        forms["one_shot"] = lambda x: one_shot_all_reduce(x, peers)
        forms["two_shot"] = lambda x: two_shot_all_reduce(x, peers)
    row: dict[str, Any] = {"rows": rows, "columns": columns, "bytes": part.nbytes}
    row["taken"] = form_of(part.nbytes, communicator.ranks).value
    return row | {f"{name}_us": microseconds(run, part) for name, run in forms.items()}


def microseconds(run: Callable[[Tensor], Tensor], part: Tensor) -> float:
    """Of one sum in a graph of many."""
    run(part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REDUCTIONS):
            run(part)
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run(part)  # puts the ranks in step
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(1000 * min(times) / REDUCTIONS, 2)


def slowest(per_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each size the times of the rank that took longest."""
    return [
        {name: max(row[name] for row in rows) if name.endswith("_us") else value for name, value in rows[0].items()}
        for rows in zip(*per_rank, strict=True)
    ]


def spawned(ranks: int) -> list[list[dict[str, Any]]]:
    """The figures of all ranks. Raises: SystemExit if one of them fails or does not end."""
    with tempfile.TemporaryDirectory() as directory:
        states = exit_states(run_rank, ranks, directory)
        if any(states):
            raise SystemExit(f"ranks ended with {states}")
        if None in states:
            raise SystemExit(f"a rank did not end in {LIMIT_S:.0f} s: {states}")
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def exit_states(run: Callable[[int, int, str], None], ranks: int, directory: str) -> list[int | None]:
    """Run each rank in a process. Returns what they ended with; None: one did not end in LIMIT_S, and was killed."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, ranks, directory)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    states = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return states


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    arguments = parser.parse_args()
    count = torch.cuda.device_count()
    if count < arguments.ranks:
        print(f"reductions between {arguments.ranks} GPUs: this machine has {count}", file=sys.stderr)
        return 2
    rows = slowest(spawned(arguments.ranks))
    for row in rows:
        times = ", ".join(f"{name} {value:8.2f}" for name, value in row.items() if name.endswith("_us"))
        print(f"{row['rows']:5} x {row['columns']}: {times}; taken: {row['taken']}", flush=True)
    if arguments.output:
        run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
        report = {"benchmark": "reductions", "run": run, "ranks": arguments.ranks, "rows": rows}
        write_report(arguments.output, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
