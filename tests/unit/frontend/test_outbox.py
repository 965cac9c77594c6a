"""Requests that come together reach the scheduler together, in order, and none is held for long."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace
from support.frontend_harness import serving

from overlap_spec.client.link import ClientDealer
from overlap_spec.config import LinkSettings
from overlap_spec.frontend import lifecycle
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.frontend.lifecycle import MOST_S, Outbox
from overlap_spec.messages import Abort, AbortReason, Admit, Cancel, Ping, SamplingParams, ToScheduler


class Recorder:
    """An outlet that keeps what is sent at once."""

    def __init__(self) -> None:
        self.sent: list[list[ToScheduler]] = []

    def send(self, message: ToScheduler) -> None:
        self.sent.append([message])

    def send_all(self, messages: Sequence[ToScheduler]) -> None:
        self.sent.append(list(messages))

    def close(self) -> None: ...


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch ends because this process has waited for a processor."""
    monkeypatch.setattr(lifecycle, "MOST_S", 10.0)


def abort(uid: int) -> Abort:
    return Abort(uid, AbortReason.REQUESTED)


def test_messages_are_held_in_order_and_not_for_long() -> None:
    outlet, now = Recorder(), 0.0
    sends = Outbox(outlet, lambda: now)
    sends.send(abort(1))
    sends.hold()
    sends.send(abort(2))
    now = 0.9 * MOST_S
    sends.hold()
    sends.send(abort(3))
    assert outlet.sent == [[abort(1)]]
    now = MOST_S
    sends.hold()
    sends.send(abort(4))
    assert outlet.sent == [[abort(1)], [abort(2), abort(3)]]
    sends.release()
    sends.release()
    sends.send(abort(5))
    assert outlet.sent == [[abort(1)], [abort(2), abort(3)], [abort(4)], [abort(5)]]


def test_first_prompts_go_ahead_once_if_enough_follow() -> None:
    def sent(num_prompts: int, lead: int) -> list[int]:
        outlet = Recorder()
        sends = Outbox(outlet, lambda: 0.0)
        for number in range(num_prompts):
            sends.hold(16 * (num_prompts - 1 - number))
            if number == 0:
                sends.send_first(lead)
            sends.send(Admit(number, bytes(16), SamplingParams(), (), 0.0))
        sends.release()
        return list(map(len, outlet.sent))

    assert sent(32, 32) == [8, 24]
    assert sent(24, 32) == [8, 16]
    assert sent(23, 32) == [23]
    assert sent(32, 31) == [8, 24]
    assert sent(32, 0) == [32]


def test_what_is_held_after_a_release_goes_ahead_of_nothing() -> None:
    outlet = Recorder()
    sends = Outbox(outlet, lambda: 0.0)
    sends.hold()
    sends.send_first(4)
    sends.release()
    for number, more_bytes in enumerate((64, 0)):
        sends.hold(more_bytes)
        sends.send(Admit(number, bytes(16), SamplingParams(), (), 0.0))
    assert outlet.sent == []


@pytest.mark.usefixtures("patient")
def test_the_prompts_of_a_batch_go_ahead_of_each_other_only_where_nothing_else_is_open() -> None:
    async def story() -> None:
        async with serving() as h:
            assert h.service._checks.limits is not None
            h.service._checks.limits = replace(h.service._checks.limits, ahead_tokens=4)
            outlet = Recorder()
            h.service._scheduler._outlet = outlet
            for name in "abcd":
                h.generate([5, 6], name)
            await h.settle()
            for name in "efgh":
                h.generate([5, 6], name)
            await h.settle()
        assert list(map(len, outlet.sent[:3])) == [2, 2, 4]

    asyncio.run(story())


@pytest.mark.usefixtures("patient")
def test_the_prompts_of_a_batch_are_admitted_together() -> None:
    async def story() -> None:
        async with serving() as h:
            outlet = Recorder()
            h.service._scheduler._outlet = outlet
            for name in "abc":
                h.generate([5, 6], name)
            await h.settle()
            h.generate([5, 6], "d")
            h.say(Cancel("a"))
            h.generate([5, 6], "e")
            await h.settle()
        kinds = [[type(message) for message in sent] for sent in outlet.sent[:4]]
        assert kinds == [[Admit, Admit, Admit], [Admit], [Abort], [Admit]]

    asyncio.run(story())


def test_what_a_client_sends_at_once_arrives_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = LinkSettings(client_endpoint=None, api_key=None)
        with ClientEndpoint(context, link, f"ipc://{tmp_path}/client.sock") as endpoint:
            client = ClientDealer(endpoint.address, None)
            client.send_all([Ping(float(number)) for number in range(5)])
            client.send(Ping(5.0))
            found, more = [], []
            for _ in range(6):
                found.append(await endpoint.router.recv())
                more.append(endpoint.router.more_bytes > 0)
            assert found == [(1, Ping(float(number))) for number in range(6)]
            assert more == [True] * 4 + [False] * 2
            await client.close()
        context.destroy(linger=0)

    asyncio.run(story())
