"""What requests of a group have in common is kept once here too: prompt and lists of tokens.

Admit --(equal to one before)--> the same objects     tokens: shared until a request gets a slot, and writes there
"""

from array import array
from weakref import WeakValueDictionary

from msgspec.structs import replace

from overlap_spec.messages import LARGE_FIELDS, Admit, SamplingParams
from overlap_spec.runtime.heap import Repeated
from overlap_spec.scheduler.prefix_cache import Node
from overlap_spec.scheduler.requests import Request, unpack_tokens

LARGE = 1 << 10  # bytes, from which on a value is compared with those before


class Admitted:
    """Makes requests of Admits."""

    def __init__(self) -> None:
        self._repeated = Repeated()
        # By the id of the prompt's bytes, which the requests that have these tokens keep.
        self._tokens: WeakValueDictionary[int, array[int]] = WeakValueDictionary()

    def request(self, admit: Admit, root: Node) -> Request:
        """The request, with the objects of those before it where they are equal."""
        sampling, prompt = self._shared(admit.sampling), admit.prompt
        if len(prompt) > LARGE:
            prompt = self._repeated.same("prompt", prompt)
        if sampling is not admit.sampling or prompt is not admit.prompt:
            admit = replace(admit, prompt=prompt, sampling=sampling)
        if len(prompt) <= LARGE or admit.resumed is not None:
            return Request(admit, root)
        tokens = self._tokens.get(id(prompt))
        if tokens is None:
            tokens = self._tokens[id(prompt)] = unpack_tokens(prompt)
        return Request(admit, root, tokens)

    def _shared(self, sampling: SamplingParams) -> SamplingParams:
        given = {field: value for field in LARGE_FIELDS if (value := getattr(sampling, field))}
        if not given:
            return sampling  # as of most
        return replace(sampling, **{field: self._repeated.same(field, value) for field, value in given.items()})
