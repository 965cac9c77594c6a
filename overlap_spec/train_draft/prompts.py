"""The prompts: a JSONL file, plain or .gz, a chat or a text in each line, and which of them are held out.

    {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}        or {"text": "Once upon a time"}

The engine answers them itself, so a chat ends with its user. Prompts of the benchmarks are left out: a draft that knew
them would be judged by what it has seen.
"""

import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_spec.errors import ConfigError, RequestError
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import ChatPrompt

BENCHMARKS = ("chat20.json", "peer64.json")
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 64


class Message(msgspec.Struct, frozen=True):
    """Of a chat."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """A line of the file: a chat, or a text."""

    messages: tuple[Message, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class PromptFile:
    """Its prompts in the order in which they are answered, the first `num_held_out` of them never trained on."""

    path: str
    digest: str  # SHA-256 of the file's bytes
    lines: tuple[tuple[int, Prompt], ...]  # with their numbers
    num_held_out: int
    num_left_out: int  # prompts of benchmarks

    def encoded(self, codec: Codec, first: int) -> Iterator[list[int]]:
        """Token ids of the prompts from `first` on. Raises: ConfigError naming the line."""
        for number, prompt in self.lines[first:]:
            chat = ChatPrompt(msgspec.to_builtins(prompt.messages))
            try:
                yield codec.encode(codec.render(chat), False) if prompt.messages else codec.encode(prompt.text, True)
            except RequestError as error:
                raise _bad(self.path, number, str(error)) from None


def read_prompts(path: Path, seed: int = 0) -> PromptFile:
    """Read, check and shuffle. Raises: ConfigError naming file and line."""
    data = _read(path)
    lines = [(n, _prompt(line, path, n)) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    known = benchmark_prompts()
    kept = [(number, prompt) for number, prompt in lines if last_text(prompt) not in known]
    if len(kept) < 2:
        raise ConfigError("prompts", f"{path}: found {len(kept)} prompts, expected at least 2: one is held out")
    random.Random(seed).shuffle(kept)
    held_out = max(1, min(int(len(kept) * HELD_OUT_SHARE), MOST_HELD_OUT))
    return PromptFile(str(path), hashlib.sha256(data).hexdigest(), tuple(kept), held_out, len(lines) - len(kept))


def benchmark_prompts(directory: Path = Path(__file__).parents[1] / "data" / "prompts") -> frozenset[str]:
    """The texts that a draft is judged by, so far as they are part of this installation."""
    files = (directory / name for name in BENCHMARKS)
    texts: Sequence[str] = [text for file in files if file.is_file() for text in json.loads(file.read_text())]
    return frozenset(map(_plain, texts))


def last_text(prompt: Prompt) -> str:
    """What a prompt asks, as it is compared with others."""
    return _plain(prompt.messages[-1].content if prompt.messages else prompt.text)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except OSError as error:
        raise ConfigError("prompts", f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError("prompts", f"{path}: not a whole .gz file: {error}") from None


def _prompt(line: bytes, path: Path, number: int) -> Prompt:
    try:
        prompt = msgspec.json.decode(line, type=Prompt)
    except msgspec.MsgspecError as error:
        raise _bad(str(path), number, str(error)) from None
    if bool(prompt.messages) == bool(prompt.text.strip()):
        raise _bad(str(path), number, "expected an object with either messages or a text that is not empty")
    if prompt.messages and prompt.messages[-1].role == "assistant":
        raise _bad(str(path), number, "messages: ends with an answer, but the engine answers itself; leave it out")
    return prompt


def _bad(path: str, number: int, text: str) -> ConfigError:
    return ConfigError("prompts", f"{path}, line {number}: {text}")
