"""Requests of a group over real sockets: what they share is read once, counts in the bounds, and is then forgotten."""

import asyncio
from pathlib import Path

from support.public_link import TIMEOUT_S, arrives, dealer, on_stage

from overlap_spec.client.calls import with_shared_parts
from overlap_spec.client.link import pack_ids
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.messages import ErrorCode, Generate, Ping, Rejected, SamplingParams, Shared, TextPrompt, TokenPrompt


def group(size: int, num_chars: int = 10_000) -> list[Generate]:
    prompt, sampling = TextPrompt("x" * num_chars), SamplingParams(allowed_ids=pack_ids(range(1000)))
    return [Generate(f"r{i}", prompt, sampling, seed=i) for i in range(size)]


def test_a_group_arrives_request_by_request_with_the_same_objects(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as one, dealer(endpoint) as two:
            one.send_all(with_shared_parts(group(100)))
            two.send_all(with_shared_parts([Generate("t", TokenPrompt(pack_ids((1,))), SamplingParams(seed=1))] * 2))
            heard = [await arrives(router) for _ in range(102)]
            mine = [message for number, message in heard if isinstance(message, Generate) and message.request_id != "t"]
            assert mine == group(100)
            assert len({id(message.prompt) for message in mine}) == len({id(message.sampling) for message in mine}) == 1
            assert not router._shared._of_client, "what is shared is kept after the last request that refers to it"
            assert not router._waiting.budget.total

    on_stage(scene, tmp_path)


def test_requests_whose_shared_parts_found_no_room_are_refused_as_overload(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as client:
            client.send_all(with_shared_parts(group(5, num_chars=40_000)))
            client.send(Ping(1.0))
            assert (await arrives(router))[1] == Ping(1.0)
            words = [await asyncio.wait_for(client.recv(), TIMEOUT_S) for _ in range(5)]
        for number, word in enumerate(words):
            assert isinstance(word, Rejected) and word.code is ErrorCode.OVERLOADED and word.request_id == f"r{number}"

    on_stage(scene, tmp_path, max_client_bytes=32_000, max_bytes=75_000)


def test_a_request_that_refers_to_an_earlier_sending_is_refused(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as client:
            shared, *requests = with_shared_parts(group(3))
            assert isinstance(shared, Shared)
            client.send_all((shared, requests[0]))
            assert (await arrives(router))[1] == group(3)[0]
            client.send(requests[1])
            client.send(Ping(1.0))
            assert (await arrives(router))[1] == Ping(1.0)
            word = await asyncio.wait_for(client.recv(), TIMEOUT_S)
            assert isinstance(word, Rejected) and (word.request_id, word.code) == ("r1", ErrorCode.OVERLOADED)

    on_stage(scene, tmp_path)
