"""Engines of two ranks on two GPUs, in float32: one rank's answers, with every method, and while ranks die and hang.

pytest tests/gpu/test_ranks_cuda.py -s --summaries FILE                      both GPUs at once, so without -n
pytest tests/gpu/test_ranks_cuda.py -s -k die --seconds 210 --seed 1 --summaries FILE   over 300 requests
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranked_answers import METHODS, compared, of_shape, of_tiny
from support.soak.deaths import death_run, write_models

SHORT_S = 60.0
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that one process sees: run it without -n"),
    pytest.mark.timeout(900),
]

Record = Callable[..., None]


def test_a_true_shape_answers_as_one_rank_does(record_summary: Record) -> None:
    """Llama-3.2-1B's."""
    figures = asyncio.run(compared(*of_shape("cuda"), tuple(METHODS)))
    record_summary("ranks_1b_shape", figures, torch.cuda.get_device_name())
    assert figures["differ"] == dict.fromkeys(METHODS, 0)


def test_guesses_that_are_right_change_no_answer(tmp_path: Path, record_summary: Record) -> None:
    figures = asyncio.run(compared(*of_tiny("cuda", write_models(tmp_path / "model")), tuple(METHODS)))
    record_summary("ranks_tiny", figures, torch.cuda.get_device_name())
    assert figures["differ"] == dict.fromkeys(METHODS, 0)
    assert figures["accept_length"]["chain"] > 1.2 and figures["accept_length"]["tree"] > 1.2


def test_answers_are_a_plain_servers_while_ranks_die(
    request: pytest.FixtureRequest, tmp_path: Path, record_summary: Record
) -> None:
    """Seeded requests of all parameters; each rank is killed and stopped in turn."""
    seconds, seed = float(request.config.getoption("--seconds") or SHORT_S), int(request.config.getoption("--seed"))
    figures = death_run(tmp_path, "cuda", seed, seconds, ranks=2)
    record_summary("ranks_deaths", {"seed": seed, **figures}, torch.cuda.get_device_name())
    print({name: figures[name] for name in ("requests", "differ", "ended_early", "signals")}, flush=True)
