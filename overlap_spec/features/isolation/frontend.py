"""Keeps clients apart: the name of a request's API key becomes part of its salt, which is the root of its cached pages.

    salt         NAME NUL the request's own salt        no client can send a NUL, so no salt is another client's
    public_len   tokens at the prompt's begin that --shared-prefix has, too: the pages of these are shared

The shared prefix is known as a text alone, and as the system prompt of a chat: what the model's template makes of it up
to the user's message. A prompt that begins as either shares as much as it has in common with it, which tells of that
text alone.
"""

import os
from collections.abc import Iterator

from msgspec.structs import replace

from overlap_spec.client.link import pack_ids
from overlap_spec.errors import RequestError
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.hooks import Parts, RequestHook
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.messages import TOKEN_BYTES, Admit, ChatPrompt

FOLLOWING = "a", "1"  # two messages of users, which have no first token in common


def attach(parts: Parts) -> RequestHook | None:
    """Unless all clients are to share what is cached."""
    isolation = parts.settings.link.isolation
    if not isolation.names:
        return None
    return IsolationHook(tuple(shared_prompts(parts.codec, isolation.shared_prefix)))


class IsolationHook(RequestHook):
    """`shared`: packed tokens that prompts may begin with."""

    def __init__(self, shared: tuple[bytes, ...]) -> None:
        self._shared = shared

    def admission(self, request: OpenRequest, admit: Admit) -> Admit:
        """A request without a key is the server's own."""
        name = request.terms.key
        if not name:
            return admit
        public_len = max((len_in_common(admit.prompt, shared) for shared in self._shared), default=0)
        return replace(admit, salt=f"{name}\0{admit.salt}", public_len=public_len)


def len_in_common(prompt: bytes, shared: bytes) -> int:
    """Tokens with which both begin."""
    low, high = 0, min(len(prompt), len(shared)) // TOKEN_BYTES  # they agree at low
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        low, high = (middle, high) if prompt[part] == shared[part] else (low, middle - 1)
    return low


def shared_prompts(codec: Codec, text: str) -> Iterator[bytes]:
    """The packed tokens of the prefix as a text, and as a system prompt if the model's template has those."""
    if not text:
        return
    yield pack_ids(codec.encode(text, add_special_tokens=True))
    system = {"role": "system", "content": text}
    try:
        rendered = [codec.render(ChatPrompt([system, {"role": "user", "content": said}])) for said in FOLLOWING]
    except RequestError:
        return
    yield pack_ids(codec.encode(os.path.commonprefix(rendered), add_special_tokens=False))
