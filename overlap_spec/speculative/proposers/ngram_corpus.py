"""Reads what is known before the first request: texts of a JSONL file, as tokens.

Each line is a JSON string. Texts follow one another with -1 in between, which equals no token, so nothing that is
matched or guessed goes from one into the next. What is flushed with the cache is entered again.
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import torch
from overlap_spec_kernels import NgramLimits, NgramLog, ngram_absorb, with_slots
from tokenizers import Tokenizer
from torch import Tensor

from overlap_spec.errors import ConfigError

FIELD = "speculative_ngram_external_corpus_path"
PAGE_SIZE, CHUNK = 16, 1 << 16  # of the tokens that are entered at once, as if they were a request's


def read_corpus(path: str, tokenizer_dir: str, most: int) -> Tensor:
    """At most `most` tokens, separators included. Shapes: -> [n] i32. Raises: ConfigError saying what is wrong."""
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
    tokens = array("i")
    for text in _texts(path):
        tokens.extend(tokenizer.encode(text, add_special_tokens=False).ids)
        tokens.append(-1)
        if len(tokens) >= most:
            break
    if not tokens:
        raise ConfigError(FIELD, f"{path} holds no text")
    return torch.frombuffer(tokens[:most], dtype=torch.int32).clone()


def _texts(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _text_in(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from None


def _text_in(line: str, origin: str) -> str:
    if not line.strip():
        return ""
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(FIELD, f"{origin}: each line must be a JSON string")
    return text


def enter_corpus(log: NgramLog, limits: NgramLimits, corpus: Tensor) -> None:
    """Enter it, a chunk at a time; it is older than all that requests say, and no particular owner's.

    Shapes: corpus [n] i32.
    """
    log, dummy, first = with_slots(log, 2), 1, torch.zeros(1, dtype=torch.int64, device=corpus.device)
    table = torch.arange(CHUNK // PAGE_SIZE, dtype=torch.int32, device=corpus.device)[None]
    for chunk in corpus.split(CHUNK):
        pool = torch.nn.functional.pad(chunk, (0, CHUNK - len(chunk)), value=-1)
        ngram_absorb(log, limits, pool, table, PAGE_SIZE, first, first, first + (len(chunk) - 1), dummy, len(chunk))
