"""A request on its way in: its prompt is read, what it asks for is settled, and its output is opened.

prompt --> ids --> checks, length and seed --> hooks' `prepare` --> stops --> ReadRequest
"""

from array import array
from dataclasses import dataclass
from functools import partial

from overlap_spec.messages import ChatPrompt, EngineLimits, Generate, Prompt, SamplingParams
from overlap_spec.tokenizer.bad_words import BadWords
from overlap_spec.tokenizer.codec import Codec
from overlap_spec.tokenizer.hooks import Hooks, Preparing
from overlap_spec.tokenizer.open_requests import OpenRequest
from overlap_spec.tokenizer.prompt_reads import PromptReads, ReadPrompt
from overlap_spec.tokenizer.prompts import PromptReader
from overlap_spec.tokenizer.request_checks import RequestChecks, with_packed_ids
from overlap_spec.tokenizer.stop_strings import StopCompiler, Stops


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
        self._bad_words = BadWords(codec, prompts.run_apart)

    def takes_long(self, asked: SamplingParams) -> bool:
        """Whether what is asked for takes long to settle, however short the prompt is."""
        return bool(asked.stop_regex) or self._bad_words.takes_long(asked) or self.hooks.take_long(asked)

    async def read(self, request: OpenRequest, message: Generate, limits: EngineLimits) -> ReadRequest:
        """Raises: RequestError, Refusal. Cancellation: of what no other request waits for."""
        encode = partial(self._encode, client=request.client, owner=request.owner)
        read = await self._reads.read(message, limits, encode)
        worded = await self._bad_words.added(with_packed_ids(message.sampling), limits.vocab_size, request.owner)
        sampling = self._checks.settle(worded, read.ids, limits, message.seed)
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
