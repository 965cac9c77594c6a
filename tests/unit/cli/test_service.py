"""What the port answers before there is an engine behind it."""

import asyncio

import httpx

from overlap_spec.entrypoints.cli.service import Front
from overlap_spec.messages import EngineHealth, EngineState

STARTING = EngineHealth(
    EngineState.STARTING, "the engine is starting: compiling kernels", "worker", 12.5, {"scheduler": 0.5}
)


def test_a_start_is_shown_by_its_phase_and_everything_else_is_503() -> None:
    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(Front(lambda: STARTING))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.get(path)

    for path in ("/health", "/ping"):
        reply = asyncio.run(ask(path))
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        found = reply.json()
        assert (found["state"], found["actor"], found["since_s"]) == ("starting", "worker", 12.5)
        assert "compiling kernels" in found["reason"]
    other = asyncio.run(ask("/v1/models"))
    assert (other.status_code, other.json()["error"]["code"]) == (503, "not_ready")
