"""One request at a time through a real executor, without scheduler or processes: for exactness on real weights."""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.messages import Phase, ResetSlot, SamplingParams, SlotWork, StepPlan
from overlap_spec.resolve import resolve
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor, StepHandle
from overlap_spec.worker.geometry import Geometry
from overlap_spec.worker.warmup import capture_graphs, cuda_prompt_lengths, warm_up


@dataclass(frozen=True)
class SoloAnswer:
    """Tokens cut where the request ends, and the whole run of every verify step."""

    tokens: list[int]
    runs: list[list[int]]
    guesses: list[list[int]]


class Solo:
    """An executor built from flags. `depth` steps are kept in flight; `graphs`: decode steps are CUDA graphs."""

    def __init__(self, files: ModelFiles, depth: int = 1, graphs: bool = False, **flags: object) -> None:
        config = EngineConfig(max_total_tokens=2048, max_running_requests=1, **flags)  # type: ignore[arg-type]
        has_cuda = flags.get("device") == "cuda"
        settings, _ = resolve(config, files, Machine(2, has_cuda))
        self.executor: Executor
        self._geometry: Geometry
        self.executor, self._geometry, _ = build(settings, lambda done, total: None)
        self._depth = depth
        self._eos = files.eos_token_ids
        if graphs:
            warm_up(self.executor, self._geometry, cuda_prompt_lengths(self._geometry))
            capture_graphs(self.executor, self._geometry, settings.graph_batch_sizes)

    def close(self) -> None:
        self.executor.close()

    def answer(self, prompt: list[int], sampling: SamplingParams) -> SoloAnswer:
        """Decode until a stop id is drawn or max_new_tokens are out."""
        assert sampling.max_new_tokens is not None
        stop_ids = () if sampling.ignore_eos else self._eos
        reset = ResetSlot(sampling, len(prompt), stop_ids, len(prompt) + sampling.min_new_tokens)
        pages = list(range(1, self._geometry.num_pages))[: self._geometry.num_page_columns]
        chunk = array("i", prompt).tobytes()
        work = SlotWork(slot=0, new_pages=pages, prompt_chunk=chunk, reset=reset)
        tokens = self._launch(Phase.PREFILL, work).wait().tokens[0]
        runs: list[list[int]] = []
        guesses: list[list[int]] = []
        flight: deque[StepHandle] = deque()

        def ended() -> bool:
            return any(token in stop_ids for token in tokens) or len(tokens) >= sampling.max_new_tokens

        while not ended():
            while len(flight) < self._depth:
                if self._depth == 1:
                    guesses.append(self._window())
                flight.append(self._launch(Phase.DECODE, SlotWork(slot=0)))
            runs.append(flight.popleft().wait().tokens[0])
            tokens += runs[-1]
        for handle in flight:
            handle.wait()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
        return SoloAnswer(tokens[: min(end, sampling.max_new_tokens)], runs, guesses)

    def _launch(self, phase: Phase, work: SlotWork) -> StepHandle:
        return self.executor.launch(StepPlan(0, phase, [work], self._geometry.width))

    def _window(self) -> list[int]:
        """The guesses that the next step will verify."""
        return self.executor.slots.window[0, 1:].tolist()


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
    divergences = []
    for i, row in enumerate(rows):
        reference = row["tokens"][:num_tokens]
        tokens = answer(row["prompt_ids"])[:num_tokens]
        found = first_divergence(i, tokens, reference, row["margins"])
        if found is None:
            assert len(tokens) == len(reference), f"prompt {i}: another length"
        else:
            divergences.append(found)
    assert all(d.margin < NEAR_TIE for d in divergences), divergences
    assert len(divergences) <= max(1, len(rows) // 40), divergences
    return divergences
