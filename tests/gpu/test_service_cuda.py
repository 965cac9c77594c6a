"""A whole service on a GPU, where processes poll while they work: idle it sleeps, and told to stop it ends in time."""

import threading
import time
from pathlib import Path

import httpx
from support.command_line import Service, cpu_ticks, wait_until_gone

from overlap_spec.config import cache_directory

IDLE_S = 10
DRAIN_S = 0.5
NOTICED_S, FREED_S = 1.0, 4.0  # a server's death; gigabytes of the GPU's, by the driver, after it
STOP_S = 10.0  # for processes to leave, where other tests keep the cores busy
BODY = {"prompt": "The sky is", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def test_it_sleeps_when_idle_and_a_drain_that_is_cut_short_kills_no_process(tmp_path: Path) -> None:
    """Heartbeats must not keep scheduler and worker polling: 20 ms after each question would be 8 ticks."""
    flags = "--drain-timeout", str(DRAIN_S), "--max-total-tokens", "20000"  # others use the GPU beside it
    with Service(tmp_path, *flags, OVERLAP_SPEC_CACHE=cache_directory()) as service:
        time.sleep(1)
        before = {role: cpu_ticks(pid) for role, pid in service.children.items()}
        time.sleep(IDLE_S)
        spent = {role: cpu_ticks(pid) - before[role] for role, pid in service.children.items()}
        assert max(spent.values()) <= 3, spent
        lines: list[str] = []
        begun = threading.Event()
        reader = threading.Thread(target=read, args=(service.url, lines, begun))
        reader.start()
        assert begun.wait(30)
        began = time.monotonic()
        service.terminate()
        status = service.process.wait(30)
        assert (status, time.monotonic() - began < DRAIN_S + STOP_S) == (0, True), service.log()[-2000:]
        reader.join(10)
        assert any('"abort"' in line for line in lines[-4:]), lines[-4:]
        assert service.leftovers() == []


def test_a_killed_server_s_processes_leave_the_gpu(tmp_path: Path) -> None:
    """They notice its death within a second; the driver then takes back what they had."""
    flags = "--max-total-tokens", "20000"
    with Service(tmp_path, *flags, OVERLAP_SPEC_CACHE=cache_directory()) as service:
        httpx.post(f"{service.url}/v1/completions", json=BODY | {"max_tokens": 8, "stream": False}, timeout=60)
        service.process.kill()
        assert wait_until_gone(list(service.children.values()), NOTICED_S + FREED_S)


def read(url: str, lines: list[str], begun: threading.Event) -> None:
    """Read a stream to its end."""
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as reply:
        for line in reply.iter_lines():
            if line:
                lines.append(line)
            if len(lines) > 3:
                begun.set()
