"""Decides where one request's output ends, and what its text and ids are.

The scheduler's finish is provisional, this one is final. A run is walked token by token; for each token the order is
stop token, stop string or pattern, length, and everything is cut at the same token:

    ends by       text                            ids, completion_tokens
    stop token    without that token's text       with it
    stop string   up to the stop string           up to the token that completed it, or that showed a pattern's
                                                  condition on what follows to hold
    length        all, held-back text included    max_new_tokens of them

**Text** is made of ids as they arrive. The pieces, joined, are `tokenizer.decode` of all ids: a piece is given out
only when it can no longer change, and `flush` gives the rest (an incomplete UTF-8 sequence becomes U+FFFD, as the
library does).

Some decoders strip the space before the first word of a text. What continues a text is no such start: given
the token before it, the pieces are what `tokenizer.decode` adds to that token.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from overlap_spec.frontend.stop_strings import Stops, StopStrings
from overlap_spec.messages import Finish, FinishKind, SamplingParams


class Detokenizer(Protocol):
    """Incremental decoding of one request."""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the text that has become final, often a few characters, sometimes none."""

    def flush(self) -> str:
        """The text still held back; nothing may be pushed after it."""


class StreamDetokenizer:
    """The library's decode stream. Ids that decode to nothing never reach it: it would keep them, and slow down."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        is_silent: Callable[[int], bool],
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._is_silent = is_silent
        self._pieces: list[str] = []
        self._ids = [i for i in before if not is_silent(i)]
        self._before = self._decode(self._ids) if self._ids else ""
        if self._before.endswith("\N{REPLACEMENT CHARACTER}"):  # a decoder cannot continue half a character
            self._ids, self._before = [], ""
        self._pending: list[int] = []  # ids whose text has not been returned yet
        self._stream = DecodeStream(ids=list(self._ids), skip_special_tokens=skip_special_tokens)

    @property
    def is_holding(self) -> bool:
        """Whether ids were pushed whose text may still change."""
        return bool(self._pending)

    def push(self, ids: Sequence[int]) -> str:
        audible = [i for i in ids if not self._is_silent(i)]
        if not audible:
            return ""
        self._ids += audible
        self._pending += audible
        piece = self._step(audible)
        if piece is None:
            return ""
        self._pending.clear()
        self._pieces.append(piece)
        return piece

    def flush(self) -> str:
        if not self._pending:
            return ""
        whole, given = self._decode(self._ids), "".join((self._before, *self._pieces))
        return whole[len(given) :] if whole.startswith(given) else self._decode(self._pending)

    def _step(self, ids: list[int]) -> str | None:
        """One step of the library's stream.

        A byte-fallback decoder may turn text already given out into U+FFFD once broken bytes follow; the
        stream then refuses to go on for ever. So what it held is decoded alone, and another goes on after it.
        """
        try:
            return self._stream.step(self._tokenizer, ids)
        except Exception:  # the library raises the bare class
            self._stream = DecodeStream(ids=list(self._pending), skip_special_tokens=self._skip)
            return self._decode(self._pending)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class TokenTexts(dict[int, str | None]):
    """The text of each token that has one of its own, whatever is around it; None: it has a part of a character.

    Only of a tokenizer whose decoder does nothing but map characters to bytes (`is_byte_level`).
    """

    def __init__(self, tokenizer: Tokenizer, is_silent: Callable[[int], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_silent = is_silent

    def __missing__(self, token_id: int) -> str | None:
        text = "" if self._is_silent(token_id) else self._tokenizer.decode([token_id], skip_special_tokens=False)
        self[token_id] = None if "\N{REPLACEMENT CHARACTER}" in text else text
        return self[token_id]

    def stream(self) -> StreamDetokenizer:
        """For tokens without a text of their own; it goes on after whole characters."""
        return StreamDetokenizer(self._tokenizer, False, self._is_silent)


class WholeTokens:
    """Joins the texts of tokens. From a part of a character to the end of one, the library's stream decodes."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._stream: StreamDetokenizer | None = None

    def push(self, ids: Sequence[int]) -> str:
        if self._stream is None:
            texts = self._texts
            pieces = [texts[token_id] for token_id in ids]
            if None not in pieces:
                return "".join(cast(list[str], pieces))
            self._stream = self._texts.stream()
        piece = self._stream.push(ids)
        if not self._stream.is_holding:
            self._stream = None
        return piece

    def flush(self) -> str:
        return "" if self._stream is None else self._stream.flush()


def decoder_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """As tokenizer.json has it. Of the decoder alone: to write a whole tokenizer and read it takes 150 ms."""
    found: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return found


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the decoder maps characters to bytes, as GPT-2's, and does nothing else."""
    return bool(decoder_of(tokenizer).get("type") == "ByteLevel")


class CloseSpecials:
    """Writes special tokens that follow one another without what a decoder puts between words."""

    def __init__(self, inner: Detokenizer, special: Mapping[int, str]) -> None:
        self._inner = inner
        self._special = special
        self._after_special = False

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in ids)

    def flush(self) -> str:
        return self._inner.flush()

    def _push_one(self, token_id: int) -> str:
        text, is_special = self._inner.push((token_id,)), token_id in self._special
        if is_special and self._after_special:
            text = self._special[token_id]
        self._after_special = is_special
        return text


class NoText:
    """The detokenizer of an engine that serves token ids only."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Piece(msgspec.Struct, frozen=True):
    """What one run adds to an output."""

    text: str
    token_ids: list[int]
    finish: Finish | None


class Output:
    """One request's output so far. `num_tokens` is its completion_tokens."""

    def __init__(self, sampling: SamplingParams, max_tokens: int, detokenizer: Detokenizer, stops: Stops) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_new_tokens
        self._keep_stop = sampling.no_stop_trim
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, sampling.no_stop_trim) if stops else None
        self.takes_long = stops.takes_long

    def push(self, tokens: list[int], finish: Finish | None) -> Piece:
        """Add a run. `finish` is the scheduler's, for the last token of the run."""
        room = self._max_tokens - self.num_tokens
        if len(tokens) > room:
            tokens, finish = tokens[:room], None
        if len(tokens) == room and finish is None:
            finish = Finish(FinishKind.LENGTH)
        if self._stops is not None:
            return self._push_searching(tokens, finish, self._stops)
        self.num_tokens += len(tokens)
        if finish is None:
            return Piece(self._detokenizer.push(tokens), tokens, None)
        return Piece(self._detokenizer.push(self._shown(tokens, finish)) + self._detokenizer.flush(), tokens, finish)

    def end(self) -> str:
        """The text still held back, for a request that is ended from outside."""
        held = self._stops.rest() if self._stops is not None else ""
        return held + self._detokenizer.flush()

    def _push_searching(self, tokens: list[int], finish: Finish | None, stops: StopStrings) -> Piece:
        texts: list[str] = []
        for index, token in enumerate(tokens, start=1):
            self.num_tokens += 1
            ends = finish if index == len(tokens) else None
            if ends is not None and ends.kind is FinishKind.STOP:
                return self._stopped(token, texts, tokens, ends, stops)
            text = self._detokenizer.push((token,))
            if ends is not None:
                text += self._detokenizer.flush()
            found = self._search(text, texts, stops)
            if found is not None:
                return Piece("".join(texts), tokens[:index], Finish(FinishKind.STOP, found))
        if finish is not None:
            text, found = stops.flush()
            texts.append(text)
            finish = finish if found is None else Finish(FinishKind.STOP, found)
        return Piece("".join(texts), tokens, finish)

    def _stopped(self, token: int, texts: list[str], tokens: list[int], finish: Finish, stops: StopStrings) -> Piece:
        """The last token is a stop token. A pattern may match by that, before it."""
        text, found = stops.flush()
        texts.append(text)
        if found is not None:
            return Piece("".join(texts), tokens, Finish(FinishKind.STOP, found))
        texts.append(self._detokenizer.push(self._shown([token], finish)) + self._detokenizer.flush())
        return Piece("".join(texts), tokens, finish)

    def _search(self, text: str, texts: list[str], stops: StopStrings) -> str | None:
        """A stop string counts if the token that completes it may be the last one."""
        if self.num_tokens < self._min_tokens:
            texts.append(text)
            stops.skip(text)
            return None
        final, found = stops.feed(text)
        texts.append(final)
        return found

    def _shown(self, tokens: list[int], finish: Finish) -> list[int]:
        """The tokens of a last run whose text is shown."""
        trims = finish.kind is FinishKind.STOP and not self._keep_stop
        return tokens[:-1] if trims else tokens
