"""The simulated engine with a draft: steps of each width take what they took on an H200, and commit what guesses let.

A step as wide as the one before it has guesses, a wider one too few, and one after plain steps none. Prompts are as
long as those of `benchmarks/never_slower.py`: eight of them fill a captured step.
"""

import random
from typing import Any

from msgspec.structs import replace

from overlap_spec.config import SchedulerSettings
from overlap_spec.messages import Phase, StepPlan, StepResult, TreePaths
from overlap_spec.worker.graphs import two_part_sizes
from support.fake_device import make_ready
from support.plans import parts_of
from support.played_engine import Synthetic
from support.simulated_engine import DeviceCosts, SimulatedEngine
from support.step_tables import LEVELS, SERVED, START, WIDTHS, between, costs_of

SLOTS, GAP_S = 256, 0.025
ROW_FLOP, MOST_ROWS = 14 * 10**9, 1400  # of an 8B model's layers, and rows of a captured step
# A prompt's time, over that without a draft: all rows go through the head's `fc` and its product of queries, keys and
# values, 1.5% of the target's layers. Measured were 99.06 ms for 98.23 (32 prompts of 128).
DRAFTED = 1.015
SLOWER = 1.01  # products than alone: first tokens of 32 to 256 prompts took 90, 183, 368 and 728 ms
DRAFTED_BESIDE_S = 0.0005  # the same of a step of windows and prompts, 1,024 rows, and one guess of each new window
# The same of prompts after which nothing is proposed: `fc`, keys and values. Not measured: by their operations.
ABSORBED, ABSORBED_BESIDE_S = 1.01, 0.00025
UNDRAFTED = 0.996  # a plain step's time in an engine without a draft, over one with it


class WidthsEngine(SimulatedEngine):
    """Default numbers (EAGLE-3's tree) with synthetic acceptance of `mean` tokens; None: plain decoding, `NONE`.

    `dearer`: times what a wide step takes longer than a plain one.
    """

    def __init__(self, mean: float | None = None, seed: int = 0, dearer: float = 1.0) -> None:
        costs = DeviceCosts(SLOWER, two_parts=two_part_sizes(1, SLOTS, 8192, ROW_FLOP, MOST_ROWS))
        drafts: dict[str, Any] = {"width": 1}
        if mean is not None:
            drafts = {"width": WIDTHS[-1], "step_widths": WIDTHS, "step_costs": costs_of(START), "num_steps": 5}
        ready = make_ready(
            **drafts, num_slots=SLOTS, num_pages=16_385, page_size=16, max_len=8192, chunk_tokens=8192,
            prefill_costs=costs.told(), two_parts=costs.two_parts,
        )  # fmt: skip
        super().__init__(
            ready, SchedulerSettings(SLOTS, 2, None, None, max_gap_s=GAP_S, windows_with_prompts=True), costs
        )
        self._rng = random.Random(seed)
        self._draft = None if mean is None else Synthetic(mean, LEVELS[mean])
        self._dearer = dearer
        self.drafts: dict[int, Synthetic] = {}  # of some slots, where they differ
        self._guesses: dict[int, int] = {}  # by slot
        self._judged_rows: list[tuple[int, int, list[int]]] = []  # of the last windows
        self._num_calls = 0

    def call(self, num_requests: int, num_tokens: int, num_prompt: int = 128) -> float:
        """Requests that come together, and all end. Returns their tokens per second."""
        first, begin = 1000 * self._num_calls, self.now
        self._num_calls += 1
        for i in range(num_requests):
            self.ask(begin + 0.002 * i / num_requests, first + i, num_prompt, num_tokens)
        self.run()
        return num_requests * num_tokens / (self.now - begin)

    def _start(self, plan: StepPlan) -> None:
        beside_s = DRAFTED_BESIDE_S if plan.first_width > 1 else ABSORBED_BESIDE_S
        self.drafts_s = 0.0 if self._draft is None else beside_s
        super()._start(plan)

    def _seconds(self, plan: StepPlan) -> tuple[float, float]:
        if plan.phase is Phase.PREFILL:
            seconds, launch_s = super()._seconds(plan)
            drafted = DRAFTED if plan.width > 1 else ABSORBED
            return seconds * (1.0 if self._draft is None else drafted), launch_s
        ms = between(SERVED, len(plan.slots))
        taken = ms[0] + self._dearer * (ms[WIDTHS.index(plan.width)] - ms[0])
        return taken / 1000 * (UNDRAFTED if self._draft is None else 1.0), 0.0005

    def _tokens(self, plan: StepPlan) -> list[list[int]]:
        runs = []
        self._judged_rows = []
        for work in parts_of(plan):
            run, width = 1, plan.width
            if work.tokens:
                self._lengths[work.slot] = work.start + len(work.tokens) // 4
                run = int(work.next_token < 0)
            elif self._draft is not None:
                guessed = min(self._guesses[work.slot], width - 1)
                accepted, num_proposed, path = self.drafts.get(work.slot, self._draft).judged(guessed, self._rng)
                self._judged_rows.append((guessed, num_proposed, path))
                run += accepted
            self._guesses[work.slot] = width - 1
            self._lengths[work.slot] += run
            runs.append([5] * run)
        return runs

    def _judged(self, plan: StepPlan, result: StepResult) -> StepResult:
        if not self._judged_rows:
            return replace(result, num_proposed=[0] * len(result.tokens))
        lasts, proposed, paths = map(list, zip(*self._judged_rows, strict=True))
        return replace(result, num_proposed=proposed, extensions=(TreePaths(paths, lasts),))
