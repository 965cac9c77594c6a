"""The client against the real frontend service over real sockets, with an engine that echoes its prompts."""

import asyncio
import itertools
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.client_harness import LIMITS, TIMEOUT_S, Stage, most, with_engine

from overlap_spec.client import Client
from overlap_spec.client.answers import Delta
from overlap_spec.client.calls import Together
from overlap_spec.errors import ActorDied, OverlapSpecError, Overloaded, RequestAborted, RequestError
from overlap_spec.messages import (
    AbortReason,
    FinishKind,
    Generate,
    Pong,
    Shutdown,
    TextPrompt,
    TokenPrompt,
)


def test_a_stream_adds_up_to_the_whole_answer(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            await client.wait_ready(TIMEOUT_S)
            ids = await client.tokenize("Hello wide world 🦙")
            deltas = [delta async for delta in client.generate("Hello wide world 🦙", most(len(ids)))]
            assert "".join(delta.text for delta in deltas) == "Hello wide world 🦙"
            assert [token for delta in deltas for token in delta.token_ids] == ids
            assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert deltas[-1].usage.completion_tokens == len(ids) == deltas[-1].usage.prompt_tokens
            whole = await client.complete(TokenPrompt(b"".join(i.to_bytes(4, "little") for i in ids)), most(len(ids)))
            assert (whole.text, whole.token_ids, whole.finish.kind) == ("Hello wide world 🦙", ids, FinishKind.LENGTH)

    with_engine(story, tmp_path)


def test_every_kind_of_prompt(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            assert (await client.complete("one two", most(2))).text == "one two"
            assert (await client.complete(TextPrompt("one two"), most(2))).text == "one two"
            assert (await client.complete([504, 504], most(2))).text == "TheThe"
            chat = [{"role": "user", "content": "Hi"}]
            ids = await client.tokenize(chat)
            whole = await client.complete(chat, most(len(ids), skip_special_tokens=False))
            assert whole.text.startswith("<|im_start|>system") and whole.text.endswith("<|im_start|>assistant\n")

    with_engine(story, tmp_path)


def test_many_requests_at_once_keep_apart(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as one, stage.client() as two:
            prompts = [f"number {index} of many" for index in range(40)]
            jobs = [(one if index % 2 else two).complete(text, most(30)) for index, text in enumerate(prompts)]
            for prompt, answer in zip(prompts, await asyncio.gather(*jobs), strict=True):
                assert answer.text.startswith(prompt)

    with_engine(story, tmp_path)


async def break_out(client: Client, stage: Stage) -> None:
    async for _ in client.generate("for ever", most(3000)):
        break


async def close_it(client: Client, stage: Stage) -> None:
    async with aclosing(client.generate("for ever", most(3000))) as deltas:
        await anext(deltas)


async def raise_inside(client: Client, stage: Stage) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in client.generate("for ever", most(3000)):
            raise ZeroDivisionError


async def cancel_the_task(client: Client, stage: Stage) -> None:
    task = asyncio.create_task(client.complete("for ever", most(3000)))
    await stage.until(lambda: bool(stage.scheduler.running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [break_out, close_it, raise_inside, cancel_the_task])
def test_leaving_the_loop_aborts_the_request_at_once(tmp_path: Path, leave: Any) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            await leave(client, stage)
            began = time.monotonic()
            await stage.until(lambda: bool(stage.scheduler.aborted))
            assert time.monotonic() - began < TIMEOUT_S / 10
            assert stage.scheduler.aborted[0].reason is AbortReason.REQUESTED
            assert (await client.complete("still here", most(2))).text == "still here"

    with_engine(story, tmp_path)


def test_the_id_of_a_request_that_was_left_can_be_used_again(tmp_path: Path) -> None:
    """Rows of the first that are still under way must not reach the second."""

    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            for round_ in range(20):
                async with aclosing(client.generate(f"first {round_}", most(3000), "same")) as deltas:
                    await anext(deltas)
                text = (await client.complete(f"second {round_}", most(3), "same")).text
                assert text == f"second {round_}"[: len(text)] and len(text) > 6

    with_engine(story, tmp_path)


@pytest.mark.parametrize("together", [False, True])
def test_an_id_is_free_if_the_last_row_has_come_and_is_not_taken(tmp_path: Path, together: bool) -> None:
    """No further row would free it: the next request of that id would wait for ever, and the id would stay."""

    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            if together:
                async with client.together() as running:
                    await running.start(generate_all("same"))
                    await stage.until(lambda: client._calls._open["same"].has_ended)
            else:
                async with aclosing(client.generate("at once", most(40), "same")) as deltas:
                    await anext(deltas)
                    await stage.until(lambda: client._calls._open["same"].has_ended)
            assert not client._calls._left
            assert (await client.complete("again", most(1), "same")).text == "again"

    with_engine(story, tmp_path)


def generate_all(*texts: str, tokens: int = 3) -> list[Generate]:
    """Requests whose ids are their texts."""
    return [Generate(text, TextPrompt(text), most(tokens)) for text in texts]


async def read_all(running: Together, count: int) -> dict[str, list[Delta | OverlapSpecError]]:
    """Take until so many requests have ended."""
    found: dict[str, list[Delta | OverlapSpecError]] = {}
    while count:
        for request_id, answer in await running.take():
            found.setdefault(request_id, []).append(answer)
            count -= not isinstance(answer, Delta) or answer.finish is not None
    return found


def test_requests_that_are_followed_together_keep_apart(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client, client.together() as running:
            await running.start(generate_all("one two three", "four five six"))
            await running.start(generate_all("seven eight nine"))
            for request_id, deltas in (await read_all(running, 3)).items():
                text = "".join(each.text for each in deltas if isinstance(each, Delta))
                assert request_id.startswith(text) and len(text) > 6
            await running.start(generate_all("one two three"))  # the id is free again
            assert len(await read_all(running, 1)) == 1

    with_engine(story, tmp_path)


def test_leaving_requests_that_are_followed_together_aborts_those_that_run(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            async with client.together() as running:
                await running.start(generate_all("for ever", "and ever", tokens=3000))
                await running.start(generate_all("short"))
                ended = False
                while not ended:
                    taken = [answer for name, answer in await running.take() if name == "short"]
                    ended = any(isinstance(each, Delta) and each.finish is not None for each in taken)
            await stage.until(lambda: len(stage.scheduler.aborted) == 2)
            assert (await client.complete("still here", most(2))).text == "still here"

    with_engine(story, tmp_path)


def test_of_requests_that_start_together_none_is_sent_if_one_cannot_be(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client, client.together() as running:
            await running.start(generate_all("for ever", tokens=3000))
            with pytest.raises(RequestError, match="already in use"):
                await running.start(generate_all("new", "for ever"))
            await running.start(generate_all("new", "also new"))
            found = await read_all(running, 2)
            assert found.keys() == {"for ever", "new", "also new"}
            client.fail(ActorDied("worker", "killed"))
            with pytest.raises(ActorDied):
                await running.start(generate_all("too late"))
            assert isinstance((await running.take())[-1][1], ActorDied)

    with_engine(story, tmp_path)


def test_an_abort_from_elsewhere_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client, stage.client() as other:
            deltas = client.generate("for ever", most(3000), "mine")
            await anext(deltas)
            await other.cancel("mine")  # not its own: nothing happens
            await anext(deltas)
            await other.cancel("mine", everyone=True)
            last = None
            with pytest.raises(RequestAborted, match="on request"):
                async for delta in deltas:
                    last = delta
            assert last is not None and last.finish is not None and last.finish.kind is FinishKind.ABORT

    with_engine(story, tmp_path)


def test_a_client_that_is_closed_takes_its_requests_with_it(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            waiting = asyncio.create_task(client.complete("for ever", most(3000)))
            await stage.until(lambda: bool(stage.scheduler.running))
        with pytest.raises(RequestAborted, match="closed"):
            await waiting
        await stage.until(lambda: not stage.scheduler.running, 0.2)

    with_engine(story, tmp_path)


def test_errors_are_exceptions(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            for prompt, sampling, field in (
                ("", most(1), "prompt"),
                ([], most(1), "prompt"),
                ([99999], most(1), "prompt"),
                ([1 << 40], most(1), "prompt"),
                (["x"], most(1), "prompt"),
                ("x", most(5000), "max_new_tokens"),
                ([{"role": "user"}], most(1), "messages"),
                ("x" * (33 << 20), most(1), "prompt"),
                ([{"role": "user", "content": "x", "weight": 2**70}], most(1), "prompt"),
            ):
                with pytest.raises(RequestError) as caught:
                    await client.complete(prompt, sampling)  # bad on purpose
                assert caught.value.field == field
            stage.inbox.send(replace(LIMITS, max_running_requests=1))
            deltas = client.generate("twice", most(3000), "same")
            await anext(deltas)
            with pytest.raises(RequestError, match="already in use"):
                await client.complete("twice", most(1), "same")
            with pytest.raises(Overloaded, match="requests are waiting"):
                await client.complete("more", most(1))
            await deltas.aclose()

    with_engine(story, tmp_path, max_queued_requests=0)


def test_the_answers_to_questions(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            ids = await client.tokenize("Hello <|im_end|>")
            assert await client.detokenize(ids) == "Hello <|im_end|>"
            assert await client.detokenize(ids, skip_special_tokens=True) == "Hello "
            assert await client.flush_cache() is True
            assert (await client.stats()).max_total_tokens == 8000
            with pytest.raises(RequestError) as caught:
                await client.detokenize([-1])
            assert caught.value.field == "tokens"
            deltas = client.generate("for ever", most(3000))
            await anext(deltas)
            assert await client.flush_cache() is False
            await deltas.aclose()

    with_engine(story, tmp_path)


def test_wait_ready_waits_for_a_warm_engine(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            assert (await client.ping()).ready is False
            with pytest.raises(Overloaded, match="still starting"):
                await client.wait_ready(0.2)
            with pytest.raises(Overloaded, match="still starting"):
                await client.complete("too early")
            stage.warm()
            await client.wait_ready(TIMEOUT_S)
            assert (await client.ping()).ready is True

    with_engine(story, tmp_path, warm=False)


def test_a_client_may_be_there_before_the_engine(tmp_path: Path) -> None:
    async def early() -> None:
        async with Client(f"ipc://{tmp_path}/client.sock") as client:
            with pytest.raises(ActorDied, match="is it running"):
                await client.wait_ready(0.2)

    asyncio.run(early())


def test_an_engine_that_stops_says_so(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            running = asyncio.create_task(client.complete("for ever", most(3000)))
            await stage.until(lambda: bool(stage.scheduler.running))
            stage.inbox.send(Shutdown(drain=True))
            await stage.until(lambda: stage.service._checks.draining)
            with pytest.raises(Overloaded, match="shutting down"):
                await client.complete("late")
            stage.inbox.send(Shutdown(drain=False))
            with pytest.raises(Overloaded, match="stopping"):
                await running

    with_engine(story, tmp_path)


def test_a_client_that_is_given_up_is_told_so_when_it_is_heard_of_again(tmp_path: Path) -> None:
    """Here it has read too slowly; one whose process was stopped is told in the same way."""

    async def story(stage: Stage) -> None:
        async with stage.client(heartbeat_s=0.1) as client:
            session = (await client.ping()).session
            router = stage.endpoint.router
            answer = asyncio.create_task(client.complete("for ever", most(3990)))
            await stage.until(lambda: bool(stage.scheduler.running))
            router._drop(router._clients[session], "left 5 bytes unread")
            with pytest.raises(RequestAborted, match="gave this client up"):
                await answer
            await stage.until(lambda: bool(stage.scheduler.aborted))
            assert stage.scheduler.aborted[0].reason is AbortReason.CLIENT_GONE
            assert (await client.complete("back again", most(2))).text == "back again"

    with_engine(story, tmp_path)


def test_a_busy_client_is_not_given_up(tmp_path: Path) -> None:
    """ZeroMQ's thread answers heartbeats."""

    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            session = (await client.ping()).session
            answer = asyncio.create_task(client.complete("for ever", most(200)))
            text = asyncio.create_task(client.tokenize("word " * 100_000))
            await stage.until(lambda: bool(stage.scheduler.running))
            time.sleep(0.6)  # nothing runs in this loop, both ends: ZeroMQ's threads do
            assert (await answer).usage.completion_tokens == 200
            assert len(await text) > 100_000
            assert (await client.ping()).session == session

    with_engine(story, tmp_path, client_timeout_s=0.4)


def test_a_text_that_is_waited_for_no_more_is_dropped(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client() as client:
            tasks = [asyncio.create_task(client.tokenize("many words " * 80_000)) for _ in range(4)]
            await stage.until(lambda: len(stage.service._reading) >= 2)
            for task in tasks:
                task.cancel()
            await stage.until(lambda: not stage.service._reading, 0.5)
            assert len(await client.tokenize("short")) == 1

    with_engine(story, tmp_path)


def test_a_burst_of_messages_leaves_turns_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is there when the one before it has been read, so that reading alone lets no other task run."""

    class Burst:
        left = 60

        async def recv(self) -> Pong:
            if not self.left:
                await asyncio.Event().wait()
            self.left -= 1
            return Pong(0.0, True)

    def dispatch(client: Client, message: Pong) -> None:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(Client, "_dispatch", dispatch)

    async def story() -> list[int]:
        link, left = Burst(), []
        listening = asyncio.create_task(Client("ipc://nowhere")._listen(link))
        while link.left:
            left.append(link.left)
            await asyncio.sleep(0)
        listening.cancel()
        return [before - after for before, after in itertools.pairwise(left)]

    assert 0 < max(asyncio.run(story())) <= 6
