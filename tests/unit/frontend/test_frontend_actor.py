"""The frontend as a process of its own: ready, serving, stopping, failing. The test is supervisor and scheduler."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
from support.small_tokenizers import EOS, SMOLLM2, smollm2

from overlap_spec.client import Client
from overlap_spec.config import (
    ApiKeys,
    CacheSettings,
    LinkSettings,
    ModelFiles,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpecSettings,
    encode_settings,
)
from overlap_spec.frontend.open_requests import UIDS_OF_A_FRONTEND
from overlap_spec.messages import (
    Abort,
    ActorFailed,
    ActorReady,
    Admit,
    Drained,
    EngineLimits,
    Finish,
    FinishKind,
    FrontendFacts,
    Generate,
    NewFrontend,
    SamplingParams,
    Shutdown,
    TextPrompt,
    TokenDeltas,
    ToScheduler,
    ToSupervisor,
)
from overlap_spec.runtime.run_directory import Endpoints
from overlap_spec.runtime.step_link import SpinPolicy, StepInbox
from overlap_spec.runtime.transport import Inbox, ZmqInbox, ZmqOutlet

M = TypeVar("M")
TIMEOUT_S = 20.0
SETTINGS = Settings(
    model=ModelSettings(
        name="tiny",
        files=ModelFiles(
            weights="", config={}, tokenizer_dir=str(SMOLLM2), eos_token_ids=(EOS,), context_length=64, vocab_size=49152
        ),
        dtype="float64",
        device="cpu",
        max_len=64,
    ),
    spec=SpecSettings("NONE", None, 0, 0, 1),
    cache=CacheSettings(page_size=4, max_total_tokens=128, mem_fraction=0.88, prefix_cache=True),
    scheduler=SchedulerSettings(max_running_requests=4, depth=2, chunk_tokens=None, seed=1),
    server=ServerSettings("127.0.0.1", 0, ApiKeys()),
    link=LinkSettings(None, None),
    skip_tokenizer_init=False,
    log_level="info",
    num_threads=1,
)


class Process:
    """A running frontend and the links around it."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", directory: Path, settings: Settings, generation: int
    ) -> None:
        endpoints = Endpoints(directory)
        self.address = endpoints.client()
        self.supervisor: ZmqInbox[ToSupervisor] = ZmqInbox(context, endpoints.inbox("supervisor"), ToSupervisor)
        others: ZmqInbox[ToScheduler] = ZmqInbox(context, endpoints.inbox("scheduler"), ToScheduler)
        steps = endpoints.steps("scheduler")
        self.scheduler: StepInbox[ToScheduler] = StepInbox(others, steps, ToScheduler, SpinPolicy(0.0))
        self.outlet: ZmqOutlet[Any] = ZmqOutlet(context, Endpoints(directory, generation).inbox("frontend"))
        module = "overlap_spec.frontend.frontend_actor"
        command = [
            sys.executable,
            "-m",
            "overlap_spec.runtime.actor",
            "frontend",
            module,
            str(directory),
            str(generation),
            "0",
            str(os.getpid()),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(encode_settings(settings))
        self.process.stdin.close()

    async def exit_status(self) -> int:
        return await asyncio.to_thread(self.process.wait, TIMEOUT_S)


@asynccontextmanager
async def started(settings: Settings = SETTINGS, generation: int = 0) -> AsyncIterator[Process]:
    """`generation`: of the frontend, where the scheduler has stayed since the start."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="os-") as directory:  # short: the path of a socket is limited
        process = Process(context, Path(directory), settings, generation)
        try:
            yield process
        finally:
            process.process.kill()
            process.process.wait()
            process.scheduler.close()
            context.destroy(linger=0)


async def hears(inbox: Inbox[Any], kind: type[M]) -> M:
    async with asyncio.timeout(TIMEOUT_S):
        message = await inbox.recv()
    assert isinstance(message, kind), message
    return message


@pytest.mark.slow
def test_a_process_gets_ready_serves_drains_and_stops() -> None:
    async def run() -> None:
        async with started() as frontend:
            ready = await hears(frontend.supervisor, ActorReady)
            assert ready.facts == FrontendFacts("BPE, 49152 tokens", frontend.address, smollm2().chat_template)
            frontend.outlet.send(EngineLimits(64, 128, 4, 49152))
            async with Client(frontend.address) as client:
                await client.wait_ready(TIMEOUT_S)
                answer = asyncio.create_task(client.complete("Hello", SamplingParams(max_new_tokens=9)))
                admit = await hears(frontend.scheduler, Admit)
                frontend.outlet.send(Shutdown(drain=True))
                tokens, finish = [504, EOS], Finish(FinishKind.STOP, EOS)
                frontend.outlet.send(TokenDeltas([admit.uid], [tokens], [finish], [1]))
                assert (await answer).text == "The"
                await hears(frontend.supervisor, Drained)
                frontend.outlet.send(Shutdown(drain=False))
                assert await frontend.exit_status() == 0
            assert not Path(frontend.address.removeprefix("ipc://")).exists()

    asyncio.run(run())


def test_one_that_was_started_alone_tells_the_scheduler_first_and_uses_no_uid_of_those_before() -> None:
    async def run() -> None:
        async with started(generation=3) as frontend:
            assert await hears(frontend.scheduler, NewFrontend) == NewFrontend(3)
            assert (await hears(frontend.supervisor, ActorReady)).generation == 3
            frontend.outlet.send(EngineLimits(64, 128, 4, 49152))
            async with Client(frontend.address) as client:
                await client.wait_ready(TIMEOUT_S)
                asking = asyncio.create_task(client.complete("Hello", SamplingParams(max_new_tokens=9)))
                admit = await hears(frontend.scheduler, Admit)
                assert admit.uid == 3 * UIDS_OF_A_FRONTEND
                frontend.outlet.send(Shutdown(drain=True))
                asking.cancel()
                await hears(frontend.scheduler, Abort)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(frontend.supervisor.recv(), 0.2)

    asyncio.run(run())


@pytest.mark.slow
def test_requests_of_one_call_reach_the_scheduler_as_one_packet() -> None:
    """Unless this machine is so busy that they take the frontend 5 ms: then in another round."""

    async def come_together(client: Client, frontend: Process) -> bool:
        sampling = SamplingParams(max_new_tokens=1, seed=1)
        async with client.together() as running:
            await running.start([Generate(str(number), TextPrompt("Hello"), sampling) for number in range(4)])
            found = [await hears(frontend.scheduler, Admit), *frontend.scheduler.drain()]
            all_at_once = len(found) == 4
            while len(found) < 4:
                found.append(await hears(frontend.scheduler, Admit))
            uids = [admit.uid for admit in found if isinstance(admit, Admit)]
            ends = [Finish(FinishKind.LENGTH)] * 4
            frontend.outlet.send(TokenDeltas(uids, [[504]] * 4, ends, [0] * 4))
            num_ended = 0
            while num_ended < 4:
                num_ended += len(await running.take())
        return all_at_once

    async def run() -> None:
        async with started() as frontend:
            await hears(frontend.supervisor, ActorReady)
            frontend.outlet.send(EngineLimits(64, 128, 4, 49152))
            async with Client(frontend.address) as client:
                await client.wait_ready(TIMEOUT_S)
                assert any([await come_together(client, frontend) for _ in range(10)])

    asyncio.run(run())


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_read_fails_with_its_path() -> None:
    async def run() -> None:
        files = msgspec.structs.replace(SETTINGS.model.files, tokenizer_dir="/nowhere")
        model = msgspec.structs.replace(SETTINGS.model, files=files)
        async with started(msgspec.structs.replace(SETTINGS, model=model)) as frontend:
            failed = await hears(frontend.supervisor, ActorFailed)
            assert "/nowhere/tokenizer.json" in failed.error
            assert await frontend.exit_status() == 1

    asyncio.run(run())
