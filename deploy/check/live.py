"""A real Prometheus scrapes a real engine: every panel of the dashboard gets data, and a death fires its alert.

    python deploy/check/live.py PROMETHEUS DIR          its last line is JSON

The engine is the default model's on a CPU. Prometheus runs with `deploy/prometheus`, scraping each second.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from support.promql import DEPLOY, dashboard_queries

WAIT_S = 240.0
INSTANCE = "engine:30000"  # of prometheus.yml
NO_DATA = {  # panels' queries that a CPU's short run has no data for, and why
    "overlap_spec:spec_class_": "classes are judged after a thousand steps",
    "overlap_spec:spec_draft_collapsed": "so is the draft",
    "overlap_spec:step_efficiency": "only where the device's ceilings are known",
}

T = TypeVar("T")


def main() -> None:
    """Run it, and print what came of it."""
    prometheus, folder = sys.argv[1], Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ports = free_ports(2)
    with engine(folder, ports[0]) as process, server(prometheus, folder, *ports):
        ask = Prometheus(ports[1])
        until(lambda: ask.query("up == 1"), "Prometheus has scraped nothing")
        traffic(ports[0])
        panels = until(lambda: ask.panels(), "panels without data")
        os.kill(worker_of(process.pid), signal.SIGKILL)
        alert = until(lambda: ask.firing("OverlapSpecRecovered"), "the alert has not fired")
        until(lambda: httpx.get(f"http://127.0.0.1:{ports[0]}/health").status_code == 200, "no recovery")
    print(json.dumps({"queries": panels, "without_data": NO_DATA, "fired": alert["labels"]["alertname"]}))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def running(folder: Path, name: str, *command: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with its log; told to end, then killed."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def engine(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The default model, every finished request audited."""
    flags = "--port", str(port), "--max-total-tokens", "20000", "--audit-rate", "1", "--drain-timeout", "1"
    with running(folder, "engine", sys.executable, "-m", "overlap_spec", "serve", *flags) as process:
        until(lambda: is_ready(port), "the engine does not start")
        yield process


def is_ready(port: int) -> bool:
    """Whether `/health` is 200."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def server(prometheus: str, folder: Path, scraped: int, port: int) -> Iterator[None]:
    """Prometheus, with the rules as they are and the configuration for this engine."""
    config = yaml.safe_load(
        (DEPLOY / "prometheus/prometheus.yml").read_text().replace(INSTANCE, f"127.0.0.1:{scraped}")
    )
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus/alerts.yml", folder)
    listen = f"--web.listen-address=127.0.0.1:{port}"
    with running(folder, "prometheus", prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data", listen):
        yield


def traffic(port: int) -> None:
    """Streams that go on beside the questions, the same prompt again and again."""
    body = {"prompt": "One, two, three, four, five, six, seven", "max_tokens": 40, "stream": True}

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):  # the engine has ended
            for _ in range(4):
                httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=WAIT_S)

    httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": 1.5})  # a refusal
    for _ in range(2):
        threading.Thread(target=ask, daemon=True).start()


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now; none while Prometheus starts."""
        try:
            answer = self._http.get("/query", params={"query": expression})
        except httpx.HTTPError:
            return []
        found: list[dict[str, Any]] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return found

    def panels(self) -> int:
        """How many queries the dashboard has, once all have had data but those of NO_DATA; 0 before."""
        queries = [each for each in dashboard_queries() if not any(name in each.expression for name in NO_DATA)]
        missing = [each.where for each in queries if not self.query(each.expression)]
        print("without data:", missing, flush=True)
        return 0 if missing else len(queries)

    def firing(self, name: str) -> dict[str, Any] | None:
        """An alert, once it fires."""
        alerts = self._http.get("/alerts").json()["data"]["alerts"]
        return next(
            (each for each in alerts if each["labels"]["alertname"] == name and each["state"] == "firing"), None
        )


def worker_of(pid: int) -> int:
    """The engine's worker process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    command = {int(child): Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in children}
    return next(child for child, words in command.items() if b"worker" in words)


def until(found: Callable[[], T], otherwise: str) -> T:
    """Ask until there is an answer. Raises: SystemExit."""
    deadline = time.monotonic() + WAIT_S
    while not (answer := found()):
        if time.monotonic() > deadline:
            raise SystemExit(otherwise)
        time.sleep(1.0)
    return answer


if __name__ == "__main__":
    main()
