"""A prompt that requests of a group share is read once, and its ids are given back with it."""

import asyncio
import gc
import weakref
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from overlap_spec.client.link import pack_ids
from overlap_spec.errors import RequestError
from overlap_spec.frontend.request_reader import PromptReads
from overlap_spec.messages import EngineLimits, Generate, Prompt, SamplingParams, TextPrompt, TokenPrompt

LIMITS = EngineLimits(max_len=10_000, max_total_tokens=10_000, max_running_requests=4, vocab_size=49152)
TEXT = "x" * 5000


@dataclass
class Encoder:
    """Encodes when it is let; counts."""

    may: asyncio.Event = field(default_factory=asyncio.Event)
    num_begun: int = 0
    num_cancelled: int = 0

    async def encode(self, prompt: Prompt, must_fit: bool) -> "array[int]":
        self.num_begun += 1
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(prompt, TokenPrompt):
            return array("i", prompt.ids)
        assert isinstance(prompt, TextPrompt)
        if prompt.text.startswith("bad"):
            raise RequestError("prompt", "bad")
        return array("i", range(len(prompt.text)))


def on_stage(scene: Callable[[PromptReads, Encoder], Awaitable[None]]) -> None:
    async def play() -> None:
        await asyncio.wait_for(scene(PromptReads(), Encoder()), 20)

    asyncio.run(play())


def test_choices_read_their_prompt_once_and_others_their_own() -> None:
    async def scene(reads: PromptReads, encoder: Encoder) -> None:
        prompt, sampling = TextPrompt(TEXT), SamplingParams(truncate_prompt_tokens=100)
        group = [Generate(f"r{i}", prompt, sampling, seed=i) for i in range(20)]
        alone = Generate("a", TextPrompt(TEXT), SamplingParams())
        tasks = [asyncio.create_task(reads.read(each, LIMITS, encoder.encode)) for each in (*group, alone)]
        await asyncio.sleep(0.01)
        assert encoder.num_begun == 2
        encoder.may.set()
        *found, other = await asyncio.gather(*tasks)
        assert all(each is found[0] for each in found)
        assert found[0].ids.tolist() == list(range(4900, 5000)) and found[0].packed == pack_ids(range(4900, 5000))
        assert len(other.ids) == 5000
        assert (await reads.read(group[0], LIMITS, encoder.encode)) is found[0], "it is read again"

    on_stage(scene)


def test_a_request_that_is_cancelled_ends_the_reading_only_if_no_other_waits() -> None:
    async def scene(reads: PromptReads, encoder: Encoder) -> None:
        message = Generate("r", TextPrompt(TEXT), SamplingParams())
        tasks = [asyncio.create_task(reads.read(message, LIMITS, encoder.encode)) for _ in range(2)]
        await asyncio.sleep(0.01)
        for task, num_cancelled in zip(tasks, (0, 1), strict=True):
            task.cancel()
            await asyncio.sleep(0.01)
            assert task.cancelled() and encoder.num_cancelled == num_cancelled
        encoder.may.set()
        assert len((await reads.read(message, LIMITS, encoder.encode)).ids) == 5000, "the next one reads it anew"

    on_stage(scene)


def test_an_error_is_that_of_every_choice() -> None:
    async def scene(reads: PromptReads, encoder: Encoder) -> None:
        encoder.may.set()
        message = Generate("r", TextPrompt("bad" + TEXT), SamplingParams())
        for _ in range(2):
            with pytest.raises(RequestError, match="bad"):
                await reads.read(message, LIMITS, encoder.encode)

    on_stage(scene)


def test_ids_go_with_their_prompt_and_packed_ones_are_not_copied() -> None:
    async def scene(reads: PromptReads, encoder: Encoder) -> None:
        encoder.may.set()
        message = Generate("r", TokenPrompt(pack_ids(range(5000))), SamplingParams())
        found = await reads.read(message, LIMITS, encoder.encode)
        assert isinstance(message.prompt, TokenPrompt) and found.packed is message.prompt.ids
        await reads.read(Generate("s", TextPrompt("short"), SamplingParams()), LIMITS, encoder.encode)
        assert len(reads._readings) == 1, "a short one is kept"
        del message
        gc.collect()
        assert not reads._readings

    on_stage(scene)


def test_of_a_prompt_that_cannot_be_read_nothing_is_kept() -> None:
    """An error's traceback has the frames that read, and those have the prompt: no collector is to find that out."""

    async def scene(reads: PromptReads, encoder: Encoder) -> None:
        encoder.may.set()
        message = Generate("r", TextPrompt("bad" + TEXT), SamplingParams())
        prompt = weakref.ref(message.prompt)
        tasks = [asyncio.create_task(reads.read(message, LIMITS, encoder.encode)) for _ in range(3)]
        for each in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(each, RequestError)
        del message, tasks, each
        await asyncio.sleep(0)  # what the loop has called is forgotten in its next turn
        assert not reads._readings and prompt() is None

    gc.disable()
    try:
        on_stage(scene)
    finally:
        gc.enable()
