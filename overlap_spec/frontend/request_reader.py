"""A request on its way in: its prompt is read, what it asks for is settled, and its output is opened.

    prompt --> ids --> checks, length and seed --> hooks' `prepare` --> stops --> ReadRequest

A prompt that requests of a group share is read once, and its ids are kept once, for as long as the prompt itself is.
"""

import asyncio
import weakref
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from overlap_spec.client.link import pack_ids
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.hooks import Hooks, Preparing
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.prompts import PromptReader, is_long
from overlap_spec.frontend.request_checks import RequestChecks, truncated, with_packed_ids
from overlap_spec.frontend.stop_strings import StopCompiler, Stops
from overlap_spec.messages import ChatPrompt, EngineLimits, Generate, Prompt, SamplingParams, TokenPrompt

Encode = Callable[[Prompt, bool], Awaitable["array[int]"]]  # a prompt, and whether it must fit into the context
LARGE = 8_000  # bytes of packed ids that are not unpacked for every request anew


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The ids that a request begins with, and the same as messages carry them. The ids are not changed."""

    ids: "array[int]"
    packed: bytes


@dataclass(slots=True)
class _Reading:
    """A prompt that is read for some requests, with what cuts it. The references tell that both are still there."""

    prompt: "weakref.ref[Prompt]"
    sampling: "weakref.ref[SamplingParams]"
    task: "asyncio.Task[ReadPrompt]"
    num_waiting: int = 0


class PromptReads:
    """Reads prompts. Long ones are kept by the objects of their requests: a group's requests have the same."""

    def __init__(self) -> None:
        self._readings: dict[tuple[int, int], _Reading] = {}

    async def read(self, message: Generate, limits: EngineLimits, encode: Encode) -> ReadPrompt:
        """The ids that a request keeps. `encode`: of its prompt.

        Raises: as `encode`. Cancellation: as of `encode`, once no request waits for this prompt any more.
        """
        if not _is_large(message.prompt):
            return await _read(message, limits, encode)
        key = id(message.prompt), id(message.sampling)
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = self._begin(key, message, limits, encode)
        reading.num_waiting += 1
        try:
            return await asyncio.shield(reading.task)
        finally:
            self._leave(key, reading)
            del reading  # an error keeps this frame, and the reading keeps the error

    def _leave(self, key: tuple[int, int], reading: _Reading) -> None:
        """One request less waits. What no request waits for any more ends; nothing is kept of what has failed."""
        reading.num_waiting -= 1
        if not reading.num_waiting and not _has_ids(reading.task):
            self._readings.pop(key, None)
            reading.task.cancel()

    def _begin(self, key: tuple[int, int], message: Generate, limits: EngineLimits, encode: Encode) -> _Reading:
        def forget(_: object) -> None:
            self._readings.pop(key, None)

        task = asyncio.create_task(_read(message, limits, encode))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its requests may all be gone
        return _Reading(weakref.ref(message.prompt, forget), weakref.ref(message.sampling, forget), task)


def _has_ids(task: "asyncio.Task[ReadPrompt]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_large(prompt: Prompt) -> bool:
    return len(prompt.ids) > LARGE if isinstance(prompt, TokenPrompt) else is_long(prompt)


async def _read(message: Generate, limits: EngineLimits, encode: Encode) -> ReadPrompt:
    prompt, cuts = message.prompt, message.sampling.truncate_prompt_tokens is not None
    ids = truncated(await encode(prompt, not cuts), message.sampling, limits)
    return ReadPrompt(ids, prompt.ids if isinstance(prompt, TokenPrompt) and not cuts else pack_ids(ids))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """All that a request is admitted with."""

    prompt: ReadPrompt
    sampling: SamplingParams
    stops: Stops


class RequestReader:
    """Reads the requests of one engine."""

    def __init__(self, codec: Codec, checks: RequestChecks, prompts: PromptReader) -> None:
        self.hooks = Hooks()
        self._codec = codec
        self._checks = checks
        self._prompts = prompts
        self._reads = PromptReads()
        self._stops = StopCompiler()

    def takes_long(self, asked: SamplingParams) -> bool:
        """Whether what is asked for takes long to settle, however short the prompt is."""
        return bool(asked.stop_regex) or self.hooks.take_long(asked)

    async def read(self, request: OpenRequest, message: Generate, limits: EngineLimits) -> ReadRequest:
        """Raises: RequestError, Refusal. Cancellation: of what no other request waits for."""
        encode = partial(self._encode, client=request.client, owner=request.owner)
        read = await self._reads.read(message, limits, encode)
        sampling = self._checks.settle(with_packed_ids(message.sampling), read.ids, limits, message.seed)
        sampling = await self.hooks.prepared(sampling, Preparing(request, message.prompt, read.ids, limits))
        stops = await self._stops.compiled(sampling.stop, sampling.stop_regex, request.owner)
        return ReadRequest(read, sampling, stops)

    async def _encode(self, prompt: Prompt, must_fit: bool, client: int, owner: str) -> "array[int]":
        return await self._prompts.encode(prompt, True, must_fit, client, owner)

    def open_output(self, request: OpenRequest, prompt: Prompt, read: ReadRequest) -> None:
        """Let the request's tokens become text."""
        ids, sampling = read.prompt.ids, read.sampling
        decoder = self._codec.detokenizer(
            sampling.skip_special_tokens,
            ids[-1:] if _continues(prompt) else (),
            sampling.shown_tokens,
            sampling.spaces_between_special_tokens,
        )
        request.open_output(sampling, len(ids), decoder, read.stops)


def _continues(prompt: Prompt) -> bool:
    """A completion continues its prompt's text, an assistant's answer does not."""
    return not isinstance(prompt, ChatPrompt) or prompt.continue_final_message
