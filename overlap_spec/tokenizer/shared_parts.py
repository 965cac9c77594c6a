"""What requests of one client share: it travels once, is decoded once, and is kept once.

    Shared(prompts, samplings)    GenerateShared("a_0", 0, 0)    GenerateShared("a_1", 0, 0)  ..
              |                            |
              +---- kept by client --------+--> Generate("a_0", prompts[0], samplings[0])

A sampling that has come before, and that some request still has, is that object again, from any client.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from overlap_spec.client.link import Malformed
from overlap_spec.errors import Overloaded, RequestError
from overlap_spec.messages import Generate, GenerateShared, Prompt, SamplingParams, Shared
from overlap_spec.tokenizer.request_checks import with_packed_ids

T = TypeVar("T")


class SharedParts:
    """The last `Shared` of each client, by the client's number."""

    def __init__(self) -> None:
        self._of_client: dict[int, tuple[list[Prompt], list[SamplingParams]] | Malformed] = {}
        self._known: WeakValueDictionary[bytes, SamplingParams] = WeakValueDictionary()
        self._decoder: msgspec.msgpack.Decoder[SamplingParams] = msgspec.msgpack.Decoder(SamplingParams)

    def put(self, client: int, message: Shared) -> None:
        """Keep it for the requests that follow; if it is not sound, its error."""
        self.drop(client)  # first, so that not both are there
        try:
            self._of_client[client] = message.prompts, [self._sampling(raw) for raw in message.samplings]
        except (msgspec.MsgspecError, UnicodeDecodeError, RequestError) as error:
            cause = error if isinstance(error, RequestError) else error.__cause__
            field = cause.field if isinstance(cause, RequestError) else "sampling"
            self._of_client[client] = Malformed("", field, str(error))

    def request(self, client: int, message: GenerateShared) -> Generate | Malformed:
        """The request itself, or what is wrong with what it shares. Raises: Overloaded if that is not there."""
        parts = self._of_client.get(client, ([], []))
        if isinstance(parts, Malformed):
            return Malformed(message.request_id, parts.field, parts.error)
        prompts, samplings = parts
        prompt = message.prompt
        if isinstance(prompt, int):
            prompt = _at(prompts, prompt)
        sampling = _at(samplings, message.sampling)
        return Generate(message.request_id, prompt, sampling, message.terms, message.seed)

    def drop(self, client: int) -> None:
        """Nothing that refers to it comes any more."""
        self._of_client.pop(client, None)

    def _sampling(self, raw: msgspec.Raw) -> SamplingParams:
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = with_packed_ids(self._decoder.decode(raw))
        return known


def _at(parts: Sequence[T], index: int) -> T:
    if not 0 <= index < len(parts):
        raise Overloaded("what the request shares with others has not come, or there was no room for it")
    return parts[index]
