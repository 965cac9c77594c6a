"""Requests that are sent together, without sending twice what they share.

    Generate(a, p, s) Generate(b, p, s) Generate(c, q, s)   ->   Shared([p], [s])  (a, 0, 0)  (b, 0, 0)  (c, q, 0)

A request that shares nothing is sent as it is.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.messages import Generate, GenerateShared, Prompt, SamplingParams, Shared, ToTokenizerFromClient


def with_shared_parts(requests: Sequence[Generate]) -> list[ToTokenizerFromClient]:
    """The messages of these requests, which are to be sent together. Objects that are the same are shared.

    Raises: RequestError if a sampling cannot be sent.
    """
    samplings = _several([request.sampling for request in requests])
    if not samplings:
        return list(requests)
    prompts = _several([request.prompt for request in requests])
    place_of_sampling = {id(sampling): place for place, sampling in enumerate(samplings)}
    place_of_prompt = {id(prompt): place for place, prompt in enumerate(prompts)}

    def sent(request: Generate) -> Generate | GenerateShared:
        place = place_of_sampling.get(id(request.sampling))
        if place is None:
            return request
        prompt: Prompt | int = place_of_prompt.get(id(request.prompt), request.prompt)
        return GenerateShared(request.request_id, prompt, place, request.terms, request.seed)

    return [Shared(prompts, [_raw(sampling) for sampling in samplings]), *map(sent, requests)]


def _several(objects: Sequence[Prompt | SamplingParams]) -> list[Any]:
    """Those that are there more than once, in their order."""
    counts = Counter(map(id, objects))
    return list({id(each): each for each in objects if counts[id(each)] > 1}.values())


def _raw(sampling: SamplingParams) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.msgpack.encode(sampling))
    except (OverflowError, ValueError) as error:
        raise RequestError("sampling", f"sampling cannot be sent: {error}") from error
