"""The bytes of each token, also where they are only a part of a character.

Decoding one token gives U+FFFD for half a character, and some decoders strip a leading space. The bytes are in the
token's name, in one of three spellings that the decoder of tokenizer.json tells:

    byte level       every byte is a printable character of its own (GPT-2's table): "Ġthe", "âĤ"
    byte fallback    "<0xE2>" is a byte; U+2581 is a space
    other            as the decoder gives it
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"


class TokenBytes:
    """Bytes by token id, of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        # At once, at start: a large tokenizer takes a tenth of a second, for which requests would wait.
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._decoders = frozenset(_types(json.loads(tokenizer.to_str()).get("decoder") or {}))

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
