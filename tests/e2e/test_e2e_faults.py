"""What happens to open streams, processes and files when a process is killed or told to stop."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.command_line import Service, actors_of, is_running, wait_until_gone

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.errors import ActorDied
from overlap_spec.messages import EngineState
from overlap_spec.runtime.actor import ROLES

END_S = 2.0
BODY = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "ignore_eos": True, "temperature": 0}


class Stream:
    """A chat stream that is read in a thread; `events` grows until the connection ends."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[Any] = []
        self.started = threading.Event()
        self._body = BODY | {"max_tokens": max_tokens}
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()
        assert self.started.wait(30)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=self._body, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                    if len(self.events) > 3:
                        self.started.set()
        except httpx.HTTPError as error:
            self.events.append(error)
        self.started.set()


@pytest.fixture
def own_service(tmp_path: Path, tiny_flags: tuple[str, ...]) -> Iterator[Service]:
    with Service(tmp_path, *tiny_flags) as running:
        yield running


@pytest.mark.slow
@pytest.mark.full_but_every(3)
@pytest.mark.parametrize("role", ["worker", "frontend", "scheduler"])
def test_a_killed_actor_ends_everything_within_two_seconds(
    tmp_path: Path, tiny_flags: tuple[str, ...], role: str
) -> None:
    with Service(tmp_path, *tiny_flags, "--no-recover") as own_service:
        ends_within_two_seconds(own_service, role)


def ends_within_two_seconds(own_service: Service, role: str) -> None:
    assert sorted(own_service.children) == ["frontend", "scheduler", "worker"]
    streams = [Stream(own_service.url, max_tokens=8000) for _ in range(2)]
    began = time.monotonic()
    os.kill(own_service.children[role], signal.SIGKILL)
    while True:  # the port answers 503 as long as it answers
        try:
            status = own_service.get("/health").status_code
        except httpx.HTTPError:
            break
        if status == 503:
            break
        assert time.monotonic() - began < END_S
    assert own_service.process.wait(END_S) == 1
    assert time.monotonic() - began < END_S
    for stream in streams:
        stream.join()
        assert "error" in stream.events[-1], "the last event says why, and the connection has ended"
        assert role in stream.events[-1]["error"]["message"]
    assert own_service.leftovers() == []


def text_of(stream: Stream) -> str:
    """Of a stream that has ended well."""
    assert stream.events[-1] == "[DONE]"
    return "".join(choice["delta"].get("content") or "" for event in stream.events[:-1] for choice in event["choices"])


@pytest.mark.slow
def test_a_stream_over_http_pauses_and_too_many_deaths_end_the_server(
    tmp_path: Path, tiny_flags: tuple[str, ...]
) -> None:
    with Service(tmp_path, *tiny_flags, "--max-recoveries", "1") as served:
        streams = [Stream(served.url, max_tokens=300), Stream(served.url, max_tokens=300)]
        os.kill(served.children["worker"], signal.SIGKILL)
        while (health := served.get("/health")).status_code != 503:
            pass
        assert (health.json()["state"], health.json()["actor"]) == ("recovering", "worker")
        asked = BODY | {"stream": False, "max_tokens": 4}
        waits = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60)
        assert waits.status_code == 200, "one that comes meanwhile waits"
        for stream in streams:
            stream.join()
        undisturbed = Stream(served.url, max_tokens=300)
        undisturbed.join()
        assert text_of(streams[0]) == text_of(streams[1]) == text_of(undisturbed)
        assert served.get("/health").status_code == 200
        assert "overlap_spec:recoveries_total 1.0" in served.get("/metrics").text
        last = Stream(served.url, max_tokens=8000)
        children = {role: pid for pid, role in actors_of(served.process.pid)}
        began = time.monotonic()
        os.kill(children["scheduler"], signal.SIGKILL)
        assert served.process.wait(END_S) == 1 and time.monotonic() - began < END_S
        last.join()
        assert "scheduler" in last.events[-1]["error"]["message"]
        assert not any(is_running(pid) for pid in children.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_a_signal_refuses_new_requests_and_finishes_open_ones(own_service: Service, number: signal.Signals) -> None:
    stream = Stream(own_service.url, max_tokens=500)
    own_service.process.send_signal(number)
    deadline = time.monotonic() + END_S
    while (health := own_service.get("/health")).status_code != 503:
        assert time.monotonic() < deadline
    assert health.json()["state"] == "draining"
    refused = httpx.post(f"{own_service.url}/v1/chat/completions", json=BODY | {"stream": False}, timeout=60)
    assert refused.status_code == 503
    last_scrape = own_service.get("/metrics")
    assert last_scrape.status_code == 200 and "overlap_spec:num_running_reqs" in last_scrape.text
    stream.join()
    assert stream.events[-1] == "[DONE]"
    assert [choice["finish_reason"] for event in stream.events[:-1] for choice in event["choices"]][-1] == "length"
    assert own_service.process.wait(60) == 0
    assert own_service.leftovers() == []


@pytest.mark.full
def test_a_second_signal_ends_it_at_once(own_service: Service) -> None:
    stream = Stream(own_service.url, max_tokens=8000)
    own_service.terminate()
    time.sleep(0.2)
    assert own_service.process.poll() is None
    own_service.process.send_signal(signal.SIGINT)
    assert own_service.process.wait(END_S) == 1
    stream.join()
    assert "error" in stream.events[-1]
    assert own_service.leftovers() == []


@pytest.mark.full
def test_actors_die_with_a_killed_parent_and_the_next_start_removes_its_files(
    tmp_path: Path, tiny_flags: tuple[str, ...]
) -> None:
    with Service(tmp_path, *tiny_flags, "--api-key", "correct horse", OVERLAP_SPEC_ADMIN_API_KEY="old boot") as killed:
        assert killed.get("/v1/models").status_code == 401
        pids = [killed.process.pid, *killed.children.values()]
        for shown in (Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")):
            assert not any(key in shown.read_bytes() for key in (b"correct horse", b"old boot")), shown
        killed.process.kill()
        assert wait_until_gone(list(killed.children.values()), END_S)
    stale = list(tmp_path.glob("overlap-spec-*"))
    assert len(stale) == 1, "nobody was left to remove it"
    assert not any(b"correct horse" in path.read_bytes() for path in stale[0].iterdir() if path.is_file())
    with Service(tmp_path, *tiny_flags) as successor:
        assert not stale[0].exists()
        successor.terminate()
        assert successor.process.wait(60) == 0
        assert successor.leftovers() == []


def said_health(service: Service) -> tuple[int, dict[str, Any]]:
    reply = service.get("/health")
    return reply.status_code, reply.json()


def wait_for_state(service: Service, state: str, timeout_s: float) -> dict[str, Any]:
    """What `/health` says once it says that."""
    deadline = time.monotonic() + timeout_s
    while (found := said_health(service)[1])["state"] != state:
        assert time.monotonic() < deadline, f"{found} for {timeout_s} s"
        time.sleep(0.05)
    return found


@pytest.mark.full  # a worker that hangs is, below
def test_an_actor_that_is_stopped_is_named_and_given_up(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    """One that goes on in time is well again."""
    with Service(tmp_path, *tiny_flags, "--no-recover", "--watchdog-timeout", "4") as service:
        assert said_health(service)[1]["last_sign_s"].keys() == service.children.keys()
        for role in ("frontend", "scheduler"):
            os.kill(service.children[role], signal.SIGSTOP)
            silent = wait_for_state(service, "unresponsive", 4)
            assert silent["actor"] == role
            assert silent["since_s"] >= 2  # of a timeout of 4, in milliseconds: it is 2.000 if asked at once
            os.kill(service.children[role], signal.SIGCONT)
            wait_for_state(service, "ready", 4)
        streams = [Stream(service.url, max_tokens=8000) for _ in range(2)]
        os.kill(service.children["worker"], signal.SIGSTOP)
        assert service.process.wait(4 + END_S + 2) == 1
        for stream in streams:
            stream.join()
            assert "worker: hung: " in stream.events[-1]["error"]["message"]
        assert service.logs(" s (--watchdog-timeout): the process is stopped, so it cannot write its stack")
        assert service.leftovers() == []


@pytest.mark.slow
@pytest.mark.full_but_every(2)
@pytest.mark.parametrize(
    ("worker", "why", "stack"),
    [
        ("hanging_worker", "no heartbeat for ", "in start_or_hang"),
        ("hanging_device", "a step has been in flight for ", "in wait"),  # its loop is well
    ],
)
def test_a_worker_that_hangs_ends_its_streams_and_its_stack_is_logged(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], worker: str, why: str, stack: str
) -> None:
    given = {"model_path": str(tiny_model), "dtype": "float64", "max_total_tokens": 2000, "log_level": "error"}
    config = EngineConfig(**given, watchdog_timeout=3)

    async def scenario() -> None:
        async with Engine(config, roles=ROLES | {"worker": f"support.actors.{worker}"}) as engine:
            with pytest.raises(ActorDied, match=f"worker: hung: {why}"):
                await engine.client.complete("The sky", SamplingParams(max_new_tokens=500, ignore_eos=True))
            assert (engine.health.state, engine.health.actor) == (EngineState.FAILED, "worker")

    asyncio.run(scenario())
    assert stack in capfd.readouterr().err


@pytest.mark.full
def test_a_drain_with_a_stopped_actor_ends_in_time_and_in_failure(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    with Service(tmp_path, *tiny_flags, "--drain-timeout", "1") as service:
        stream = Stream(service.url, max_tokens=8000)
        os.kill(service.children["scheduler"], signal.SIGSTOP)
        began = time.monotonic()
        service.terminate()
        assert service.process.wait(60) == 1
        assert time.monotonic() - began < 1 + END_S
        stream.join()
        assert stream.events[-2]["choices"][0]["finish_reason"] == "abort"
        assert service.logs("scheduler did not stop within")
        assert service.leftovers() == []


def test_sigterm_while_starting_leaves_nothing(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    starting = Service(tmp_path, *tiny_flags)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("overlap-spec-*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        starting.terminate()
        assert starting.process.wait(60) == 0
        assert list(tmp_path.glob("overlap-spec-*")) == []
    finally:
        starting.__exit__(None, None, None)
