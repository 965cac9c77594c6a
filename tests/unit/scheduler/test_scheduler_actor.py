"""The actor: waits for the worker, reports, serves, stops."""

import asyncio
import random

import msgspec
from support.fake_device import FakeDevice, make_admit, make_ready
from support.memory_link import MemoryLink

from overlap_spec import features
from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.messages import (
    Abort,
    AbortReason,
    EngineLimits,
    SchedulerFacts,
    Shutdown,
    Stats,
    ToFrontend,
    TokenDeltas,
    ToScheduler,
    ToWorker,
)
from overlap_spec.runtime.tracing import NO_TRACE
from overlap_spec.scheduler.scheduler_actor import main


class MemoryContext:
    """The part of ActorContext that the scheduler uses, made of memory links."""

    def __init__(self) -> None:
        files = ModelFiles(
            weights="", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=256, vocab_size=97
        )
        self.settings, _ = resolve(EngineConfig(page_size=4), files, Machine(1, False))
        self.links = {"scheduler": MemoryLink(ToScheduler), "worker": MemoryLink(ToWorker)}
        self.links["frontend"] = MemoryLink(ToFrontend)
        self.facts: SchedulerFacts | None = None
        self.trace = NO_TRACE
        self.generation = 0

    def step_inbox(self, union):
        assert union == features.link(ToScheduler)
        return self.links["scheduler"]

    def outlet(self, actor):
        return self.links[actor]

    step_outlet = queued_outlet = outlet

    def outlet_of_workers(self):
        return self.links["worker"]

    def ready(self, facts) -> None:
        self.facts = facts

    def report_alive(self) -> None: ...


def test_it_serves_once_the_worker_is_ready():
    async def inner() -> None:
        context = MemoryContext()
        links, device = context.links, FakeDevice(make_ready(), random.Random(0))
        running = asyncio.create_task(main(context))
        links["scheduler"].send(Abort(5, AbortReason.REQUESTED))  # early: kept, not lost, not fatal
        await asyncio.sleep(0)
        assert context.facts is None
        links["scheduler"].send(device.ready)
        assert await links["frontend"].recv() == EngineLimits(256, 256 - 2 * 4 - 4, 8, 97)
        assert isinstance(await links["frontend"].recv(), Stats)
        assert context.facts.steps_in_flight == 2 and context.facts.prefix_cache == "bigram keys"
        links["scheduler"].send(make_admit(1, [1, 2, 3], 5))
        tokens: list[int] = []
        while len(tokens) < 5:
            links["scheduler"].send(device.run(await links["worker"].recv()))
            await asyncio.sleep(0)
            for message in links["frontend"].drain():
                if isinstance(message, TokenDeltas):
                    tokens += message.tokens[0]
        links["scheduler"].send(Shutdown(drain=True))
        await running

    asyncio.run(inner())


def test_it_stops_before_the_worker_is_ready():
    async def inner() -> None:
        context = MemoryContext()
        context.links["scheduler"].send(Shutdown(drain=False))
        await main(context)
        assert context.links["frontend"].drain() == []

    asyncio.run(inner())


def test_the_worker_bounds_the_depth():
    async def inner() -> None:
        context = MemoryContext()
        context.links["scheduler"].send(msgspec.structs.replace(make_ready(), max_depth=1))
        context.links["scheduler"].send(Shutdown(drain=False))
        await main(context)
        assert context.facts.steps_in_flight == 1

    asyncio.run(inner())
