"""An engine from which folders are taken away answers: `python -m support.without_features FOLDER ..` prints what.

The folders, such as features/grammar and entrypoints/ui, are hidden before anything of the engine is imported. A ring
is then started as tests do, and is sent a completion, a chat, each field of a request that a feature has, and a request
to each path of an API. What is of a folder that is gone, its flags, fields, paths and commands, stands in `refused` if
the engine names the folder when it is asked for that, else in `not refused`.

With `-` in the place of folders they are read from lines, and each line is answered, by `null` if that failed, in a
fork: importing torch takes longer than all the rest.
"""

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Told(NamedTuple):
    """How an engine answers what is of a folder that is gone."""

    what: str
    folder: str
    text: str

    @property
    def is_refused(self) -> bool:
        """By the folder's name."""
        return f"{self.folder!r}, which is not part of this installation" in self.text


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


async def answers() -> dict[str, Any]:
    """The tokens of a completion, its text and that of a chat, and how what belongs to a folder is answered."""
    from overlap_spec.frontend.codec import load_codec
    from overlap_spec.messages import SamplingParams
    from support.ring import RingConfig, running, tiny_loaded
    from support.tiny.tokenizer import write_tokenizer

    told = [*flags(), *commands()]
    with tempfile.TemporaryDirectory() as directory:
        codec = load_codec(write_tokenizer(Path(directory)), None)
        models, config = tiny_loaded(3, 3), RingConfig(num_steps=3, num_slots=2)
        async with running(models, config, codec) as ring:
            tokens = (await ring.ask(PROMPT, SamplingParams(max_new_tokens=12, temperature=0.0))).token_ids
            for field, folder in features.absent_fields().items():
                answer = await ring.ask(PROMPT, SamplingParams(max_new_tokens=1, **{field: field_values()[field]}))
                told.append(Told(field, folder, "answered" if answer.rejected is None else answer.rejected.message))
        found = {"tokens": str(tokens)}
        if entrypoints.is_there("http"):
            from support.ring_server import serving

            async with serving(models, config, codec) as http:
                found |= await answers_over_http(http)
    told += [
        Told(f"{name} over HTTP", name, found[name]) for name in FIELDS if name in found and name in features.absent()
    ]
    for folder in entrypoints.PATHS.keys() & {*entrypoints.absent()}:
        told += [Told(path, folder, found[path]) for path in entrypoints.PATHS[folder] if path in found]
    refused, others = ([each.what for each in told if each.is_refused is by_name] for by_name in (True, False))
    return found | {"refused": json.dumps(refused), "not refused": json.dumps(others)}


async def answers_over_http(http: httpx.AsyncClient) -> dict[str, str]:
    """Of a server with a completion and a chat, and how it answers each field and path of a folder."""
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
    for paths in entrypoints.PATHS.values():
        found |= {path: await asked_of(http, path) for path in paths}
    return found


def field_values() -> dict[str, Any]:
    """A value, not the default, of each field of `SamplingParams` that is a feature's."""
    from overlap_spec.messages import Grammar, GrammarKind, LogProbParams, Reasoning, Thinking

    return {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {5: 1.0},
        "allowed_token_ids": (5,),
        "allowed_ids": bytes(4),
        "bad_words": ("bad",),
        "bad_word_ids": ((5,),),
        "grammar": Grammar(GrammarKind.REGEX, "[ab]+"),
        "log_probs": LogProbParams(top=1),
        "reasoning": Reasoning("<think>", "</think>"),
        "thinking": Thinking(1, False, (), (5,)),
    }


def flags() -> Iterator[Told]:
    """How the configuration answers flags of folders that are not there, and values that ask for one."""
    gone = features.absent()
    for name in gone:
        for flag, values in features.OWNED[name].values.items():
            for value in values:
                config = replace(EngineConfig(), **{flag: value})
                yield Told(f"{flag_name(flag)} {value}", name, config_error(features.without_absent, config))
    owned = {name: features.OWNED[name].flags for name in gone}
    of_entry_points = {name: entrypoints.FLAGS.get(name, {}) for name in entrypoints.absent()}
    for table, without in ((owned, features.without_absent), (of_entry_points, entrypoints.without_absent)):
        for name, offs in table.items():
            for flag, off in offs.items():
                value = given(flag, off)
                if value != off:
                    config = replace(EngineConfig(), **{flag: value})
                    yield Told(flag_name(flag), name, config_error(without, config))


def flag_name(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def config_error(without: Any, config: EngineConfig) -> str:
    """Why a configuration is refused."""
    try:
        without(config)
    except ConfigError as error:
        return str(error)
    return "taken"


def given(flag: str, off: Any) -> Any:
    """A value of the flag that is not its default."""
    default = getattr(EngineConfig(), flag)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else f"not {off}"


def commands() -> Iterator[Told]:
    """How the command line answers commands of entry points that are not there."""
    cli = entrypoints.find("cli")
    for name, command in () if cli is None else cli.COMMANDS.items():
        if command.entry_point in entrypoints.absent():
            with contextlib.redirect_stderr(io.StringIO()) as said:
                status = cli.main([name])
            yield Told(f"command {name}", command.entry_point, said.getvalue() if status == 2 else "run")


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
