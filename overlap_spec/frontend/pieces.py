"""Cuts a long text into pieces whose token ids, one after another, are those of the whole text.

Byte-level BPE encodes each match of its splitting pattern by itself. All patterns listed here end a match before a
space between two letters, and after a single line feed between two characters; none looks behind. So a text
may be cut there. With a tokenizer that does anything else the text stays whole.

Where a text is cut depends on what is before the cut alone, so all but the last piece of a conversation are pieces of
its next turn as well. `KnownPieces` keeps their ids.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

PIECE = 4_096  # characters: some 2 ms of work
WINDOW = 65_536  # characters that are searched for a cut at once: some 4 ms of work
MOST_KNOWN = 8 << 20  # characters of pieces whose ids are kept: some 2 million tokens, of 4 bytes each
CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=\S)")
CUT_CHARS = 2  # behind a cut, of which it depends
PATTERNS = {  # of Llama 3, Qwen 2 and later, and GPT-2, which is also the one inside ByteLevel
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
KEEPS_LENGTH = {"NFC", "Prepend", "Replace"}  # normalizers that leave out no text


class Pieces:
    """The rule of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.can_cut = _can_cut(tokenizer)

    def of(self, text: str) -> Iterator[str]:
        """Cut a text. An empty piece: the next cut is still looked for."""
        begin, at = 0, PIECE
        while self.can_cut and at < len(text):
            cut = CUT.search(text, at, at + WINDOW)
            if cut is not None:
                yield text[begin : cut.start()]
                begin, at = cut.start(), cut.start() + PIECE
            else:
                at += WINDOW - CUT_CHARS
                if at < len(text):
                    yield ""
        if begin < len(text) or not text:
            yield text[begin:]


class KnownPieces:
    """Ids of the pieces that were encoded, or asked for, last. `most` bounds the characters of all."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._ids: OrderedDict[str, array[int]] = OrderedDict()  # the one that was used last is the last
        self._num_chars = 0

    def get(self, piece: str) -> "array[int] | None":
        """Its ids, which are not to be changed; None if they are not known."""
        ids = self._ids.get(piece)
        if ids is not None:
            self._ids.move_to_end(piece)
        return ids

    def put(self, piece: str, ids: "array[int]") -> None:
        """Keep the ids of a piece; others make room."""
        if piece in self._ids or len(piece) > self._most:
            return
        self._ids[piece] = ids
        self._num_chars += len(piece)
        while self._num_chars > self._most:
            oldest, _ = self._ids.popitem(last=False)
            self._num_chars -= len(oldest)


def keeps_all_text(tokenizer: Tokenizer) -> bool:
    """Whether no part of a text is left out, so that n tokens hold at most n times the longest one's characters."""
    steps = _steps(tokenizer.normalizer, "normalizers")
    if not all(step["type"] in KEEPS_LENGTH for step in steps):
        return False
    if any(step["type"] == "Replace" and step["content"] == "" for step in steps):
        return False
    splits = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    has_fallback = bool(getattr(tokenizer.model, "byte_fallback", False))
    removes = any(step.get("behavior") == "Removed" or step["type"].startswith("Whitespace") for step in splits)
    return (is_byte_level or has_fallback) and not removes


def _can_cut(tokenizer: Tokenizer) -> bool:
    if type(tokenizer.model).__name__ != "BPE":
        return False
    if any(step["type"] != "NFC" for step in _steps(tokenizer.normalizer, "normalizers")):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word or CUT.search(token.content) for token in added):
        return False
    splits = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    return bool(splits) and splits[-1]["type"] == "ByteLevel" and all(map(_splits_at_cuts, splits)) and _splits(splits)


def _splits(steps: list[dict[str, Any]]) -> bool:
    """Whether one of the steps splits at every cut: ByteLevel need not, if a pattern goes before it."""
    return any(step["type"] == "Split" or step.get("use_regex") for step in steps)


def _splits_at_cuts(step: dict[str, Any]) -> bool:
    """Whether this step, if it splits at all, does so at every place where a text is cut or keeps to one side of it."""
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Digits":
            return True
        case "Split":
            return step["pattern"].get("Regex") in PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
        case _:
            return False


def _steps(component: Any, inside: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as its file describes it, a sequence as its parts."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[inside]) if state["type"] == "Sequence" else [state]
