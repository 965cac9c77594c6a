"""Incremental decoding: the pieces, joined, are what the library gives for all ids at once."""

import random

import pytest
from support.small_tokenizers import EOS, SMOLLM2, byte_fallback_tokenizer, smollm2
from tokenizers import AddedToken, Tokenizer, models

from overlap_spec.frontend.chat_template import NoChatTemplate
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.frontend.output import Detokenizer, NoText, StreamDetokenizer

TEXTS = [
    "The quick brown fox.",
    "  leading spaces\n\n\tand tabs ",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 in a row 🦙🦙",
    "漢字かな交じり文。한국어도 🇰🇷",
    "naïve café — “quotes” … Здравствуйте",
    "def f(x):\n    return x ** 2  # 注释",
    "\N{REPLACEMENT CHARACTER} is a character too",
]


def in_runs(detokenizer: Detokenizer, ids: list[int], length: int) -> list[str]:
    pieces = [detokenizer.push(ids[start : start + length]) for start in range(0, len(ids), length)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("length", [1, 3, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(text: str, length: int) -> None:
    codec = smollm2()
    ids = codec.encode(text, add_special_tokens=False)
    assert "".join(in_runs(codec.detokenizer(True), ids, length)) == text


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_if_asked(skip: bool) -> None:
    codec = smollm2()
    ids = [*codec.encode("a <|im_start|> b", add_special_tokens=False), EOS, EOS]
    expected = "a  b" if skip else "a <|im_start|> b<|im_end|><|im_end|>"
    assert "".join(in_runs(codec.detokenizer(skip), ids, 1)) == expected == codec.decode(ids, skip)


def test_a_character_is_given_out_with_its_last_byte() -> None:
    codec = smollm2()
    ids = codec.encode("🦙", add_special_tokens=False)
    assert len(ids) > 1
    assert in_runs(codec.detokenizer(True), ids, 1) == [*[""] * (len(ids) - 1), "🦙", ""]


def test_an_incomplete_character_is_flushed_as_the_library_decodes_it() -> None:
    codec = smollm2()
    ids = codec.encode("ok 🦙", add_special_tokens=False)[:-1]
    pieces = in_runs(codec.detokenizer(True), ids, 1)
    assert "".join(pieces) == codec.decode(ids, True)
    assert pieces[-1].endswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("seed", range(40))
def test_random_ids_join_to_the_whole_decode(seed: int) -> None:
    """Random ids are full of broken UTF-8. Ids beyond the tokenizer's vocabulary decode to nothing."""
    codec = smollm2()
    draw = random.Random(seed)
    ids = [draw.choice((draw.randrange(49_300), draw.randrange(17, 300))) for _ in range(60)]
    assert "".join(in_runs(codec.detokenizer(True), ids, draw.choice((1, 2, 5)))) == codec.decode(ids, True)


def byte_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def byte_fallback(tokenizer: Tokenizer) -> StreamDetokenizer:
    return StreamDetokenizer(tokenizer, True, lambda token_id: token_id in (0, 1, 2))


def test_byte_fallback_characters_and_leading_spaces() -> None:
    tokenizer = byte_fallback_tokenizer()
    hello, world = (tokenizer.token_to_id(token) for token in ("▁Hello", "▁world"))
    ids = [1, hello, world, *byte_ids("語🦙"), world, 2]
    pieces = in_runs(byte_fallback(tokenizer), ids, 1)
    assert "".join(pieces) == "Hello world語🦙 world" == tokenizer.decode(ids)
    assert pieces[1:6] == ["Hello", " world", "", "", "語"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_byte_fallback_is_flushed_where_it_breaks_off(cut: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.token_to_id("▁Hello"), *byte_ids("🦙")[:cut]]
    assert "".join(in_runs(byte_fallback(tokenizer), ids, 1)) == tokenizer.decode(ids)


def test_text_follows_broken_bytes_although_the_library_would_take_back_a_character() -> None:
    """Whole, the library turns every byte of a broken run into U+FFFD; what is out cannot be taken back."""
    tokenizer = byte_fallback_tokenizer()
    broken = byte_ids("語") + byte_ids("語")[:1]
    ids = [*broken, tokenizer.token_to_id("!"), tokenizer.token_to_id("▁world")]
    assert "".join(in_runs(byte_fallback(tokenizer), ids, 1)) == "語\N{REPLACEMENT CHARACTER}! world"


def test_what_continues_a_text_keeps_its_leading_space() -> None:
    tokenizer = byte_fallback_tokenizer()
    hello, world = (tokenizer.token_to_id(token) for token in ("▁Hello", "▁world"))

    def after(before: list[int], ids: list[int]) -> list[str]:
        return in_runs(StreamDetokenizer(tokenizer, True, lambda token_id: token_id < 3, before), ids, 1)

    assert after([hello], [world, *byte_ids("語"), 2]) == [" world", "", "", "語", "", ""]
    assert after([], [world]) == ["world", ""]
    assert after([1], [world]) == ["world", ""]  # after <s> a text begins
    assert after(byte_ids("語")[:1], [world]) == ["world", ""]
    assert "".join(after([hello], byte_ids("語")[:2])) == 2 * "\N{REPLACEMENT CHARACTER}"


def test_a_long_tail_of_hidden_tokens_costs_nothing() -> None:
    """With ignore_eos a model may repeat its EOS for ever; the library's stream would keep each of them."""
    detokenizer = smollm2().detokenizer(True)
    assert detokenizer.push([504]) == "The"
    assert {detokenizer.push([EOS]) for _ in range(20_000)} == {""}
    assert detokenizer.flush() == ""


def test_an_engine_without_a_tokenizer_gives_no_text() -> None:
    assert in_runs(NoText(), [1, 2, 3], 1) == ["", "", "", ""]


def test_the_shipped_tokenizer_is_read_as_the_library_reads_it() -> None:
    whole = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    for text in TEXTS:
        assert smollm2().encode(text, add_special_tokens=True) == whole.encode(text).ids


def words_tokenizer() -> Tokenizer:
    """Ids 0 hello, 1 you, 2 <x>, 3 <y>; a decoder without a model's rules puts a space between tokens."""
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "you": 1}, unk_token="hello"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<x>", "<y>")])
    return tokenizer


@pytest.mark.parametrize("length", [1, 2, 100])
def test_special_tokens_in_a_row_can_be_written_without_spaces(length: int) -> None:
    codec = TextCodec(words_tokenizer(), NoChatTemplate({}), ())
    ids = [0, 2, 3, 3, 1, 2, 0, 1]
    apart = "hello <x> <y> <y> you <x> hello you"
    assert "".join(in_runs(codec.detokenizer(False), ids, length)) == apart == codec.decode(ids, False)
    assert "".join(in_runs(codec.detokenizer(False, spaces=False), ids, length)) == "hello <x><y><y> you <x> hello you"
    assert "".join(in_runs(codec.detokenizer(True, spaces=False), ids, length)) == "hello you hello you"
