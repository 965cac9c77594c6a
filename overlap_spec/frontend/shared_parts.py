"""The parts that requests of one client share: each travels once, is decoded once, and is kept once.

    Shared(prompts, samplings)    GenerateShared("a_0", 0, 0)    GenerateShared("a_1", 0, 0)  ..
              |                            |
              +---- kept by client --------+--> Generate("a_0", prompts[0], samplings[0])

A sampling that has come before, and that some request still has, is that object again, from any client.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from overlap_spec.client.link import Malformed
from overlap_spec.errors import Overloaded, RequestError
from overlap_spec.frontend.request_checks import with_packed_ids
from overlap_spec.messages import Generate, GenerateShared, Prompt, SamplingParams, Shared

T = TypeVar("T")


class SharedParts:
    """The last `Shared` of each client, by the client's number.

    A sampling is decoded when a request asks for it, and kept by its requests alone: decoded, all those of a message
    may take ten times its bytes.
    """

    def __init__(self) -> None:
        self._of_client: dict[int, tuple[list[Prompt], list[_Encoded]]] = {}
        self._known: WeakValueDictionary[bytes, SamplingParams] = WeakValueDictionary()
        self._decoder: msgspec.msgpack.Decoder[SamplingParams] = msgspec.msgpack.Decoder(SamplingParams)

    def put(self, client: int, message: Shared) -> None:
        """Keep it for the requests that follow."""
        self._of_client[client] = message.prompts, [_Encoded(raw) for raw in message.samplings]

    def request(self, client: int, message: GenerateShared) -> Generate | Malformed:
        """The request itself, or what is wrong with its sampling. Raises: Overloaded if a part is not there."""
        prompts, samplings = self._of_client.get(client, ([], []))
        prompt = message.prompt
        if isinstance(prompt, int):
            prompt = _at(prompts, prompt)
        encoded = _at(samplings, message.sampling)
        sampling = self._sampling(encoded)
        if sampling is None:
            return Malformed(message.request_id, encoded.wrong_field, encoded.error)
        return Generate(message.request_id, prompt, sampling, message.terms, message.seed)

    def drop(self, client: int) -> None:
        """Nothing that refers to it comes any more."""
        self._of_client.pop(client, None)

    def _sampling(self, encoded: "_Encoded") -> SamplingParams | None:
        """None if it is not sound."""
        known = self._known.get(encoded.digest)
        if known is None and not encoded.error:
            try:
                known = with_packed_ids(self._decoder.decode(encoded.raw))
            except (msgspec.MsgspecError, UnicodeDecodeError, RequestError) as error:
                cause = error if isinstance(error, RequestError) else error.__cause__
                encoded.wrong_field = cause.field if isinstance(cause, RequestError) else "sampling"
                encoded.error = str(error)
            else:
                self._known[encoded.digest] = known
        return known


class _Encoded:
    """A sampling as it came. `error`: what is wrong with it, once a request has asked for it."""

    def __init__(self, raw: msgspec.Raw) -> None:
        self.raw = raw
        self.wrong_field = self.error = ""

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.raw, digest_size=16).digest()


def _at(parts: Sequence[T], index: int) -> T:
    if not 0 <= index < len(parts):
        raise Overloaded("what the request shares with others has not come, or there was no room for it")
    return parts[index]
