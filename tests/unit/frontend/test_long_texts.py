"""Long texts: refused before they are encoded, dropped with their requests, and out of the way of short ones."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from support.small_tokenizers import smollm2

from overlap_spec.client.link import pack_ids
from overlap_spec.errors import Overloaded, RequestError
from overlap_spec.frontend.codec import PIECE
from overlap_spec.frontend.encode_pool import LONG, MOST_THREADS, VERY_LONG, EncodeThreads
from overlap_spec.frontend.overload import ByteBudget
from overlap_spec.frontend.request_reader import MOST_IDS, MOST_TEXT, PromptReader
from overlap_spec.messages import ChatPrompt, TextPrompt
from overlap_spec.runtime.heap import GivingBack, give_memory_back

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
    longest = max(smollm2().tokenizer.get_vocab(), key=len)
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


def test_a_text_that_cannot_fit_does_not_wait_for_a_thread(reader: PromptReader) -> None:
    async def story() -> None:
        release = threading.Event()
        blocked = [asyncio.create_task(reader._threads.run("a", VERY_LONG + 1, release.wait)) for _ in range(9)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="at most"):
            await reader.encode(TextPrompt("x" * MOST_TEXT * 2), True, must_fit=False)
        release.set()
        await asyncio.gather(*blocked)

    run(story)


def test_shorter_prompts_do_not_wait_for_longer_ones(reader: PromptReader) -> None:
    async def story() -> None:
        release = threading.Event()
        blocked = [asyncio.create_task(reader._threads.run("a", VERY_LONG + 1, release.wait)) for _ in range(9)]
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
        assert reader._threads._budget.total == 0

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


def test_texts_that_wait_are_bounded_by_owner_and_in_all() -> None:
    async def story() -> None:
        threads = EncodeThreads(ByteBudget(100, 150))
        release = threading.Event()

        async def hold(owner: str, size: int) -> None:
            with threads.holding(owner, size):
                await threads.run(owner, size, partial(release.wait, TIMEOUT_S))

        tasks = [asyncio.create_task(hold("a", 60)), asyncio.create_task(hold("b", 60))]
        await asyncio.sleep(0)
        for owner, size in (("a", 50), ("c", 40)):
            with pytest.raises(Overloaded, match="120 characters of prompts wait.* at most 150 may, 100 of one client"):
                await hold(owner, size)
        release.set()
        await asyncio.gather(*tasks)
        await hold("a", 100)
        threads.close()

    run(story)


def test_owners_take_turns_at_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts one has queued, another's waits for one piece of them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: [0])
    codec, order = smollm2(), list[str]()

    def encode(text: str, special: bool) -> list[int]:
        time.sleep(0.005)
        order.append(text[:1])
        return [1]

    monkeypatch.setattr(codec, "encode", encode)

    async def story() -> None:
        reader = PromptReader(codec, trusts_templates=False)

        def text(letter: str, num_pieces: int) -> TextPrompt:
            return TextPrompt("".join(f"{letter}{at} " + "words " * (PIECE // 6) for at in range(num_pieces)))

        many = [
            asyncio.create_task(reader.encode(text(chr(97 + at), 10), True, must_fit=False, owner="attacker"))
            for at in range(10)
        ]
        while len(order) < 2:
            await asyncio.sleep(0.001)
        before = len(order)
        await reader.encode(text("V", 9), True, must_fit=False, owner="victim")
        assert len(order) - before < 45, "about one of the attacker's hundred between two of the victim's"
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        reader.close()

    run(story)


@pytest.mark.parametrize("num_ids", [LONG + 1, MOST_IDS])
def test_many_ids_are_decoded_in_a_thread_and_too_many_are_refused(reader: PromptReader, num_ids: int) -> None:
    async def story() -> None:
        ids = [1000 + at % 7 for at in range(num_ids)]
        text = await reader.decode(pack_ids(ids), False, 49152, "a")
        assert text == smollm2().decode(ids, False)
        release = threading.Event()
        blocked = [asyncio.create_task(reader._threads.run("a", LONG + 1, release.wait)) for _ in range(9)]
        waiting = asyncio.create_task(reader.decode(pack_ids(ids[: LONG + 1]), False, 49152, "a"))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        release.set()
        await asyncio.gather(*blocked, waiting)
        too_many = f"tokens: at most {MOST_IDS} token ids are decoded together, got {MOST_IDS + 1}"
        with pytest.raises(RequestError, match=too_many):
            await reader.decode(bytes(4 * MOST_IDS + 4), False, 49152, "a")

    run(story)


def test_memory_goes_back(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(GivingBack, "soon", lambda giving_back: given.append(1))

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
