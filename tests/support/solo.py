"""Requests through a real executor, alone or together, without scheduler or processes: exactness on real weights."""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.messages import ResetSlot, SamplingParams
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor, StepHandle
from overlap_spec.worker.runner import Runner
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.warmup import capture_graphs, cuda_prompt_lengths, run_uncaptured, warm_up
from support.plans import SlotPart, plan_of

ROOM = 320  # tokens that each of them may take, prompt and steps in flight included
CHUNK_SLOTS = 8  # prompts in a prefill step: as many as a captured one holds


@dataclass(frozen=True)
class SoloAnswer:
    """Tokens cut where the request ends, and the whole run of every verify step, with what it verified (depth 1)."""

    tokens: list[int]
    runs: list[list[int]]
    guesses: list[list[int]]
    parents: list[list[int]]  # columns; of chains without meaning


class Solo:
    """An executor built from flags. `depth` steps are kept in flight; `graphs`: steps are CUDA graphs.

    `batch`: the most requests that run together.
    """

    def __init__(
        self, files: ModelFiles, depth: int = 1, graphs: bool = False, batch: int = 1, **flags: object
    ) -> None:
        room = max(2048, ROOM * batch)
        config = EngineConfig(max_total_tokens=room, max_running_requests=batch, **flags)
        has_cuda = flags.get("device") == "cuda"
        settings, _ = resolve(config, files, Machine(2, has_cuda))
        self.executor: Executor
        self._geometry: Geometry
        self.executor, self._geometry, _ = build(settings, lambda done, total: None)
        self.depth = depth
        self._eos = files.eos_token_ids
        self._captured: Runner = self.executor.eager
        if graphs:
            warm_up(self.executor, self._geometry, cuda_prompt_lengths(self._geometry))
            captures = capture_graphs(self.executor, self._geometry, settings.graph_batch_sizes)
            run_uncaptured(self.executor, self._geometry)
            self._captured = captures.runner

    def close(self) -> None:
        self.executor.close()

    def use_graphs(self, graphs: bool) -> None:
        """Replay what was captured, or launch it operation by operation; nothing may be in flight."""
        self.executor.use(self._captured if graphs else self.executor.eager)

    def answer(self, prompt: list[int], sampling: SamplingParams) -> SoloAnswer:
        """Decode until a stop id is drawn or max_new_tokens are out."""
        return self._together([prompt], sampling)[0]

    def answers(self, prompts: list[list[int]], sampling: SamplingParams, together: int) -> list[SoloAnswer]:
        """The same for many prompts, so many of them at once; steps get smaller as requests end."""
        groups = [prompts[first : first + together] for first in range(0, len(prompts), together)]
        return [answer for group in groups for answer in self._together(group, sampling)]

    def _together(self, prompts: list[list[int]], sampling: SamplingParams) -> list[SoloAnswer]:
        """One request per slot. A request that has ended sits in no later plan, as in the scheduler."""
        assert sampling.max_new_tokens is not None and len(prompts) <= self._geometry.num_slots
        stop_ids = () if sampling.ignore_eos else self._eos
        answers = [SoloAnswer(tokens, [], [], []) for tokens in self._prefill(prompts, sampling, stop_ids)]

        def ended(slot: int) -> bool:
            tokens = answers[slot].tokens
            return any(token in stop_ids for token in tokens) or len(tokens) >= sampling.max_new_tokens

        flight: deque[tuple[list[int], StepHandle]] = deque()
        while running := [slot for slot in range(len(prompts)) if not ended(slot)]:
            while len(flight) < self.depth:
                if self.depth == 1:
                    self._note_guesses(running, answers)
                flight.append((running, self._launch([SlotPart(slot) for slot in running])))
            slots, handle = flight.popleft()
            for slot, run in zip(slots, handle.wait().tokens, strict=True):
                if not ended(slot):
                    answers[slot].runs.append(run)
                    answers[slot].tokens.extend(run)
        for _, handle in flight:
            handle.wait()
        return [replace(a, tokens=_cut(a.tokens, stop_ids, sampling.max_new_tokens)) for a in answers]

    def _prefill(
        self, prompts: list[list[int]], sampling: SamplingParams, stop_ids: tuple[int, ...]
    ) -> list[list[int]]:
        """Give each prompt a slot and its share of the pages; returns the first token of each."""
        share = min((self._geometry.num_pages - 1) // len(prompts), self._geometry.num_page_columns)
        work = []
        for slot, prompt in enumerate(prompts):
            reset = ResetSlot(sampling, len(prompt), stop_ids, len(prompt) + sampling.min_new_tokens)
            pages = list(range(1 + slot * share, 1 + (slot + 1) * share))
            chunk = array("i", prompt).tobytes()
            work.append(SlotPart(slot=slot, new_pages=pages, tokens=chunk, reset=reset))
        steps = [work[first : first + CHUNK_SLOTS] for first in range(0, len(work), CHUNK_SLOTS)]
        return [tokens for step in steps for tokens in self._launch(step).wait().tokens]

    def _launch(self, work: list[SlotPart]) -> StepHandle:
        return self.executor.launch(plan_of(0, work, self._geometry.width))

    def _note_guesses(self, slots: list[int], answers: list[SoloAnswer]) -> None:
        """The guesses that the next step will verify."""
        windows, parents = (rows[:, 1:].tolist() for rows in (self.executor.slots.window, self.executor.slots.parents))
        for slot in slots:
            answers[slot].guesses.append(windows[slot])
            answers[slot].parents.append(parents[slot])


def _cut(tokens: list[int], stop_ids: tuple[int, ...], most: int) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: min(end, most)]


@dataclass(frozen=True)
class Divergence:
    """Where tokens first differ from the reference, and how close the reference's choice was."""

    prompt: int
    position: int
    margin: float


NEAR_TIE = 1e-3


def first_divergence(prompt: int, tokens: list[int], reference: list[int], margins: list[float]) -> Divergence | None:
    """Compare up to the shorter one's end."""
    for i, (ours, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if ours != theirs:
            return Divergence(prompt, i, margins[i])
    return None


def assert_equal_up_to_near_ties(
    rows: list[dict], answer: Callable[[list[int]], list[int]], num_tokens: int
) -> list[Divergence]:
    """Hold answers against reference rows; a divergence counts as none only at a near-tie, in 1 of 40 prompts."""
    return assert_answers_equal(rows, [answer(row["prompt_ids"]) for row in rows], num_tokens)


def assert_answers_equal(rows: list[dict], answers: list[list[int]], num_tokens: int) -> list[Divergence]:
    """The same for answers that are there already."""
    divergences = []
    for i, (row, answered) in enumerate(zip(rows, answers, strict=True)):
        reference, tokens = row["tokens"][:num_tokens], answered[:num_tokens]
        found = first_divergence(i, tokens, reference, row["margins"])
        if found is None:
            assert len(tokens) == len(reference), f"prompt {i}: another length"
        else:
            divergences.append(found)
    assert all(d.margin < NEAR_TIE for d in divergences), divergences
    assert len(divergences) <= max(1, len(rows) // 40), divergences
    return divergences
