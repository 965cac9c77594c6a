"""One child process, started by hand: its last words, its exit status, its deaf ears."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.fake_settings import fake_settings

from overlap_spec.config import encode_settings
from overlap_spec.messages import ActorFailed, ActorProgress, ActorReady, Shutdown, ToSupervisor
from overlap_spec.runtime.run_directory import Endpoints
from overlap_spec.runtime.transport import ZmqInbox, ZmqOutlet


class Child:
    """An actor process whose supervisor is the test."""

    def __init__(self, run_dir: Path, module: str, parent: int | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoints = Endpoints(run_dir)
        self.inbox: ZmqInbox[ToSupervisor] = ZmqInbox(self._context, self._endpoints.inbox("supervisor"), ToSupervisor)
        words = ["worker", module, str(run_dir), "0", "0", str(parent or os.getpid())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "overlap_spec.runtime.actor", *words],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:  # one that leaves at once reads nothing
            pipe.write(encode_settings(fake_settings()))

    async def recv(self) -> Any:
        return await asyncio.wait_for(self.inbox.recv(), 30)

    def tell(self, message: Shutdown) -> None:
        outlet: ZmqOutlet[Shutdown] = ZmqOutlet(self._context, self._endpoints.inbox("worker"))
        outlet.send(message)
        outlet.close()

    def finish(self) -> tuple[int, str]:
        """Exit status and what went to stderr."""
        try:
            assert self.process.stderr is not None
            with self.process.stderr as pipe:
                errors = pipe.read().decode()
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
        self._context.destroy(linger=0)
        return self.process.returncode, errors


def test_an_unforeseen_error_is_reported_logged_and_fatal(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = Child(tmp_path, "support.actors.careless")
        message = await child.recv()
        status, errors = child.finish()
        assert isinstance(message, ActorFailed)
        assert (message.actor, message.error) == ("worker", "ZeroDivisionError: seven by nothing")
        assert 'raise ZeroDivisionError("seven by nothing")' in message.traceback
        assert status == 1
        assert "ERROR worker: failed:" in errors
        assert errors.count("Traceback") == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_error_raised_on_purpose_needs_no_trace_in_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = Child(tmp_path, "support.actors.failing")
        message = await child.recv()
        assert isinstance(message, ActorFailed)
        assert message.error == "model.safetensors: fc.weight is [3, 4], expected [4, 4]"
        assert "CheckpointError" in message.traceback
        assert child.finish() == (1, "")

    asyncio.run(scenario())


def test_signals_of_the_terminal_are_left_to_the_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = Child(tmp_path, "support.actors.obedient")
        assert isinstance(await child.recv(), ActorProgress)
        assert isinstance(await child.recv(), ActorReady)
        child.process.send_signal(signal.SIGINT)
        child.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert child.process.poll() is None
        child.tell(Shutdown(drain=False))
        assert child.finish() == (0, "")

    asyncio.run(scenario())


def test_a_child_whose_parent_is_already_gone_leaves_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = Child(tmp_path, "support.actors.obedient", parent=1)
        child.process.wait(30)
        assert child.inbox.drain() == []
        assert child.finish() == (1, "")

    asyncio.run(scenario())
