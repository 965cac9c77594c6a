"""Bad words: refused by their characters first, encoded once for all that share them, and not in the event loop."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.small_tokenizers import smollm2

from overlap_spec.errors import RequestError
from overlap_spec.features.penalties.bad_words import FEW_CHARS, BadWords, WordIds, _encoded
from overlap_spec.frontend.codec import IdsOnly
from overlap_spec.messages import SamplingParams


class Letters(IdsOnly):
    """A token for each character."""

    longest_token = 3

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        return [ord(each) for each in text]


class Apart:
    """Counts what is done in a thread, and does it when it is let."""

    def __init__(self) -> None:
        self.num_chars: list[int] = []
        self.may = asyncio.Event()

    async def run(self, owner: str, num_chars: int, work: Callable[[], WordIds]) -> WordIds:
        self.num_chars.append(num_chars)
        await self.may.wait()
        return work()


def on_stage(scene: Callable[[BadWords, Letters, Apart], Awaitable[None]]) -> None:
    async def play() -> None:
        codec, apart = Letters(), Apart()
        await scene(BadWords(codec, apart.run), codec, apart)

    asyncio.run(play())


def of(*words: str) -> SamplingParams:
    return SamplingParams(bad_words=words)


def test_a_word_with_too_many_characters_is_not_encoded() -> None:
    async def scene(words: BadWords, codec: Letters, apart: Apart) -> None:
        with pytest.raises(
            RequestError, match="bad_words: words of 8 tokens have at most 24 characters .* got one of 25"
        ):
            await words.added(of("a", "b" * 25), 200)
        assert codec.encoded == []
        with pytest.raises(RequestError, match="'bbbbbbbbbbbbbbbbbbbbbbbb' has 24 tokens, at most 8"):
            await words.added(of("b" * 24), 200)
        codec.longest_token = 0  # not known: the tokens alone count
        with pytest.raises(RequestError, match="2000 characters has 2000 tokens, at most 8"):
            words._known.clear()
            apart.may.set()
            await words.added(of("b" * 2000), 200)

    on_stage(scene)


def test_many_words_are_encoded_in_a_thread_and_once_for_all_that_share_them() -> None:
    async def scene(words: BadWords, codec: Letters, apart: Apart) -> None:
        many = tuple(f"w{i:03}" for i in range(FEW_CHARS // 4 + 1))
        assert words.takes_long(of(*many)) and not words.takes_long(of(*many[1:]))
        waiting = [asyncio.create_task(words.added(of(*many), 200)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert apart.num_chars == [4 * len(many)] and not codec.encoded
        waiting[0].cancel()  # the others go on
        apart.may.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert isinstance(found[1], SamplingParams) and found[1] == found[2]
        assert found[1].bad_word_ids == tuple(tuple(map(ord, word)) for word in many)
        await words.added(of(*many), 200)
        assert len(codec.encoded) == 2 * len(many), "they are encoded again"

    on_stage(scene)


def test_few_words_are_encoded_at_once_and_an_error_is_not_kept() -> None:
    async def scene(words: BadWords, codec: Letters, apart: Apart) -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match="outside the model's vocabulary"):
                await words.added(of("\u0101"), 200)
        assert len(codec.encoded) == 4 and apart.num_chars == []
        for i in range(9):
            await words.added(of(chr(97 + i)), 200)
        assert len(words._known) == 4

    on_stage(scene)


def test_a_word_is_bad_after_a_space_too_where_that_is_another_token() -> None:
    codec = smollm2()
    plain, spaced = (tuple(codec.encode(text, False)) for text in ("cat", " cat"))
    assert plain != spaced and _encoded(" cat", codec, 49152) == _encoded("cat", codec, 49152) == [plain, spaced]
