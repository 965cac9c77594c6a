"""Thousands of requests to a real server of a tiny model, with faults in turn, and nothing lost.

    python -m pytest tests/soak --seconds 3600 [--seed N] [--summaries FILE]     # an hour, by hand

Clients over HTTP and ZMQ read, read slowly, vanish, abort, and send what cannot be answered. The KV pool is tiny, so
requests are preempted. Rounds take turns with chains, trees and n-grams, with one and with two steps in flight. At the
end of each round every request was answered or refused, pages and slots are back, the memory of each process is flat,
descriptors and threads are as at the start, and sampled answers equal those of requests alone, without speculation.

In CI it has about a minute, one round: five minutes did not fit into CI's 25.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Service
from support.soak.run import METHODS, Round, flags_of

CI_S = 25.0
ROUND_S = 180.0
STARTS_S = 25.0  # of a round: start, warm-up, end

Record = Callable[..., None]


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_soak(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, soak_model: Path, record_summary: Record
) -> None:
    seconds, seed = float(request.config.getoption("--seconds") or CI_S), int(request.config.getoption("--seed"))
    rounds = max(1, round(seconds / ROUND_S))
    ends_at = time.monotonic() + seconds
    rows = []
    for number in range(rounds):
        left = (ends_at - time.monotonic()) / (rounds - number) - STARTS_S
        rows.append(run_round(tmp_path_factory.mktemp("soak"), soak_model, seed + number, max(left, 5.0)))
    record_summary("soak", {"seed": seed, "rounds": rows})


def run_round(directory: Path, model: Path, seed: int, seconds: float) -> dict[str, Any]:
    """One service, whose method and depth follow from the seed."""
    method, depth = sorted(METHODS)[seed % len(METHODS)], 2 - seed // len(METHODS) % 2
    with Service(directory, *flags_of(model, method, depth)) as service:
        return {"method": method, "steps_in_flight": depth, **asyncio.run(Round(service, seed, seconds).run())}
