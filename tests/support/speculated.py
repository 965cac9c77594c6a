"""The steps of one greedy request through an executor of a tiny model: what was guessed in each, and what committed."""

from array import array
from dataclasses import dataclass, field

from overlap_spec.messages import ResetSlot, SamplingParams
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.startup.geometry import LoadedModels
from support.plans import SlotPart, plan_of
from support.ring import RingConfig, worker_settings

PROMPT = [(37 * index + 5) % 128 for index in range(12)] * 2  # n-grams of it come again
NUM_TOKENS = 40


@dataclass(frozen=True)
class Step:
    """A verify step: the guesses, the run, and the columns that each guess follows (of chains without meaning)."""

    guesses: list[int]
    committed: list[int]
    parents: list[int] = field(default_factory=list)

    @property
    def accept_len(self) -> int:
        return len(self.committed) - 1


def speculated(models: LoadedModels, config: RingConfig, rank: Rank = WHOLE, prompt: list[int] = PROMPT) -> list[Step]:
    """Decode `NUM_TOKENS` or more. Of several ranks all call this."""
    settings = worker_settings(config, models.target.vocab_size)
    executor = build_executor(models, config.geometry(), config.place, settings=settings, rank=rank.rank)
    geometry, slots = config.geometry(), executor.slots
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=1, ignore_eos=True)
    reset = ResetSlot(sampling, len(prompt), (), len(prompt))
    pages = list(range(1, geometry.num_page_columns + 1))
    chunk = array("i", prompt).tobytes()
    executor.launch(plan_of(0, [SlotPart(slot=0, new_pages=pages, tokens=chunk, reset=reset)], geometry.width)).wait()
    steps: list[Step] = []
    while sum(len(step.committed) for step in steps) < NUM_TOKENS:
        guesses, parents = slots.window[0, 1:].tolist(), slots.parents[0, 1:].tolist()
        handle = executor.launch(plan_of(0, [SlotPart(slot=0)], geometry.width))
        steps.append(Step(guesses, handle.wait().tokens[0], parents))
    executor.close()
    return steps
