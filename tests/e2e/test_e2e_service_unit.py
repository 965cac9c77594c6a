"""The unit file's promises, kept without systemd: its command is started, killed and started again here."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.command_line import COMMAND, environment, wait_until_gone
from support.service_unit import UNIT, command_of, descendants, is_started_again, settings_of, shared_memory_of

pytestmark = pytest.mark.slow

KEY = "key-of-alice"
NOTICED_S = 5.0  # by every process that the dead one had started: the kernel ends them at once, if it has a core for it
START_S = 120.0

Run = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def unit() -> dict[str, str]:
    return settings_of(UNIT.read_text())


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path, tiny_flags: tuple[str, ...], unit: dict[str, str], port: int) -> Iterator[Run]:
    """The same command each time, as the unit has it: another program, and the flags of /etc/overlap-spec/flags."""
    (tmp_path / "keys").write_text(f"alice:{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    flags = " ".join((*tiny_flags, "--port", str(port)))
    words = command_of(unit, {"CREDENTIALS_DIRECTORY": str(tmp_path), "OVERLAP_SPEC_FLAGS": flags})
    assert Path(words[0]).is_absolute() and Path(words[0]).name == "overlap-spec"
    with (tmp_path / "journal").open("ab") as journal, ExitStack() as running:

        def started() -> "subprocess.Popen[bytes]":
            process = subprocess.Popen(
                [*COMMAND, *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=journal,
                env=environment(tmp_path),
            )
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield started


def wait_until_it_answers(port: int) -> None:
    """With the key; without it there is no answer."""
    body = {"prompt": "Once", "max_tokens": 2}
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"authorization": f"Bearer {KEY}"}
    status, deadline = 0, time.monotonic() + START_S
    while status != 200 and time.monotonic() < deadline:
        try:
            status = httpx.post(url, json=body, headers=headers, timeout=60).status_code
        except httpx.HTTPError:
            status = 0
        time.sleep(0.1)
    assert status == 200
    assert httpx.post(url, json=body, timeout=60).status_code == 401, "the keys of the unit are the server's"


def run_directories(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.glob("overlap-spec-*")}


def test_a_killed_server_leaves_nothing_and_the_same_command_starts_at_once(
    run: Run, unit: dict[str, str], port: int, tmp_path: Path
) -> None:
    first = run()
    wait_until_it_answers(port)
    others = list(descendants(first.pid))
    assert len(others) >= 3, "frontend, scheduler and worker"
    for pid in (first.pid, *others):
        assert not [path for path in shared_memory_of(pid) if path.exists()], "a killed process would leave it"
    first.send_signal(signal.SIGKILL)
    assert wait_until_gone(others, NOTICED_S)
    assert is_started_again(unit, first.wait())
    stale = run_directories(tmp_path)
    second = run()
    wait_until_it_answers(port)
    assert not stale & run_directories(tmp_path), "the next start takes away what a killed one could not"
    others = list(descendants(second.pid))
    second.terminate()  # KillMode=mixed: to the main process alone
    assert second.wait(float(unit["TimeoutStopSec"])) == 0 and not is_started_again(unit, 0)
    assert wait_until_gone(others, NOTICED_S) and not run_directories(tmp_path)


def test_a_wrong_flag_is_not_tried_again_and_a_taken_port_is(
    run: Run, unit: dict[str, str], port: int, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        status = run().wait(START_S)
    assert is_started_again(unit, status), "who has the port may be about to end"
    (tmp_path / "keys").write_text("")
    assert not is_started_again(unit, run().wait(START_S))
