"""Lists of tokens at the frontend: what cannot be followed is refused by its field, words go on as ids alone.

Bad words: refused by their characters first, encoded once for all that share them, and not in the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.frontend_harness import serving
from support.small_tokenizers import smollm2

from overlap_spec.client.link import pack_ids
from overlap_spec.errors import RequestError
from overlap_spec.features.penalties.frontend import FEW_CHARS, BadWords, WordIds, _encoded, check_lists
from overlap_spec.frontend.codec import IdsOnly
from overlap_spec.messages import Rejected, SamplingParams

STOPS = (2, 3)


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias", "token id 10 is outside"),
        ({"allowed_ids": pack_ids([1, 10])}, "allowed_token_ids", "token id 10 is outside"),
        ({"allowed_ids": pack_ids([1] * 11)}, "allowed_token_ids", "at most 10 token ids"),
        ({"bad_word_ids": ((1, 10),)}, "bad_words", "token id 10 is outside"),
        ({"allowed_ids": pack_ids([1]), "bad_word_ids": ((1,),)}, "allowed_token_ids", "forbid all"),
        ({"allowed_ids": pack_ids([2, 3]), "min_new_tokens": 1}, "allowed_token_ids", "forbid all"),
    ],
)
def test_lists_that_cannot_be_followed_name_their_field(asked: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_lists(SamplingParams(**asked), STOPS, 10)
    assert caught.value.field == field


def test_lists_that_leave_a_token_are_taken() -> None:
    check_lists(SamplingParams(allowed_ids=pack_ids([2, 3])), STOPS, 10)
    check_lists(SamplingParams(allowed_ids=pack_ids([1, 2]), bad_word_ids=((2,),), min_new_tokens=1), STOPS, 10)
    check_lists(SamplingParams(allowed_ids=pack_ids([1]), bad_word_ids=((1, 1),)), STOPS, 10)


def test_bad_words_are_ids_for_the_scheduler_and_a_bias_must_be_of_a_token() -> None:
    async def scenario() -> None:
        async with serving() as harness:
            harness.generate("Hi", bad_words=("cat",))
            sampling = (await harness.admitted()).sampling
            assert sampling.bad_words == () and len(sampling.bad_word_ids) == 2
            harness.generate("Hi", "b", logit_bias={49152: 1.0})
            assert (await harness.heard(Rejected)).field == "logit_bias"

    asyncio.run(scenario())


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
