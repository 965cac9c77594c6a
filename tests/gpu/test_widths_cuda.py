"""Steps of changing width as CUDA graphs, on SmolLM2 in float32: exact, without a sync, and as cheap as they claim.

Run by hand on a GPU: `pytest -m cuda tests/gpu/test_widths_cuda.py`.
"""

import json
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.plans import SlotPart, plan_of, windows
from support.solo import Solo, assert_answers_equal

from overlap_spec.config import ModelFiles
from overlap_spec.messages import ResetSlot, SamplingParams
from overlap_spec.speculative.interfaces import ABSORBED_ROWS
from overlap_spec.speculative.proposers import autoregressive
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer
from overlap_spec.worker.graphs import GraphRunner
from overlap_spec.worker.startup.geometry import MAX_DEFERRED
from overlap_spec.worker.startup.step_times import COST_ROUNDS, QUEUED_STEPS, _step_seconds, measure_steps

ROWS = json.loads((Path(__file__).parent.parent / "data" / "greedy64.json").read_text())["rows"]
NUM_TOKENS = 64
CUDA: dict[str, Any] = {"device": "cuda", "graphs": True}
LEAST_ROUNDS, MOST_ROUNDS = 3, 30  # of timing: where others use the GPU too, most rounds are spoilt
AS_PLAIN = 1.03  # plus what is kept for the draft


def answer(engine: Solo, prompt: list[int], seed: int) -> list[int]:
    """Greedy tokens; every step has a width drawn from a generator. They run past the end of the turn."""
    return decode(engine, prompt, random_widths(engine, random.Random(seed)))


def random_widths(engine: Solo, rng: random.Random) -> Iterator[int]:
    while True:
        width = rng.choice([1, *engine._geometry.step_widths])
        yield from [width] * rng.choice([1, 2, 20 if width == 1 else 4])


def decode(engine: Solo, prompt: list[int], widths: Iterable[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Greedy tokens of steps of these widths. The prompt proposes for the first."""
    first, *widths = islice(widths, num_tokens + 1)
    pages = list(range(1, engine._geometry.num_pages))[: engine._geometry.num_page_columns]
    reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(prompt), (), len(prompt))
    work = SlotPart(slot=0, new_pages=pages, tokens=array("i", prompt).tobytes(), reset=reset)
    tokens = engine.executor.launch(plan_of(0, [work], first)).wait().tokens[0]
    for width in widths:
        if len(tokens) >= num_tokens:
            break
        tokens += engine.executor.launch(windows(0, [0], width)).wait().tokens[0]
    return tokens[:num_tokens]


def draft_rows(engine: Solo, length: int) -> torch.Tensor:
    """K and V of the draft's first rows of the last request. Shapes: -> [2, length, nkv, d]."""
    proposer, page_size = engine.executor.decode_step.method.proposer, engine._geometry.page_size
    assert isinstance(proposer, AutoregressiveProposer)
    cache = proposer._head._run_layers._attention.cache  # of EAGLE-3's one layer
    return torch.stack([kv[0].flatten(0, 1)[page_size : page_size + length] for kv in (cache.k, cache.v)]).clone()


@sync_mode_warns
def test_any_sequence_of_widths_is_plain_decoding(files: ModelFiles) -> None:
    engine = Solo(files, dtype="float32", **CUDA)
    try:
        answer(engine, ROWS[0]["prompt_ids"], seed=99)
        with synchronization_is_an_error():
            answers = [answer(engine, row["prompt_ids"], i) for i, row in enumerate(ROWS[:10])]
    finally:
        engine.close()
    to_end_of_turn = [tokens[: len(row["tokens"])] for tokens, row in zip(answers, ROWS, strict=False)]
    assert_answers_equal(ROWS[:10], to_end_of_turn, NUM_TOKENS)


def test_after_narrow_steps_the_draft_knows_what_it_knows_after_wide_ones(files: ModelFiles) -> None:
    engine, prompt = Solo(files, dtype="float32", **CUDA), ROWS[0]["prompt_ids"]
    length = len(prompt) + NUM_TOKENS // 2  # before the rows that the last step has changed
    try:
        wide = decode(engine, prompt, repeat(engine._geometry.width)), draft_rows(engine, length)
        narrow = decode(engine, prompt, chain(repeat(1, 2 * ABSORBED_ROWS + 10), repeat(engine._geometry.width)))
        assert wide[0] == narrow
        torch.testing.assert_close(draft_rows(engine, length), wide[1], rtol=1e-3, atol=1e-3)
    finally:
        engine.close()


def test_of_windows_one_row_is_read_and_guesses_are_those_of_all(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    guesses, prompts = [], [row["prompt_ids"] for row in ROWS[:4]]
    for few_rows in (autoregressive.FEW_ROWS, 0):
        monkeypatch.setattr(autoregressive, "FEW_ROWS", few_rows)
        engine = Solo(files, dtype="float32", **CUDA)
        try:
            windows_after = [
                (decode(engine, prompt, repeat(engine._geometry.width)), engine.executor.slots.window[0].tolist())
                for prompt in prompts
            ]
        finally:
            engine.close()
        guesses.append(windows_after)
    assert guesses[0] == guesses[1]


def count_replays(engine: Solo) -> list[int]:
    """The number of replays of the graph with which the draft catches up, from now on."""
    assert isinstance(engine._captured, GraphRunner)
    graphs, counted = engine._captured._captured, [0]
    (shape,) = (shape for shape in graphs if shape.width == 0 and shape.slots == 1)
    replay = graphs[shape].layers

    def replayed() -> None:
        counted[0] += 1
        replay()

    graphs[shape] = replace(graphs[shape], layers=replayed)
    return counted


def test_rows_that_wait_are_absorbed_by_as_many_replays_as_they_need(files: ModelFiles) -> None:
    """Also if the ring was full in between, after which narrow steps go on."""
    engine, prompt, num_tokens = Solo(files, dtype="float32", **CUDA), ROWS[0]["prompt_ids"], MAX_DEFERRED + 36
    width, length = engine._geometry.width, len(prompt) + num_tokens - 8  # before the rows that the last step changes
    try:
        assert engine._geometry.max_deferred == MAX_DEFERRED
        wide, replays = (
            (decode(engine, prompt, repeat(width), num_tokens), draft_rows(engine, length)),
            count_replays(engine),
        )
        for num_narrow in (1, ABSORBED_ROWS, ABSORBED_ROWS + 1, 40, MAX_DEFERRED, MAX_DEFERRED + 1, MAX_DEFERRED + 20):
            replays[0] = 0
            narrow = decode(engine, prompt, chain(repeat(1, num_narrow + 1), repeat(width)), num_tokens)
            full, rest = divmod(num_narrow - 1, MAX_DEFERRED)
            assert replays[0] == full * MAX_DEFERRED // ABSORBED_ROWS + rest // ABSORBED_ROWS + 1, num_narrow
            assert wide[0] == narrow
            torch.testing.assert_close(draft_rows(engine, length), wide[1], rtol=1e-3, atol=1e-3)
    finally:
        engine.close()


def test_a_step_of_width_1_costs_what_plain_decoding_does(files: ModelFiles, record_summary) -> None:
    """The quickest of steps that take turns, until those of both are as quick as they are undisturbed."""
    engine = Solo(files, dtype="bfloat16", **CUDA)
    plain = Solo(files, dtype="bfloat16", speculative_algorithm="NONE", **CUDA)
    seconds, alone = [float("inf")] * len(engine._geometry.step_widths), float("inf")
    try:
        for count in range(MOST_ROUNDS):
            if count >= LEAST_ROUNDS and seconds[0] < AS_PLAIN * alone and seconds[0] < seconds[-1]:
                break
            costs = measure_steps(engine.executor, engine._geometry, (1,))
            seconds = list(map(min, seconds, costs.seconds[0]))
            for _ in range(COST_ROUNDS):
                alone = min(alone, _step_seconds(plain.executor, plain._geometry, 1, 1, QUEUED_STEPS))
    finally:
        engine.close()
        plain.close()
    figures = {"plain_ms": round(1000 * alone, 4), "width_ms": str([round(1000 * s, 4) for s in seconds])}
    record_summary("step_widths_h200", figures, torch.cuda.get_device_name())
    assert seconds[0] < AS_PLAIN * alone and seconds[0] < seconds[-1]
