"""Long texts that cannot be cut: in a process, in turns, and within bounds. Here the process is the test's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from support.small_tokenizers import SMOLLM2, smollm2

from overlap_spec.client.link import pack_ids, unpack_ids
from overlap_spec.errors import RequestError
from overlap_spec.frontend import encode_pool
from overlap_spec.frontend.encode_pool import ENCODER, MANY_BYTES, MOST_BYTES, MOST_PER_TOKEN, VERY_LONG, encoder
from overlap_spec.frontend.request_reader import PromptReader
from overlap_spec.messages import ChatPrompt, Prompt, TextPrompt
from overlap_spec.runtime.isolated import TooLarge, TooLong, WorkFailed

TIMEOUT_S = 20.0
WORD = TextPrompt("a" * 600_000)


class Process:
    """Answers when it is let. `asked`: the texts' sizes, as they come."""

    def __init__(self, name: str, directory: str, most_bytes: int) -> None:
        assert (name, directory, most_bytes > 100 * MOST_BYTES) == (ENCODER, str(SMOLLM2), True)
        self.asked: list[int] = []
        self.may = asyncio.Semaphore(0)
        self.error: Exception | None = None

    def close(self) -> None:
        pass

    async def run(self, payload: bytes, timeout_s: float) -> bytes:
        assert timeout_s > 4e-6 * len(payload)
        self.asked.append(len(payload))
        await self.may.acquire()
        if self.error is not None:
            raise self.error
        return pack_ids([len(payload)])


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    found = Process(ENCODER, str(SMOLLM2), most_bytes=1 << 30)
    monkeypatch.setattr(encode_pool, "Isolated", lambda *given, **limits: [Process(*given, **limits), found][1])
    return found


def run(work: Callable[[PromptReader], Awaitable[None]]) -> None:
    async def within() -> None:
        reader = PromptReader(smollm2(), trusts_templates=False)
        async with asyncio.timeout(TIMEOUT_S):
            await work(reader)
        reader.close()

    asyncio.run(within())


def read(reader: PromptReader, prompt: Prompt, owner: str = "") -> "asyncio.Task[list[int]]":
    async def ids() -> list[int]:
        return (await reader.encode(prompt, False, False, owner=owner)).tolist()

    return asyncio.create_task(ids())


def test_a_text_that_can_be_cut_waits_for_none_that_cannot(process: Process) -> None:
    async def story(reader: PromptReader) -> None:
        held = [read(reader, WORD, "attacker") for _ in range(5)]
        await asyncio.sleep(0)
        text = "many words " * (36_000 // 11)
        assert await read(reader, TextPrompt(text), "victim") == smollm2().encode(text, False)
        short = "b" * MANY_BYTES
        assert await read(reader, TextPrompt(short), "victim") == smollm2().encode(short, False), "in a thread"
        assert process.asked == [600_000] and not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run(story)


def test_owners_take_turns(process: Process) -> None:
    async def story(reader: PromptReader) -> None:
        texts = [TextPrompt("a" * (MANY_BYTES + at)) for at in range(1, 6)]
        held = [read(reader, text, "attacker") for text in texts]
        asked = read(reader, TextPrompt("v" * 200_000), "victim")
        while not reader._uncut._turns.of("victim") or reader._uncut._turns.of("attacker") < 4:
            await asyncio.sleep(0.001)
        for _ in range(3):
            process.may.release()
        assert await asked == [200_000]
        assert 200_000 in process.asked[:3]
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run(story)


def test_the_loop_looks_for_a_cut_in_one_text_at_a_time(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is to be cut, something else has its turn after each search."""
    searched: list[str] = []

    def search(text: str) -> Iterator[str]:
        for _ in range(10):
            searched.append(text[0])
            yield ""
        yield text

    monkeypatch.setattr(smollm2(), "pieces", search)

    async def story(reader: PromptReader) -> None:
        held = [read(reader, TextPrompt(letter * 150_000), letter) for letter in "aaaaaaaaab"]
        most, before = 0, 0
        while len(searched) < 100:
            await asyncio.sleep(0)
            most, before = max(most, len(searched) - before), len(searched)
        assert most == 1
        assert searched[:10].count("b") > 1, "owners take turns at it"
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run(story)


@pytest.mark.parametrize("max_len", [0, 1000, 200_000])
def test_one_that_is_too_long_is_refused_by_name(process: Process, max_len: int) -> None:
    most = max(MOST_BYTES, MOST_PER_TOKEN * max_len)

    async def story(reader: PromptReader) -> None:
        reader.max_len = max_len
        process.may.release()
        assert await read(reader, TextPrompt("e" * (most - 5) + "\u00e9" * 2)) == [most - 1]
        prompts: dict[str, Prompt] = {
            "prompt": TextPrompt("\U0001f600" * (most // 4 + 1)),
        }
        if most == MOST_BYTES:  # a longer one is rendered in a process, too
            prompts["messages"] = ChatPrompt([{"role": "user", "content": "\U0001f600" * (most // 4 + 1)}])
        for field, prompt in prompts.items():
            with pytest.raises(RequestError, match=f"{field}: .* no place where it can be cut") as caught:
                await read(reader, prompt)
            assert caught.value.field == field and f"at most {most} are taken" in str(caught.value)
        assert len(process.asked) == 1

    run(story)


@pytest.mark.parametrize("error", [TooLong("it took more than 8 s"), TooLarge("it wanted"), WorkFailed("ended")])
def test_one_that_takes_too_much_is_a_bad_request(process: Process, error: Exception) -> None:
    async def story(reader: PromptReader) -> None:
        process.may.release()
        process.error = error
        with pytest.raises(RequestError, match=f"prompt: 600000 bytes could not be encoded as a whole: {error}"):
            await read(reader, WORD)

    run(story)


def test_the_process_finds_the_same_ids() -> None:
    text = "a" * VERY_LONG + "\u5b57" * 100 + "\U0001f600 <|im_end|>"
    assert unpack_ids(encoder(str(SMOLLM2))(text.encode())) == smollm2().encode(text, False)
