"""Where the public link listens, and who is heard there: socket files, addresses and keys."""

import asyncio
import socket
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from support.public_link import TIMEOUT_S, arrives, dealer, never, on_stage

from overlap_spec.client.link import ClientDealer, Gone
from overlap_spec.errors import ConfigError
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.messages import Cancel, Ping, Pong


def test_the_file_is_private_and_goes_with_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "client.sock"

    async def scene(endpoint: ClientEndpoint) -> None:
        assert endpoint.address == f"ipc://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    on_stage(scene, tmp_path)
    assert not path.exists()


def test_the_file_of_an_engine_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "public.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            client.send(Ping(0.0))
            assert await arrives(endpoint.router) == (1, Ping(0.0))

    on_stage(scene, tmp_path, client_endpoint=f"ipc://{path}")


def test_a_file_in_use_and_a_file_that_is_no_socket_are_left_alone(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        raise AssertionError("it must not start")

    path = tmp_path / "public.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(ConfigError, match="another process listens"):
            on_stage(scene, tmp_path, client_endpoint=f"ipc://{path}")
    letter = tmp_path / "letter.txt"
    letter.write_text("dear")
    with pytest.raises(ConfigError, match="not a socket"):
        on_stage(scene, tmp_path, client_endpoint=f"ipc://{letter}")
    assert letter.read_text() == "dear"


def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        raise AssertionError("it must not start")

    for key in (None, "secret"):
        with pytest.raises(ConfigError, match="--zmq-endpoint: cannot bind tcp://192.0.2.1:5"):
            on_stage(scene, tmp_path, client_endpoint="tcp://192.0.2.1:5", api_key=key)


@pytest.mark.parametrize(("key", "heard"), [("secret", True), ("wrong", False), (None, False)])
def test_a_tcp_endpoint_with_a_key_hears_those_who_know_it(tmp_path: Path, key: str | None, heard: bool) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint, key) as client:
            client.send(Ping(0.0))
            if heard:
                assert await arrives(endpoint.router) == (1, Ping(0.0))
                endpoint.router.send(1, Pong(0.0, True))
                assert await client.recv() == Pong(0.0, True)
            else:
                await never(endpoint.router.recv())

    on_stage(scene, tmp_path, client_endpoint="tcp://127.0.0.1:*", api_key="secret")


def test_an_identity_is_not_handed_from_key_to_key(tmp_path: Path) -> None:
    """A client may choose its routing id, and take that of one that has just left: what that one opened is not its."""

    async def first_word(endpoint: ClientEndpoint, context: zmq.Context[zmq.Socket[bytes]], key: bytes) -> object:
        """What is heard first of a connection with the chosen id. ZeroMQ refuses one while another has it."""
        while True:
            with context.socket(zmq.DEALER) as socket, suppress(TimeoutError):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.ROUTING_ID, b"chosen")
                socket.setsockopt(zmq.PLAIN_USERNAME, b"overlap-spec")
                socket.setsockopt(zmq.PLAIN_PASSWORD, key)
                socket.connect(endpoint.address)
                socket.send(msgspec.msgpack.encode(Ping(0.0)))
                return await asyncio.wait_for(endpoint.router.recv(), 0.5)

    async def scene(endpoint: ClientEndpoint) -> None:
        with zmq.Context() as context:
            async with asyncio.timeout(TIMEOUT_S):
                assert await first_word(endpoint, context, b"ka") == (1, Ping(0.0))
                endpoint.router._watcher.cancel()  # however late it notices
                gone = await first_word(endpoint, context, b"kb")
                assert isinstance(gone, tuple) and gone[0] == 1 and isinstance(gone[1], Gone)
                assert await endpoint.router.recv() == (2, Ping(0.0))

    keys = {"api_key": "ka", "key_names": {"ka": "alice", "kb": "bob"}}
    on_stage(scene, tmp_path, client_endpoint="tcp://127.0.0.1:*", **keys)


def test_the_servers_own_link_needs_no_key_beside_one_that_does(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        assert endpoint.address.startswith("tcp://")
        own = ClientDealer(f"ipc://{tmp_path}/client.sock", None)
        for word in (Cancel("x", True), Cancel("x", True, of_key="bob")):
            own.send(word)
            assert await arrives(endpoint.router) == (1, word)
        async with dealer(endpoint, "ka") as alice:
            alice.send(Cancel("x", True, of_key="bob"))
            assert await arrives(endpoint.router) == (2, Cancel("x", True, of_key="alice"))
        await own.close()

    keys = {"api_key": "ka", "key_names": {"ka": "alice"}}
    on_stage(scene, tmp_path, client_endpoint="tcp://127.0.0.1:*", **keys)


@pytest.mark.parametrize("address", ["tcp://localhost:*", "tcp://[::1]:*"])
def test_other_names_of_the_loopback(tmp_path: Path, address: str) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            client.send(Ping(0.0))
            assert await arrives(endpoint.router) == (1, Ping(0.0))

    if "[" in address and not has_ipv6():
        pytest.skip("needs an IPv6 loopback (::1), and this machine has none; where there is one, it runs by itself")
    on_stage(scene, tmp_path, client_endpoint=address)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_key_is_not_asked_where_the_directory_guards(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint, "any") as client:
            client.send(Ping(0.0))
            assert await arrives(endpoint.router) == (1, Ping(0.0))

    on_stage(scene, tmp_path, api_key="secret")


def test_the_key_is_never_written_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint, "secret") as client:
            client.send(Ping(0.0))
            await arrives(endpoint.router)

    with caplog.at_level("DEBUG"):
        on_stage(scene, tmp_path, client_endpoint="tcp://127.0.0.1:*", api_key="secret")
    assert "secret" not in caplog.text
