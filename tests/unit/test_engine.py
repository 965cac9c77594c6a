"""The engine as an object of one's own program: it is started once at a time."""

import asyncio

import pytest

from overlap_spec.engine import Engine


def test_an_engine_that_runs_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second set of processes would take the device's memory, and the end of either block would end both."""
    started: list[object] = []

    async def start_actors(_self: Engine, settings: object) -> None:
        started.append(settings)

    async def scenario() -> None:
        engine = Engine()
        async with engine:
            with pytest.raises(RuntimeError, match="has been started: stop it first"):
                await engine.start()
        async with engine:
            assert len(started) == 2

    monkeypatch.setattr(Engine, "_resolve", lambda self: (None, []))
    monkeypatch.setattr(Engine, "_start_actors", start_actors)
    asyncio.run(scenario())
