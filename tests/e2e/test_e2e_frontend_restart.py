"""HTTP streams of all kinds whose frontend is killed or stopped go on with the text that they would have had anyway."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.command_line import Service
from support.http_streams import Round, bodies

from overlap_spec.runtime.actor import ROLES

Pause = tuple[int, float, float]  # the signal; until the first new token, and the longest pause of a stream: s
MOST_S, BUSY = 3.0, 4.0  # from a SIGKILL to the first new token; how many times longer it may take on busy cores


async def wait_ready(service: Service) -> None:
    deadline = time.monotonic() + 120
    while service.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGKILL, signal.SIGSTOP],
        pytest.param([signal.SIGKILL, signal.SIGSTOP] * 10, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
    ids=len,
)
def test_streams_go_on_at_another_frontend(
    tmp_path: Path,
    tiny_flags: tuple[str, ...],
    signals: list[int],
    capsys: pytest.CaptureFixture[str],
    record_summary: Callable[..., None],
) -> None:
    async def scenario() -> list[Pause]:
        flags = "--served-model-name", "tiny", "--max-recoveries", "100", "--watchdog-timeout", "5"
        rng, pauses = random.Random(len(signals)), list[Pause]()
        with Service(tmp_path, *tiny_flags, *flags, "--tool-call-parser", "hermes") as service:
            wanted = await Round(service.url).run()
            first = service.actors()
            for number in signals:
                kill = partial(os.kill, service.actors()["frontend"], number)
                disturbed = Round(service.url, rng.uniform(30, 400), kill)
                for (_, body), ours, theirs in zip(bodies(), await disturbed.run(), wanted, strict=True):
                    assert ours == theirs, body
                pauses.append((number, disturbed.until_new_s, disturbed.pause_s))
                await wait_ready(service)
            metrics = service.get("/metrics").text
            assert f"recoveries_total {len(signals)}" in metrics.replace(".0", "")
            last = service.actors()
            assert set(last) == set(ROLES) and all(last[role] == first[role] for role in ("scheduler", "worker"))
        return pauses

    pauses = asyncio.run(scenario())
    figures = {
        signal.Signals(kind).name: {
            "deaths": len(own := [each for each in pauses if each[0] == kind]),
            "until_new_token_s": [round(until_new_s, 2) for _, until_new_s, _ in own],
            "longest_pause_of_a_stream_s": [round(pause_s, 2) for *_, pause_s in own],
        }
        for kind in (signal.SIGKILL, signal.SIGSTOP)
    }
    record_summary("frontend_restart", {"streams": len(bodies()) + 1, "equal_to_undisturbed": len(pauses), **figures})
    with capsys.disabled():
        print("\nfrontend restarts:", figures)
    after_kills = [until_new_s for kind, until_new_s, _ in pauses if kind == signal.SIGKILL]
    assert min(after_kills) <= MOST_S and max(after_kills) <= BUSY * MOST_S, after_kills
