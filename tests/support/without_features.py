"""An engine from which folders are taken away answers: `python -m support.without_features FOLDER ..` prints what.

The folders, such as features/grammar and entrypoints/ui, are hidden before anything of the engine is imported. A ring
is then started as tests do, and is sent a completion, a chat, each field of a request that a feature has, and a request
to each path of an API. With `-` in the place of folders they are read from lines, and each line is answered, by `null`
if that failed, in a fork: importing torch takes longer than all the rest.
"""

import asyncio
import json
import os
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from overlap_spec import entrypoints, features
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError

PROMPT = [5, 17, 42, 9]
CHAT = [{"role": "user", "content": "Hi"}]
FIELDS: dict[str, dict[str, Any]] = {
    "log_probs": {"logprobs": 2},
    "grammar": {"regex": "[ab]+"},
    "penalties": {"repetition_penalty": 1.5, "logit_bias": {"5": 1}, "bad_words": ["bad"]},
}


def hide(folders: Sequence[str], directory: Path) -> None:
    """Let the packages of features and of entry points be directories that have all but these."""
    for package in (features, entrypoints):
        (own,) = package.__path__
        name = package.__name__.rpartition(".")[2]
        (directory / name).mkdir()
        for path in Path(own).iterdir():
            if f"{name}/{path.name}" not in (*folders, f"{name}/__pycache__"):
                (directory / name / path.name).symlink_to(path)
        package.__path__ = [str(directory / name)]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[list[int], httpx.AsyncClient | None]]:
    """The tokens of a tiny ring, and what sends bodies to a server of it; None where there is no server."""
    from overlap_spec.frontend.codec import load_codec
    from overlap_spec.messages import SamplingParams
    from support.ring import RingConfig, running, tiny_loaded
    from support.tiny.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        codec = load_codec(write_tokenizer(Path(directory)), None)
        models, config = tiny_loaded(3, 3), RingConfig(num_steps=3, num_slots=2)
        async with running(models, config, codec) as ring:
            tokens = (await ring.ask(PROMPT, SamplingParams(max_new_tokens=12, temperature=0.0))).token_ids
        if not entrypoints.is_there("http"):
            yield tokens, None
            return
        from support.ring_server import serving

        async with serving(models, config, codec) as http:
            yield tokens, http


async def answers() -> dict[str, Any]:
    """The tokens of a completion, its text and that of a chat, and how what belongs to a folder is answered."""
    async with served() as (tokens, http):
        found = {"tokens": str(tokens), "not refused": json.dumps([*flags_that_pass()])}
        if http is None:
            return found
        plain = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        completion = await http.post("/v1/completions", json=plain)
        chat = await http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 8, "temperature": 0})
        found["completion"] = completion.json()["choices"][0]["text"]
        found["chat"] = chat.json()["choices"][0]["message"]["content"]
        for field, asked in FIELDS.items():
            reply = await http.post("/v1/completions", json=plain | asked)
            found[field] = reply.json().get("error", {}).get("message", "answered")
        for paths in entrypoints.PATHS.values():
            found |= {path: await asked_of(http, path) for path in paths}
        return found


def flags_that_pass() -> Iterator[str]:
    """Flags of folders that are not there which are taken, or refused without their folder's name."""
    owned = {name: features.OWNED[name].flags for name in features.absent()}
    for name in features.absent():
        for flag, values in features.OWNED[name].values.items():
            for value in values:
                try:
                    features.without_absent(replace(EngineConfig(), **{flag: value}))
                    yield f"{name}: {flag} {value}"
                except ConfigError as error:
                    if f"{name!r}, which is not part" not in str(error):
                        yield f"{name}: {flag} {value}"
    for table, without in ((owned, features.without_absent), (entrypoints.FLAGS, entrypoints.without_absent)):
        for name in table.keys() & {*features.absent(), *entrypoints.absent()}:
            for flag, off in table[name].items():
                try:
                    without(replace(EngineConfig(), **{flag: given(flag, off)}))
                except ConfigError as error:
                    if f"{name!r}, which is not part" in str(error):
                        continue
                if given(flag, off) != off:
                    yield f"{name}: {flag}"


def given(flag: str, off: Any) -> Any:
    """A value of the flag that is not its default."""
    default = getattr(EngineConfig(), flag)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else f"not {off}"


async def asked_of(http: httpx.AsyncClient, path: str) -> str:
    """How a path of an API is answered: its error, or that there is none."""
    reply = await (http.get(path) if path.startswith("/ui") else http.post(path, json={}))
    if "json" not in reply.headers["content-type"]:
        return "answered"
    error = reply.json().get("error", "answered")
    return error if isinstance(error, str) else str(error["message"])


def answer(folders: Sequence[str]) -> int:
    """Write the line of an engine without these. Returns what its process exits with."""
    try:
        with tempfile.TemporaryDirectory() as place:
            hide(folders, Path(place))
            print(json.dumps(asyncio.run(answers())), flush=True)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def answer_lines() -> None:
    """Each in a fork of this process."""
    import torch

    torch.set_num_threads(1)  # no thread of OpenMP is there to be lost by a fork
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(answer(line.split()))
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        answer_lines()
    else:
        sys.exit(answer(sys.argv[1:]))
