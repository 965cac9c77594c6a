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
from typing import Any

from overlap_spec.errors import ConfigError, RequestError
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import ChatPrompt

BENCHMARKS = ("chat20.json", "peer64.json")
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 64


@dataclass(frozen=True)
class PromptFile:
    """Its prompts in the order in which they are answered, the first `num_held_out` of them never trained on."""

    path: str
    digest: str  # SHA-256 of the file's bytes
    lines: tuple[tuple[int, dict[str, Any]], ...]  # number and fields
    num_held_out: int
    num_left_out: int  # prompts of benchmarks

    def encoded(self, codec: Codec, first: int) -> Iterator[list[int]]:
        """Token ids of the prompts from `first` on. Raises: ConfigError naming the line."""
        for number, fields in self.lines[first:]:
            try:
                yield _encode(fields, codec)
            except RequestError as error:
                raise _bad(self.path, number, str(error)) from None


def read_prompts(path: Path, seed: int = 0) -> PromptFile:
    """Read, check and shuffle. Raises: ConfigError naming file and line."""
    data = _read(path)
    lines = [(n, _fields(line, path, n)) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    known = benchmark_prompts()
    kept = [(number, fields) for number, fields in lines if last_text(fields) not in known]
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


def last_text(fields: dict[str, Any]) -> str:
    """What a prompt asks, as it is compared with others."""
    return _plain(fields["text"] if "text" in fields else str(fields["messages"][-1]["content"]))


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


def _fields(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise _bad(str(path), number, f"not JSON: {error}") from None
    if not isinstance(fields, dict) or ("messages" in fields) == ("text" in fields):
        raise _bad(str(path), number, "expected an object with either messages or text")
    if "text" in fields:
        if not isinstance(fields["text"], str) or not fields["text"].strip():
            raise _bad(str(path), number, "text: expected a text that is not empty")
        return fields
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _bad(str(path), number, "messages: expected a list of objects with the texts role and content")
    if messages[-1]["role"] == "assistant":
        raise _bad(str(path), number, "messages: ends with an answer, but the engine answers itself; leave it out")
    return fields


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _bad(path: str, number: int, text: str) -> ConfigError:
    return ConfigError("prompts", f"{path}, line {number}: {text}")


def _encode(fields: dict[str, Any], codec: Codec) -> list[int]:
    if "text" in fields:
        return codec.encode(fields["text"], True)
    return codec.encode(codec.render(ChatPrompt(fields["messages"])), False)
