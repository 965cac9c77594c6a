"""Requests of a client whose frontend is replaced: none repeats or loses a token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.client_harness import TIMEOUT_S

from overlap_spec.client import Client
from overlap_spec.client.link import unpack_ids
from overlap_spec.config import LinkSettings
from overlap_spec.errors import ActorDied, RequestAborted, RequestError
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.messages import (
    CLIENTS_OF_A_FRONTEND,
    Cancel,
    Continued,
    Finish,
    FinishKind,
    Generate,
    Ping,
    Pong,
    SamplingParams,
    Terms,
    TextDeltas,
    TextPrompt,
    Tokenize,
    Usage,
)

DONE = Finish(FinishKind.LENGTH)


def row(text: str, tokens: list[int], finish: Finish | None = None, request_id: str = "a") -> TextDeltas:
    return TextDeltas([request_id], [text], [tokens], [finish], [Usage(5, 2, len(tokens), 7)])


class Frontend:
    """One process's end of the link, at the address of those before it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, generation: int) -> None:
        self._endpoint = ClientEndpoint(context, LinkSettings(client_endpoint=None, api_key=None), address)
        self._endpoint.router.number_from(generation * CLIENTS_OF_A_FRONTEND)
        self._client = 0  # who was heard last: a client that connects anew is another one

    async def heard(self, *kinds: type[Any]) -> Any:
        """The next message of these kinds; others are skipped."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                client, message = await self._endpoint.router.recv()
                if isinstance(message, kinds):
                    self._client = client
                    return message

    async def ready(self, is_ready: bool = True) -> None:
        """Answer a ping."""
        ping = await self.heard(Ping)
        self.say(Pong(ping.sent_at, is_ready, self._client))

    def say(self, message: TextDeltas | Pong) -> None:
        self._endpoint.router.send(self._client, message)

    def die(self) -> None:
        self._endpoint.close()


@asynccontextmanager
async def frontends(
    tmp_path: Path, heartbeat_s: float = 0.1
) -> AsyncIterator[tuple[Client, Callable[[int], Frontend]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/client.sock"
    try:
        async with asyncio.timeout(2 * TIMEOUT_S), Client(address, heartbeat_s=heartbeat_s) as client:
            yield client, lambda generation: Frontend(context, address, generation)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_request_goes_on_behind_what_has_come(tmp_path: Path, is_told: bool) -> None:
    """Whether the client is told of the death, as the engine's own is, or finds another frontend at the address."""

    async def story() -> None:
        async with frontends(tmp_path) as (client, frontend):
            first = frontend(0)
            await first.ready()
            terms = Terms(cache_salt="s", age_s=3.0)
            call = asyncio.create_task(client.complete("x", SamplingParams(seed=1), "a", terms))
            asked = await first.heard(Generate)
            first.say(row("one ", [1, 2]))
            first.say(row("", [3]))
            first.say(row("two", [4]))
            question = asyncio.create_task(client.tokenize("y"))
            await first.heard(Tokenize)
            await asyncio.sleep(0.1)
            first.die()
            if is_told:
                client.frontend_died(ActorDied("frontend", "killed"))
            second = frontend(1)
            await second.ready(False)
            await second.ready()
            assert (await second.heard(Tokenize)).prompt == TextPrompt("y"), "a request may wait for the answer"
            again = await second.heard(Generate)
            assert (again.request_id, again.prompt, again.sampling) == ("a", asked.prompt, asked.sampling)
            assert again.terms.cache_salt == "s" and again.terms.has_begun and again.terms.age_s > 3.05
            given = again.continued
            assert unpack_ids(given.output) == [1, 2, 3, 4]
            assert (given.num_chars, given.cached_tokens, given.verify_steps) == (len("one two"), 2, 7)
            second.say(row(" three", [5], DONE))
            answer = await call
            assert (answer.text, answer.token_ids) == ("one two three", [1, 2, 3, 4, 5])
            second.die()
            client.frontend_died(ActorDied("frontend", "killed"))
            with pytest.raises(ActorDied):
                await question  # which may be what kills them

    asyncio.run(story())


def test_a_request_that_is_asked_meanwhile_is_sent_once(tmp_path: Path) -> None:
    """So is one without an answer yet; one that was left is not, and a cancel comes behind its request."""

    async def story() -> None:
        async with frontends(tmp_path) as (client, frontend):
            first = frontend(0)
            await first.ready()
            calls = [asyncio.create_task(client.complete("x", None, name)) for name in ("a", "left")]
            await first.heard(Generate)
            await first.heard(Generate)
            first.die()
            client.frontend_died(ActorDied("frontend", "killed"))
            calls.append(asyncio.create_task(client.complete("x", None, "b")))
            await asyncio.sleep(0.05)
            calls[1].cancel()
            await client.cancel("b")
            second = frontend(1)
            await second.ready()
            found = [await second.heard(Generate, Cancel) for _ in range(3)]
            assert [(type(each), each.request_id) for each in found] == [
                (Generate, "a"),
                (Generate, "b"),
                (Cancel, "b"),
            ]
            assert found[0].continued == Continued(b"", 0, 0, 0), "it was open, and a drain lets it go on"
            assert found[1].continued is None
            for name in "ab":
                second.say(row("z", [1], DONE, name))
            assert [(await calls[index]).text for index in (0, 2)] == ["z", "z"]
            second.die()

    asyncio.run(story())


def test_one_that_has_become_too_large_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens that it was given. Those that are sent together with it go on."""

    async def story() -> None:
        async with frontends(tmp_path) as (client, frontend):
            first = frontend(0)
            await first.ready()
            prompts = {"a": "x", "large": "x" * 500, "b": "y"}
            calls = {name: asyncio.create_task(client.complete(text, None, name)) for name, text in prompts.items()}
            for _ in calls:
                await first.heard(Generate)
            first.die()
            monkeypatch.setattr("overlap_spec.client.link.MAX_MESSAGE_BYTES", 400)
            client.frontend_died(ActorDied("frontend", "killed"))
            second = frontend(1)
            await second.ready()
            assert [(await second.heard(Generate)).request_id for _ in range(2)] == ["a", "b"]
            with pytest.raises(RequestError, match="at most 400"):
                await calls["large"]
            for name in "ab":
                second.say(row("z", [1], DONE, name))
                assert (await calls[name]).text == "z"
            second.die()

    asyncio.run(story())


def test_a_request_that_is_asked_while_it_starts_waits(tmp_path: Path) -> None:
    """Not until its engine is warm does a frontend take requests."""

    async def story() -> None:
        async with frontends(tmp_path) as (client, frontend):
            first = frontend(0)
            await first.ready()
            call = asyncio.create_task(client.complete("x", None, "a"))
            await first.heard(Generate)
            first.die()
            client.frontend_died(ActorDied("frontend", "killed"))
            second = frontend(1)
            for _ in range(3):
                await second.ready(False)
                assert isinstance(await second.heard(Ping, Generate), Ping)
            await second.ready()
            await second.heard(Generate)
            second.say(row("z", [1], DONE))
            assert (await call).text == "z"
            second.die()

    asyncio.run(story())


def test_a_request_that_two_frontends_died_with_is_not_sent_to_a_third(tmp_path: Path) -> None:
    async def story() -> None:
        async with frontends(tmp_path) as (client, frontend):
            call = asyncio.create_task(client.complete("x", None, "a"))
            for generation in (0, 1):
                one = frontend(generation)
                await one.ready()
                await one.heard(Generate)
                one.die()
                client.frontend_died(ActorDied("frontend", f"death {generation}"))
                client.frontend_died(ActorDied("frontend", "of one that had nothing yet"))
            with pytest.raises(ActorDied, match="death 1"):
                await call

    asyncio.run(story())


def test_a_frontend_of_an_older_generation_is_another_engine(tmp_path: Path) -> None:
    """Its model may be another one."""

    async def story() -> None:
        async with frontends(tmp_path) as (client, frontend):
            first = frontend(1)
            await first.ready()
            call = asyncio.create_task(client.complete("x", None, "a"))
            await first.heard(Generate)
            first.die()
            second = frontend(0)
            await second.ready()
            with pytest.raises(RequestAborted, match="gave this client up"):
                await call
            second.die()

    asyncio.run(story())


def test_another_frontend_is_asked_as_soon_as_there_is_a_connection(tmp_path: Path) -> None:
    """A client that is not told of a death need not wait for its next heartbeat."""

    async def scenario() -> None:
        async with frontends(tmp_path, heartbeat_s=10 * TIMEOUT_S) as (client, frontend):
            first = frontend(0)
            await first.ready()  # before the request, or its ping could come first and be skipped
            asking = asyncio.create_task(client.complete("Hi", request_id="a"))
            await first.heard(Generate)
            await asyncio.sleep(0.2)  # in which it hears what was sent when the connection was made
            first.die()
            second = frontend(1)
            await second.ready()  # of the connection
            await second.ready()  # of the client that knows that it is another one
            assert (await second.heard(Generate)).request_id == "a"
            second.say(row("text", [1], DONE))
            assert (await asking).text == "text"

    asyncio.run(scenario())
