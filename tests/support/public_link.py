"""The public link over real sockets, played by a test that is both ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from overlap_spec.client.link import ClientDealer
from overlap_spec.config import LinkSettings
from overlap_spec.frontend.client_router import ClientRouter
from overlap_spec.frontend.frontend_actor import ClientEndpoint

Scene = Callable[[ClientEndpoint], Awaitable[None]]
TIMEOUT_S = 20.0


def on_stage(scene: Scene, directory: Path, **settings: object) -> None:
    """Play the scene with an endpoint whose own socket is in the directory."""

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = LinkSettings(**{"client_endpoint": None, "api_key": None, **settings})
        try:
            with ClientEndpoint(context, link, f"ipc://{directory}/client.sock") as endpoint:
                async with asyncio.timeout(4 * TIMEOUT_S):
                    await scene(endpoint)
        finally:
            context.destroy(linger=0)

    asyncio.run(run())


@asynccontextmanager
async def dealer(endpoint: ClientEndpoint, api_key: str | None = None) -> AsyncIterator[ClientDealer]:
    """A client of the endpoint."""
    client = ClientDealer(endpoint.address, api_key)
    try:
        yield client
    finally:
        await client.close()


async def arrives(router: ClientRouter) -> tuple[int, object]:
    """The next message, with its client's number."""
    async with asyncio.timeout(TIMEOUT_S):
        return await router.recv()


async def never(work: Awaitable[object], seconds: float = 0.3) -> None:
    """Nothing comes of the work for as long."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work, seconds)
