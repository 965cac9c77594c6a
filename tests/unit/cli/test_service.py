"""What the port answers before there is an engine behind it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints.cli import service
from overlap_spec.entrypoints.cli.service import Front, Service
from overlap_spec.messages import READY, EngineHealth, EngineState

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


def test_a_state_is_as_old_as_it_is_when_nobody_has_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(service, "LOOK_S", 0.0)
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: now))
    engine: Any = SimpleNamespace(config=EngineConfig(), health=READY)

    async def story() -> None:
        nonlocal now
        watched = Service(engine)
        looking = asyncio.create_task(watched.note_states())
        for engine.health, seconds in ((READY, 50.0), (EngineHealth(EngineState.RECOVERING, since_s=0.1), 5.0)):
            await asyncio.sleep(0.01)  # it looks
            now += seconds
            assert watched.health().since_s == (engine.health.since_s or seconds)
        engine.health = READY
        await asyncio.sleep(0.01)
        now += 7.0
        assert watched.health().since_s == 7.0, "it has been ready since the recovery"
        looking.cancel()

    asyncio.run(story())
