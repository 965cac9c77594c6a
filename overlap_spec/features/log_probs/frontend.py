"""The frontend's part of log-probs: it checks what is asked for, and adds columns to rows.

Those of an output leave with its row. Those of a prompt come by chunks, before its request's first row, and take long
to name, so they leave a few tokens at a time, in turns with other requests' rows.

**A token's name is its bytes**, also where they are only a part of a character. Decoding one token gives U+FFFD for
half a character, and some decoders strip a leading space. The bytes are in the token's entry of the vocabulary, in one
of three spellings that the decoder of tokenizer.json tells:

    byte level       every byte is a printable character of its own (GPT-2's table): "Ġthe", "âĤ"
    byte fallback    "<0xE2>" is a byte; U+2581 is a space
    other            as the decoder gives it
"""

import re
import struct
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from overlap_spec.errors import RequestError
from overlap_spec.frontend.hooks import Parts, Preparing, RequestHook
from overlap_spec.frontend.open_requests import Follower, Gains, OpenRequest, OpenRequests, Run
from overlap_spec.frontend.output import Piece, decoder_of
from overlap_spec.frontend.request_checks import check_ids
from overlap_spec.frontend.rows import LateRow, RowTurns
from overlap_spec.messages import (
    TOKEN_BYTES,
    Admit,
    LogProbCount,
    LogProbParams,
    LogProbRows,
    LogProbs,
    Recover,
    SamplingParams,
    TextDeltas,
    TokenDeltas,
    check_log_prob_count,
    find,
)

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"


class TokenBytes:
    """Bytes by token id, of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._decoders = frozenset(_types(decoder_of(tokenizer)))

    def of(self, token_id: int) -> bytes:
        """b"" for an id that is no token's: a model's vocabulary is often padded."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._added:
            return str(name).encode()
        if "ByteLevel" in self._decoders and all(character in BYTE_OF for character in name):
            return bytes(BYTE_OF[character] for character in name)
        if "ByteFallback" in self._decoders and (byte := BYTE.fullmatch(name)):
            return bytes.fromhex(byte[1])
        if self._decoders & {"Metaspace", "Replace"}:
            return str(name).replace(SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def no_bytes(token_id: int) -> bytes:
    """Of a token where there is no tokenizer."""
    return b""


def _types(decoder: dict[str, Any]) -> list[str]:
    return [str(decoder.get("type")), *(kind for part in decoder.get("decoders", ()) for kind in _types(part))]


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: a printable Latin-1 character is its own byte, the other bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()


NO_LOG_PROB = float("nan")
PAIR = struct.Struct("<2d")  # log-prob, token id
NO_PAIR = PAIR.pack(NO_LOG_PROB, -1.0)
PART_PAIRS = 1024  # of a part of a prompt's: to name their tokens takes a millisecond or two, where all are new


def attach(parts: Parts) -> RequestHook:
    """Any request may ask for them."""
    tokenizer = parts.codec.tokenizer
    name = no_bytes if tokenizer is None else TokenBytes(tokenizer).of
    return LogProbHook(parts.lifecycle.requests, parts.turns, name)


class RequestLogProbs:
    """`name`: the bytes of a token.

    `first`: the first token of the prompt that is asked for. It has no log-prob: no row before it was computed.
    """

    def __init__(self, asked: LogProbParams, first: int, name: Callable[[int], bytes]) -> None:
        self._asked = asked
        self._name = name
        self._record_bytes = asked.width * PAIR.size
        no_others = NO_PAIR * (asked.width - 1)
        self._first = b"" if asked.prompt_from is None else PAIR.pack(NO_LOG_PROB, first) + no_others
        self._num_sent = 0  # tokens of the prompt

    def pieces_of_prompt(self, records: bytes) -> Iterator[bytes]:
        """What a chunk has scored, a few tokens in each piece."""
        most = max(PART_PAIRS // self._asked.width - 1, 1) * self._record_bytes
        return (records[start : start + most] for start in range(0, len(records), most))

    def part_of_prompt(self, piece: bytes) -> LogProbs:
        """The next piece with its tokens named, in the order of the prompt. The first token goes with the first one."""
        return self._part(piece if self._num_sent else self._first + piece)

    def forget_prompt(self) -> None:
        """All that chunks have scored will be computed again, and sent again."""
        self._num_sent = 0

    def first_of_prompt(self) -> LogProbs | None:
        """The first token's record, if no chunk has scored another one; None if it was sent, or not asked for."""
        return self._part(self._first) if self._first and not self._num_sent else None

    def of_output(self, records: bytes, num_tokens: int) -> LogProbs:
        """The first records of a run."""
        return self._named(records[: num_tokens * self._record_bytes])

    def _part(self, records: bytes) -> LogProbs:
        first = self._num_sent
        self._num_sent += len(records) // self._record_bytes
        return self._named(records, first)

    def _named(self, records: bytes, first: int = 0) -> LogProbs:
        ids = {int(token) for token in array("d", records)[1::2]} - {-1}
        names = {token: self._name(token) for token in ids}
        return LogProbs(records, self._asked.top, len(self._asked.token_ids), names, first)


class Scored(Follower):
    """A request whose rows have log-probs."""

    __slots__ = ("_request", "log_probs")

    def __init__(self, request: OpenRequest, log_probs: RequestLogProbs) -> None:
        self.log_probs = log_probs
        self._request = request

    def gained(self, gains: Gains, run: Run, piece: Piece, reply: TextDeltas) -> None:
        """Add those of the row, and of a prompt without scored rows if it is the request's first."""
        request_id = self._request.request_id
        records = gains.packed.get(self._request.uid, b"")
        reply.log_probs[request_id] = self.log_probs.of_output(records, len(piece.token_ids))
        of_prompt = self.log_probs.first_of_prompt()
        if of_prompt is not None:
            reply.prompt_log_probs[request_id] = of_prompt

    def part_of_prompt(self, records: bytes) -> TextDeltas:
        """A row without tokens, which brings a part of the prompt's log-probs."""
        reply = TextDeltas([], [], [], [], [])
        self._request.add_row(reply, "", [], None)
        reply.prompt_log_probs[self._request.request_id] = self.log_probs.part_of_prompt(records)
        return reply


class LogProbHook(RequestHook):
    """Follows the requests that ask for log-probs. `name`: the bytes of a token."""

    fields = ("log_probs",)

    def __init__(self, requests: OpenRequests, turns: RowTurns, name: Callable[[int], bytes]) -> None:
        self._requests = requests
        self._turns = turns
        self._name = name

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """Raises: RequestError naming the field that asks for what there is not, or for too much."""
        check_log_probs(sampling, len(preparing.ids), preparing.limits.vocab_size)
        return sampling

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower:
        """Follow the request. The first token of its prompt that is asked for has no log-prob, so it is kept by id."""
        asked = admit.sampling.log_probs
        assert asked is not None
        first = b""
        if admit.resumed is not None:  # those of its prompt were sent by another frontend
            asked = replace(asked, prompt_from=None)
        if asked.prompt_from is not None:
            first = admit.prompt[asked.prompt_from * TOKEN_BYTES :][:TOKEN_BYTES]
        return Scored(request, RequestLogProbs(asked, int.from_bytes(first, "little"), self._name))

    def step(self, message: TokenDeltas) -> None:
        """Let log-probs of prompts' chunks wait for their turns, a few tokens for each."""
        found = find(message.extensions, LogProbRows)
        for uid, records in zip(message.extended, found.prompts, strict=False) if found is not None else ():
            request = self._requests.by_uid(uid)
            scored = None if request is None else request.follower(Scored)
            if request is not None and scored is not None:
                for piece in scored.log_probs.pieces_of_prompt(records):
                    self._turns.put(request.owner, uid, LateRow(uid, partial(scored.part_of_prompt, piece)))

    def recovered(self, message: Recover) -> None:
        """A prompt without output is computed again, with all its log-probs."""
        for request in self._requests:
            scored = request.follower(Scored)
            if scored is not None and not request.usage.completion_tokens:
                scored.log_probs.forget_prompt()


def check_log_probs(sampling: SamplingParams, prompt_len: int, vocab_size: int) -> None:
    """`sampling` asks for some, and its length is settled. Raises: RequestError naming the field."""
    asked, most = sampling.log_probs, sampling.max_new_tokens
    assert asked is not None and most is not None
    check_ids("log_probs.token_ids", asked.token_ids, vocab_size)
    if asked.prompt_from is not None and asked.prompt_from >= prompt_len:
        text = f"log_probs.prompt_from must be below {prompt_len}, the prompt's tokens, got {asked.prompt_from}"
        raise RequestError("log_probs.prompt_from", text)
    check_log_prob_count([LogProbCount(asked, prompt_len, most)])
