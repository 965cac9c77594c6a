"""The HTTP server before a ring: a request's whole way, from its body to its reply, in one process."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import msgspec

from overlap_spec.client import Client
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.frontend.client_messages import SharedParts
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import GenerateShared, Shared, ToClient, ToFrontendFromClient
from overlap_spec.worker.startup.geometry import LoadedModels
from support.fake_engine_client import INFO, healthy
from support.ranked_models import RankedModels
from support.ring import Ring, RingConfig, running
from support.ring_links import CLIENT


class RingLink:
    """A client's end of the link to a ring's frontend service."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._shared = SharedParts()

    def send(self, message: ToFrontendFromClient) -> None:
        match message:
            case Shared():
                self._shared.put(CLIENT, message)
            case GenerateShared():
                self._ring.clients.said.put_nowait((CLIENT, self._shared.request(CLIENT, message)))
            case _:
                self._ring.clients.said.put_nowait((CLIENT, message))

    def send_all(self, messages: Sequence[ToFrontendFromClient]) -> None:
        for message in messages:
            self.send(message)

    async def recv(self) -> ToClient:
        return await self._ring.clients.others.get()

    async def close(self) -> None:
        pass


class RingClient(Client):
    """The client that the server has, linked to a ring."""

    def __init__(self, ring: Ring) -> None:
        super().__init__("ring", lost_s=math.inf)  # the ring is in this process
        self._ring = ring

    async def open(self) -> None:
        link = self._link = RingLink(self._ring)
        self._tasks = [asyncio.create_task(self._listen(link)), asyncio.create_task(self._beat())]


@asynccontextmanager
async def serving(
    models: LoadedModels | RankedModels, config: RingConfig, codec: Codec, info: ServerInfo = INFO
) -> AsyncIterator[httpx.AsyncClient]:
    """What sends bodies to a server, whose engine is a ring. At the end its ranks have answered alike."""
    async with running(models, config, codec) as ring, RingClient(ring) as client:
        info = msgspec.structs.replace(info, max_model_len=config.max_len, num_steps=config.num_steps)
        transport = httpx.ASGITransport(create_app(client, info, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://ring", timeout=60) as http:
            yield http
    ring.assert_ranks_agree()
