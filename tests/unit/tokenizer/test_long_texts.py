"""Long texts: refused before they are encoded, dropped with their requests, and out of the way of short ones."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from support.small_tokenizers import smollm2

from overlap_spec.errors import Overloaded, RequestError
from overlap_spec.ipc.byte_budget import ByteBudget
from overlap_spec.messages import ChatPrompt, TextPrompt
from overlap_spec.runtime.heap import give_memory_back
from overlap_spec.tokenizer.lanes import LONG, MOST_THREADS, VERY_LONG, Lanes
from overlap_spec.tokenizer.pieces import PIECE
from overlap_spec.tokenizer.prompts import MOST_TEXT, PromptReader

TIMEOUT_S = 20.0


@pytest.fixture
def reader() -> Iterator[PromptReader]:
    prompts = PromptReader(smollm2(), trusts_templates=False)
    prompts.max_len = 1000
    yield prompts
    prompts.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await work()

    asyncio.run(within())


def test_what_cannot_fit_is_refused_at_once_and_what_can_is_not(reader: PromptReader) -> None:
    longest = max(smollm2()._tokenizer.get_vocab(), key=len)
    assert len(longest) == smollm2().longest_token

    async def story() -> None:
        just = "x" * (1000 * len(longest))
        assert len(await reader.encode(TextPrompt(just), True, must_fit=True)) > 1000
        for prompt, must_fit, field, words in [
            (TextPrompt(just + "x"), True, "prompt", "maximum context length of 1000 tokens"),
            (ChatPrompt([{"role": "user", "content": just}]), True, "messages", "maximum context length"),
            (TextPrompt("x" * MOST_TEXT + "x"), False, "prompt", f"at most {MOST_TEXT} are taken"),
            (ChatPrompt([{"role": "user", "content": "x" * MOST_TEXT}]), False, "messages", "at most"),
        ]:
            with pytest.raises(RequestError, match=words) as caught:
                await reader.encode(prompt, True, must_fit)
            assert caught.value.field == field and str(caught.value).startswith(field)

    run(story)


def test_a_text_that_cannot_fit_does_not_wait_for_a_lane(reader: PromptReader) -> None:
    async def story() -> None:
        release = threading.Event()
        blocked = [asyncio.create_task(reader._lanes.run(VERY_LONG + 1, release.wait)) for _ in range(9)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="at most"):
            await reader.encode(TextPrompt("x" * MOST_TEXT * 2), True, must_fit=False)
        release.set()
        await asyncio.gather(*blocked)

    run(story)


def test_shorter_prompts_do_not_wait_for_longer_ones(reader: PromptReader) -> None:
    async def story() -> None:
        release = threading.Event()
        blocked = [asyncio.create_task(reader._lanes.run(VERY_LONG + 1, release.wait)) for _ in range(9)]
        await asyncio.sleep(0)
        for size in (LONG, LONG + 1, VERY_LONG):
            assert len(await reader.encode(TextPrompt("a " * (size // 2)), True, must_fit=False)) > 100
        waiting = asyncio.create_task(reader.encode(TextPrompt("b " * VERY_LONG), True, must_fit=False))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        release.set()
        await asyncio.gather(*blocked, waiting)

    run(story)


def test_a_long_text_ends_with_its_request(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, encoded = smollm2(), list[str]()

    def encode(text: str, special: bool) -> list[int]:
        encoded.append(text)
        time.sleep(0.01)
        return [1]

    monkeypatch.setattr(codec, "encode", encode)

    async def story() -> None:
        tasks = [
            asyncio.create_task(reader.encode(TextPrompt("many words " * 90_000), True, must_fit=False))
            for _ in range(5)
        ]
        while len(encoded) < 4:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        so_far = len(encoded)
        await asyncio.sleep(0.05)
        assert len(encoded) <= so_far + MOST_THREADS
        assert reader._lanes._budget.total == 0

    run(story)


def test_a_turn_of_a_conversation_encodes_what_is_new(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, encoded = smollm2(), list[str]()
    encode = codec.encode

    def note(text: str, special: bool) -> list[int]:
        encoded.append(text)
        return encode(text, special)

    monkeypatch.setattr(codec, "encode", note)

    async def story() -> None:
        messages: list[dict[str, str]] = []
        for turn in range(4):
            said = f"{turn} words of this turn, and what was said before is new to no one.\n" * 100
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]
            prompt = ChatPrompt(list(messages))
            encoded.clear()
            ids = await reader.encode(prompt, True, must_fit=False)
            assert ids.tolist() == encode(codec.render(prompt), False)
            assert sum(map(len, encoded)) < len(said) + PIECE + 100

    run(story)


def test_pieces_are_encoded_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads meet in `encode`: one after another they would not get past it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    codec, meeting = smollm2(), threading.Barrier(4, timeout=TIMEOUT_S / 2)
    encode = codec.encode

    def meet(text: str, special: bool) -> list[int]:
        meeting.wait()
        return encode(text, special)

    monkeypatch.setattr(codec, "encode", meet)

    async def story() -> None:
        reader = PromptReader(codec, trusts_templates=False)
        text = "".join(f"word {number} and more " for number in range(8 * PIECE // 16))[: 8 * PIECE - 200]
        assert len(list(codec.pieces(text))) == 8
        for _ in range(2):  # the second time nothing meets: all is known
            ids = await reader.encode(TextPrompt(text, False), True, must_fit=False)
            assert ids.tolist() == encode(text, False)
        reader.close()

    run(story)


def test_texts_that_wait_are_bounded_by_client_and_in_all() -> None:
    async def story() -> None:
        lanes = Lanes(ByteBudget(100, 150))
        release = threading.Event()

        async def hold(client: int, size: int) -> None:
            with lanes.holding(client, size):
                await lanes.run(size, partial(release.wait, TIMEOUT_S))

        tasks = [asyncio.create_task(hold(1, 60)), asyncio.create_task(hold(2, 60))]
        await asyncio.sleep(0)
        for client, size in ((1, 50), (3, 40)):
            with pytest.raises(Overloaded, match="120 characters of prompts wait"):
                await hold(client, size)
        release.set()
        await asyncio.gather(*tasks)
        await hold(1, 100)
        lanes.close()

    run(story)


def test_memory_goes_back(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr("overlap_spec.tokenizer.prompts.give_memory_back", lambda: given.append(1))

    async def story() -> None:
        before = resident_mb()
        assert len(await reader.encode(TextPrompt("many words " * 90_000), True, must_fit=False)) > 100_000
        give_memory_back()
        assert resident_mb() - before < 60  # as a whole it takes 300 MB
        assert given

    run(story)


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 1e6
