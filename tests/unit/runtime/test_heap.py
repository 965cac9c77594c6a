"""Memory is given back a while after it is free, and no event loop works on that."""

import asyncio
import threading
import time

import pytest

from overlap_spec.runtime import heap
from overlap_spec.runtime.heap import GivingBack


def test_memory_is_given_back_once_for_all_that_asked_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, str]] = []
    monkeypatch.setattr(
        heap, "give_memory_back", lambda: given.append((time.monotonic(), threading.current_thread().name))
    )

    async def story() -> None:
        giving_back = GivingBack(0.05)
        for count in (1, 2):
            asked_at = time.monotonic()
            for _ in range(3):
                giving_back.soon()
                await asyncio.sleep(0.01)
            async with asyncio.timeout(20):
                while len(given) < count:
                    await asyncio.sleep(0.005)
            assert given[-1][0] - asked_at >= 0.05
        giving_back.soon()
        giving_back.close()
        await asyncio.sleep(0.1)

    asyncio.run(story())
    assert len(given) == 2 and threading.current_thread().name not in {name for _, name in given}
