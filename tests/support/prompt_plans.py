"""Prefill steps that together test a captured size: chunks, several requests, exactly its rows."""

from array import array

from overlap_spec.messages import ResetSlot, SamplingParams
from overlap_spec.worker.executor import Executor
from support.plans import SlotPart, plan_of, windows

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "sampled": SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=5, min_new_tokens=2),
}
PAGES = 40


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def prompt(slot: int, length: int) -> list[int]:
    return [(5 * i + 3 * slot) % 29 + 1 for i in range(length)]


def fresh(slot: int, tokens: list[int], sampling: SamplingParams, next_token: int = -1) -> SlotPart:
    reset = ResetSlot(sampling, len(tokens), (2,), len(tokens) + sampling.min_new_tokens)
    pages = list(range(1 + slot * PAGES, 1 + (slot + 1) * PAGES))
    return SlotPart(slot, new_pages=pages, tokens=pack(tokens), next_token=next_token, reset=reset)


def run(executor: Executor, sampling: SamplingParams, first_width: int | None = None) -> list[list[list[int]]]:
    """Prompts of several lengths, one of them in two chunks, one of exactly a captured size; then decoding.

    `first_width`: of the windows that prompts propose; None: whole ones.
    """
    width, of_prompts = executor.slots.width, first_width or executor.slots.width
    long, whole = prompt(9, 25), prompt(8, 16)
    short = [fresh(slot, prompt(slot, 1 + 2 * slot), sampling) for slot in range(3)]
    first, rest = (
        fresh(9, long[:13], sampling, next_token=long[13]),
        SlotPart(9, start=13, tokens=pack(long[13:])),
    )
    plans = [
        plan_of(1, [*short, first], of_prompts),
        plan_of(2, [rest], of_prompts),
        plan_of(3, [fresh(8, whole, sampling)], of_prompts),
        *[windows(4 + i, (0, 1, 2, 8, 9), width) for i in range(5)],
    ]
    return [executor.launch(plan).wait().tokens for plan in plans]


def run_mixed(executor: Executor, sampling: SamplingParams, width: int | None = None) -> list[list[list[int]]]:
    """Prompts, two of them in chunks, beside windows of one to four requests; then decoding.

    `width`: of all windows; None: whole ones.
    """
    width = width or executor.slots.width
    long, other = prompt(9, 25), prompt(8, 40)
    first, rest = (
        fresh(9, long[:13], sampling, next_token=long[13]),
        SlotPart(9, start=13, tokens=pack(long[13:])),
    )
    begun = fresh(8, other[:30], sampling, next_token=other[30]), fresh(2, prompt(2, 2), sampling)
    ended = SlotPart(8, start=30, tokens=pack(other[30:]))
    decoding, chunks = [(0,), (0, 1), (0, 1, 9), (0, 1, 2, 9)], [[first], [rest], [*begun], [ended]]
    prompts = plan_of(1, [fresh(slot, prompt(slot, 5), sampling) for slot in (0, 1)], width)
    found = [executor.launch(prompts).wait().tokens]
    for i, (slots, work) in enumerate(zip(decoding, chunks, strict=True)):
        launch = executor.start(plan_of(2 + i, [*map(SlotPart, slots), *work], width, first_width=width))
        assert launch.advance()
        results = [handle.wait() for handle in launch.handles]
        assert [result.is_last for result in results] == [False, True]
        found += [result.tokens for result in results]
    last = [windows(6 + i, (0, 1, 2, 8, 9), width) for i in range(4)]
    return found + [executor.launch(plan).wait().tokens for plan in last]
