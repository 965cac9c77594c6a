"""A message is counted as decoding would find it, in turns, and its head is read whatever follows."""

import random
import time
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import Ext, encode
from support.least_time import least_time

from overlap_spec.client.link import Malformed
from overlap_spec.frontend import client_messages
from overlap_spec.frontend.client_messages import (
    MOST_CONTAINERS,
    MOST_DATA_BYTES,
    MOST_ENTRIES,
    MOST_TEXT_BYTES,
    MOST_VALUES,
    Count,
    Decoder,
    Head,
    Payload,
    read_head,
)
from overlap_spec.messages import Generate, GenerateShared, SamplingParams, Terms, TextPrompt, ToFrontendFromClient

pytestmark = pytest.mark.usefixtures("no_collections")
TURN_S = 0.02  # of CPU time: what a turn may take at most, on any machine


@pytest.mark.parametrize("salt", ["a\0b", "x" * 257, "\u00e9" * 129, 5, b"x", ["x"]])
def test_a_bad_salt_is_refused_by_name_whatever_has_sent_it(salt: object) -> None:
    """No client of ours sends one: these bytes are made by hand. Of a request and of one of several."""
    sound = Generate("a", TextPrompt("x"), SamplingParams(), Terms(cache_salt="pepper"))
    for asked in (sound, GenerateShared("a", 0, 0, Terms(cache_salt="pepper"))):
        assert Decoder().decode(encode(asked), "alice").terms.cache_salt == "pepper"
        fields = msgspec.msgpack.decode(encode(asked))
        fields[4]["cache_salt"] = salt
        refused = Decoder().decode(encode(fields), "alice")
        assert isinstance(refused, Malformed)
        assert (refused.request_id, refused.field) == ("a", "cache_salt") and refused.error


def counted(payload: Payload) -> Count:
    count = Count(payload)
    while not count.advance():
        pass
    return count


def of(count: Count) -> tuple[int, ...]:
    return count._values, count._containers, count._entries, count._text_bytes, count._data_bytes


def expected(value: Any) -> list[int]:
    """Values, lists and objects, entries, bytes of texts of more than 31 bytes, bytes of data."""
    found = [1, 0, 0, 0, 0]
    if isinstance(value, str) and (size := len(value.encode())) > 31:
        found[3] = size
    elif isinstance(value, bytes):
        found[4] = len(value)
    elif isinstance(value, Ext) and len(value.data) not in (1, 2, 4, 8, 16):
        found[4] = len(value.data)
    elif isinstance(value, list | dict):
        found[1], found[2] = 1, len(value) if isinstance(value, dict) else 0
        inner = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        found = [sum(parts) for parts in zip(found, *map(expected, inner), strict=True)]
    return found


NUMBERS = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, -1, -32, -33, -128, -129, -(2**15) - 1, -(2**40), 0.5]
LENGTHS = [0, 1, 2, 4, 7, 8, 15, 16, 17, 31, 32, 255, 256, 65535, 65536]


def drawn(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 6)
    length = rng.choice(LENGTHS if depth < 2 else LENGTHS[:12])
    simple: list[Any] = [rng.choice([None, True, False]), rng.choice(NUMBERS), bytes(length), Ext(5, bytes(length))]
    if kind < len(simple):
        return simple[kind]
    if kind < 6:
        return rng.choice("aé😀") * length
    few = rng.choice([0, 1, 3, 15, 16, 17])
    if kind < 8:
        return [drawn(rng, depth + 1) for _ in range(few)]
    return {rng.choice("ké") * rng.choice([1, 20]) + str(i): drawn(rng, depth + 1) for i in range(few)}


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("seed", range(40))
def test_all_that_is_in_a_message_is_counted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VALUES", "CONTAINERS", "ENTRIES", "TEXT_BYTES", "DATA_BYTES"):
        monkeypatch.setattr(client_messages, f"MOST_{name}", 1 << 40)
    rng = random.Random(seed)
    value = [drawn(rng) for _ in range(5)]
    payload = encode(value)
    count = counted(memoryview(payload))
    assert list(of(count)) == expected(value) and count._at == len(payload) and not count.error


@pytest.mark.parametrize("size", [1 << 16, 70_000, (1 << 16) - 1])
def test_long_lists_and_objects_are_counted(size: int) -> None:
    assert of(counted(encode([0] * size))) == (1 + size, 1, 0, 0, 0)
    assert of(counted(encode({i: i for i in range(size // 2)}))) == (1 + size // 2 * 2, 1, size // 2, 0, 0)


BOUNDS: list[tuple[str, Any, int]] = [  # what a value has the most of that may be, and a byte more or one more of it
    ("values", lambda more: [0] * (MOST_VALUES - 1 + more), MOST_VALUES),
    ("values", lambda more: [[0] * 1000] * (MOST_VALUES // 1001) + [0] * (MOST_VALUES % 1001 - 1 + more), MOST_VALUES),
    ("lists and objects", lambda more: [[]] * (MOST_CONTAINERS - 1 + more), MOST_CONTAINERS),
    ("lists and objects", lambda more: [{}] * (MOST_CONTAINERS - 1 + more), MOST_CONTAINERS),
    ("entries of objects", lambda more: {i: 0 for i in range(MOST_ENTRIES + more)}, MOST_ENTRIES),
    ("entries of objects", lambda more: [{0: 0, 1: 1}] * (MOST_ENTRIES // 2) + [{0: 0}] * more, MOST_ENTRIES),
    ("bytes of text", lambda more: ["x" * (MOST_TEXT_BYTES // 2)] * 2 + ["x" * 40] * more, MOST_TEXT_BYTES),
    ("bytes of text", lambda more: "é" * (MOST_TEXT_BYTES // 2 + more), MOST_TEXT_BYTES),
    ("bytes of data", lambda more: [bytes(MOST_DATA_BYTES // 2)] * 2 + [b"x"] * more, MOST_DATA_BYTES),
]


@pytest.mark.parametrize(("what", "value", "most"), BOUNDS)
def test_too_much_of_anything_is_told_with_its_bound(what: str, value: Any, most: int) -> None:
    assert counted(encode(value(0))).error == ""
    assert counted(encode(value(1))).error == f"the message: at most {most} {what} are taken, it has more"


def test_what_a_head_announces_is_too_much_at_once() -> None:
    """Nothing of it is counted: a list of two thousand million, and one of 1,300,000 messages that are there."""
    messages = encode(["Generate", "r", ["ChatPrompt", [{"role": "user", "content": "x"}] * 1_300_000], {}])
    for payload in (b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", messages):
        began = time.thread_time()
        count = Count(memoryview(payload))
        assert count.advance() and "values" in count.error
        assert time.thread_time() - began < TURN_S / 2


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xdd\x00", b"\x92\xa5ab", b"\xc1" * 10, b"\x92\x01", b"\xd9", b"\xdb\x00\x10\x00\x00ab", b"\x91" * 300],
)
def test_what_is_cut_off_or_no_message_ends(payload: bytes) -> None:
    assert counted(payload).error == ""


def test_a_turn_is_short_whatever_is_in_the_message() -> None:
    values: list[Any] = [
        [0.5] * 300_000,
        ["x" * 20] * 300_000,
        ["x" * 40] * 200_000,
        [[]] * 60_000,
        {i: 0 for i in range(60_000)},
    ]
    for value in values:
        count, longest, num_turns = Count(memoryview(encode(value))), 0.0, 1
        while True:
            began = time.thread_time()
            is_over = count.advance()
            longest = max(longest, time.thread_time() - began)
            if is_over:
                break
            num_turns += 1
        assert longest < TURN_S and num_turns > 1


def test_decoding_what_may_be_decoded_is_short() -> None:
    """The bounds together, in the kinds of values that take longest."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFrontendFromClient)
    contents: list[Any] = [
        [f"abc{i}" for i in range(MOST_VALUES - 100)],
        {f"k{i}": "v" for i in range(MOST_ENTRIES - 10)},
        [[]] * (MOST_CONTAINERS - 10),
        "ж" * (MOST_TEXT_BYTES // 2 - 100),
    ]
    for content in contents:
        payload = encode(["Generate", "r", ["ChatPrompt", [{"role": "user", "content": content}]], {}])
        assert counted(payload).error == ""
        seconds = least_time(partial(decoder.decode, payload), 2 * TURN_S)
        assert seconds < 2 * TURN_S, "a busy machine may be half as fast as one that is measured"


@pytest.mark.parametrize(
    ("payload", "head"),
    [
        (encode(["Generate", "r" * 272, ["TextPrompt", "x"], {}]), Head("Generate", "r" * 272)),
        (encode(["Generate", "é" * 20]), Head("Generate", "é" * 20)),
        (encode(["Generate", "r", *range(20)]), Head("Generate", "r")),
        (encode(["Generate", "r", *range(70_000)]), Head("Generate", "r")),
        (encode(["K" * 300, "r" * 300]), Head("K" * 300, "r" * 300)),
        (encode(["Ping", 1.0]), Head("Ping")),
        (encode(["Ping"]), Head("Ping")),
        (encode([7, "r"]), Head()),
        (encode([]), Head()),
        (encode(7), Head()),
        (encode({"a": 1}), Head()),
        (encode(["Generate", "r" * 5000]), Head("Generate")),
        (b"", Head()),
        (b"\xdc", Head()),
        (b"\x92\xa8Gen", Head()),
        (b"\x92\xa1\xff\xa1r", Head()),
        (b"\x92\xa1K\xa1\xff", Head("K")),
    ],
)
def test_the_head_of_a_message_is_read_as_far_as_it_is_there(payload: bytes, head: Head) -> None:
    assert read_head(payload) == read_head(memoryview(payload)) == head


def test_a_head_is_read_whatever_follows_it() -> None:
    payload = memoryview(encode(["Generate", "r", [[]] * 8_000_000]))
    began = time.thread_time()
    assert read_head(payload) == Head("Generate", "r")
    assert time.thread_time() - began < TURN_S / 4
