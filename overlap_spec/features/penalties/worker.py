"""The worker's part of what requests ask of single tokens: penalties, biases, allowed tokens, bad words.

Each slot has a row of columns (penalties, and what it lists) and, in tables, the lists themselves. They are written
when a request that has a list takes a slot: the rows of other slots are stale, and `has` is 0 there.

Requests of a group share their allowed tokens, which may be the whole vocabulary: they are packed for the first slot,
and its row is copied to the others.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.messages import MAX_BAD_WORDS, MAX_WORD_TOKENS, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device, Ints, Packer
from overlap_spec.worker.hooks import Needs, StepHook
from overlap_spec.worker.startup.geometry import LoadedModels

WORDS = 2 * MAX_BAD_WORDS, MAX_WORD_TOKENS  # of a slot: each as it is, and after a space
BIAS_BYTES, WORD_BYTES = torch.float32.itemsize, torch.int32.itemsize
ROWS_AT_ONCE = 16  # that are copied: each takes the bytes of a row of logits meanwhile
_COLUMNS = struct.Struct("=3d2q")  # repetition, presence, frequency; whether it has biases, how many bad words


def attach(parts: Parts) -> StepHook:
    """Any request may ask for penalties, and list tokens and words."""
    num_slots, place = len(parts.slots.length), parts.device.torch_device
    return ListSteps(SlotLists.allocate(num_slots, parts.target.vocab_size, place), parts.device)


def needs(settings: Settings, models: LoadedModels) -> Needs:
    """Columns, a row of biases, and words, for each slot."""
    lists = models.target.vocab_size * BIAS_BYTES + WORDS[0] * WORDS[1] * WORD_BYTES
    return Needs(slot_bytes=lists + _COLUMNS.size)


@dataclass(frozen=True)
class SlotLists:
    """S rows, and the columns that say which of them are read. Sync: never."""

    bias: Tensor  # [S, V] f32, added to logits; -inf: not allowed
    words: Tensor  # [S, words, M] i32: a word's last token is the last of its row, -1 is before its first

    width = _COLUMNS.size // 8
    neutral = _COLUMNS.pack(1.0, 0.0, 0.0, 0, 0)

    @staticmethod
    def allocate(num_rows: int, vocab_size: int, device: torch.device) -> "SlotLists":
        """Of slots that list nothing."""
        return SlotLists(
            torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device),
            torch.full((num_rows, *WORDS), -1, dtype=torch.int32, device=device),
        )

    def pack(self, reset: ResetSlot) -> bytes:
        asked = reset.sampling
        penalties = asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty
        return _COLUMNS.pack(*penalties, int(asked.biases_logits), len(asked.bad_word_ids))

    def rules(self, columns: Tensor) -> Mapping[str, Tensor]:
        penalties = columns[:, :3].view(torch.float64)
        return {"penalties": penalties, "has": columns[:, 3:], "bias": self.bias, "words": self.words}

    def write_bias(self, fills: Tensor, allowed: Tensor, copies: Tensor, entries: Tensor) -> None:
        """Fill rows, allow tokens in them, copy rows, and then add biases: to a token that is not allowed, in vain.

        Shapes: fills [n, 2] i64 (slot, the float of all tokens), allowed [m, 2] i64 (slot, token), copies [k, 2] i64
        (slot, source), entries [e, 3] i64 (slot, token, its float).
        """
        slots, values = fills.unbind(1)
        self.bias[slots] = _floats(values)[:, None]
        slots, tokens = allowed.unbind(1)
        zeros = torch.zeros(len(tokens), device=tokens.device)  # a Python number would be copied there: a wait
        self.bias[slots, tokens] = zeros
        for start in range(0, len(copies), ROWS_AT_ONCE):
            slots, sources = copies[start : start + ROWS_AT_ONCE].unbind(1)
            self.bias[slots] = self.bias[sources]
        slots, tokens, values = entries.unbind(1)
        self.bias[slots, tokens] = self.bias[slots, tokens] + _floats(values)

    def write_words(self, entries: Tensor) -> None:
        """Shapes: entries [n, 3] i64 (slot, place in the slot's words, token)."""
        slots, places, tokens = entries.unbind(1)
        self.words.index_fill_(0, slots, -1)
        self.words.flatten(1)[slots, places] = tokens.int()


class ListSteps(StepHook):
    """Brings the lists of requests that take a slot to the device."""

    warms_up = {"repetition_penalty": 1.1, "logit_bias": {1: 1.0}, "bad_word_ids": ((2, 3),)}

    def __init__(self, lists: SlotLists, device: Device) -> None:
        self.columns = self._lists = lists
        self._device = device

    def changed(self, plan: StepPlan) -> None:
        packed = PackedLists()
        for slot, reset in plan.resets.items():
            packed.add(slot, reset.sampling)
        if not (runs := packed.runs):
            return
        packer = Packer()
        for run in runs:
            packer.add(run)
        fills, allowed, copies, biases, words = packer.upload(self._device)
        if fills.numel():
            pairs = fills.view(-1, 2), allowed.view(-1, 2), copies.view(-1, 2)
            self._lists.write_bias(*pairs, biases.view(-1, 3))
        if words.numel():
            self._lists.write_words(words.view(-1, 3))


@dataclass(frozen=True)
class PackedLists:
    """Of the requests of one step; empty where none has a list."""

    fills: list[int] = field(default_factory=list)  # slot, float
    allowed: list[Ints] = field(default_factory=list)  # slot, token
    copies: list[int] = field(default_factory=list)  # slot, slot that allows the same
    biases: list[int] = field(default_factory=list)  # slot, token, float
    words: list[int] = field(default_factory=list)  # slot, place, token
    first: dict[bytes, int] = field(default_factory=dict)  # by allowed tokens, the slot that they are packed for

    def add(self, slot: int, asked: SamplingParams) -> None:
        if not (asked.biases_logits or asked.bad_word_ids):
            return  # as of most
        if asked.biases_logits:
            self._add_bias(slot, asked)
        for place, token in _places(asked.bad_word_ids):
            self.words.extend((slot, place, token))

    def _add_bias(self, slot: int, asked: SamplingParams) -> None:
        allowed = asked.packed_allowed
        first = self.first.setdefault(allowed, slot) if allowed else slot
        if first != slot:
            self.copies.extend((slot, first))
        else:
            self.fills.extend((slot, _bits(-math.inf if allowed else 0.0)))
        if allowed and first == slot:
            tokens = np.frombuffer(allowed, "<i4")
            self.allowed.append(np.stack((np.full(len(tokens), slot), tokens), 1).ravel())
        for token, bias in asked.logit_bias.items():
            self.biases.extend((slot, token, _bits(bias)))

    @property
    def runs(self) -> tuple[list[int] | Ints, ...]:
        """All of them; () where none has a list."""
        allowed: Ints | list[int] = np.concatenate(self.allowed) if self.allowed else []
        runs = self.fills, allowed, self.copies, self.biases, self.words
        return runs if any(map(len, runs)) else ()


def _places(words: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int]]:
    """Where each token of each word is in a slot's row, and the token."""
    for i, word in enumerate(words):
        end = (i + 1) * MAX_WORD_TOKENS
        yield from enumerate(word, end - len(word))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _floats(bits: Tensor) -> Tensor:
    """32-bit floats from their bits. Shapes: i64 -> f32."""
    return bits.int().view(torch.float32)
