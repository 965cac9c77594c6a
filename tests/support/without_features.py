"""An engine from which features are taken away answers: `python -m support.without_features NAME ..` prints what.

The folders of these features are hidden before anything of the engine is imported. A ring is then started as tests do,
and is sent a completion, a chat, and each field of a request that a feature has.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from overlap_spec import features

PROMPT = [5, 17, 42, 9]
CHAT = [{"role": "user", "content": "Hi"}]
FIELDS: dict[str, dict[str, Any]] = {
    "log_probs": {"logprobs": 2},
    "grammar": {"regex": "[ab]+"},
}


def hide(names: Sequence[str], directory: Path) -> None:
    """Let the package of features be a directory that has all but these."""
    (own,) = features.__path__
    for path in Path(own).iterdir():
        if path.name not in (*names, "__pycache__"):
            (directory / path.name).symlink_to(path)
    features.__path__ = [str(directory)]


@asynccontextmanager
async def served() -> AsyncIterator[httpx.AsyncClient]:
    """What sends bodies to a server whose engine is a tiny ring."""
    from overlap_spec.frontend.codec import load_codec
    from support.ring import RingConfig, tiny_loaded
    from support.ring_server import serving
    from support.tiny.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        codec = load_codec(write_tokenizer(Path(directory)), None)
        async with serving(tiny_loaded(3, 3), RingConfig(num_steps=3, num_slots=2), codec) as http:
            yield http


async def answers() -> dict[str, Any]:
    """The text of a completion and of a chat, and by field how a request is answered that sets it."""
    async with served() as http:
        plain = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        completion = await http.post("/v1/completions", json=plain)
        chat = await http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 8, "temperature": 0})
        found = {
            "completion": completion.json()["choices"][0]["text"],
            "chat": chat.json()["choices"][0]["message"]["content"],
        }
        for field, asked in FIELDS.items():
            reply = await http.post("/v1/completions", json=plain | asked)
            found[field] = reply.json().get("error", {}).get("message", "answered")
        return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        hide(sys.argv[1:], Path(place))
        print(json.dumps(asyncio.run(answers())))
