"""A Ray cluster of this machine with the application on it, and its processes."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints.ray import ReplicaFlags, build, build_app

APPLICATION, PORT = "overlap-spec", 30911
START_S, GONE_S = 180.0, 10.0


@dataclass(frozen=True)
class Replica:
    """A running replica of the engine; `actors`: process numbers of its engine's processes by role."""

    id: str
    pid: int
    actors: Mapping[str, int]


@dataclass
class Cluster:
    """The cluster. `seen`: every process of an engine that was ever there."""

    engine: Mapping[str, Any]
    url: str = f"http://127.0.0.1:{PORT}"
    seen: set[int] = field(default_factory=set)

    def deploy(self, flags: Mapping[str, Any] | None = None, **engine: Any) -> None:
        """Run the application with these flags; returns when it is ready."""
        config = EngineConfig(**{"recover": True, **self.engine, **engine})
        application = build_app(config, ReplicaFlags(num_gpus_per_replica=0, **(flags or {})))
        is_fixed = "max_replicas" not in (flags or {})
        serve.run(application, name=APPLICATION, route_prefix="/", external_scaler_enabled=is_fixed)
        self.replicas()

    def deploy_words(self, **words: str) -> None:
        """Run the application as `serve run overlap_spec.entrypoints.ray:build NAME=VALUE ..` does: values are text."""
        engine = {name: str(value) for name, value in self.engine.items()}
        serve.run(build({**engine, **words}), name=APPLICATION, route_prefix="/")
        self.replicas()

    def scale(self, num_replicas: int) -> None:
        """Change the number of replicas and nothing else, as `serve deploy` does; returns when it is so."""
        controller = _get_global_client()._controller
        ray.get(controller.update_deployment_replicas.remote(DeploymentID("Engine", APPLICATION), num_replicas))
        self.wait_for(lambda found: len(found) == num_replicas)

    def replicas(self) -> list[Replica]:
        """Those that run, by id."""
        details = _get_global_client().get_serve_details()["applications"][APPLICATION]["deployments"]["Engine"]
        running = [each for each in details["replicas"] if each["state"] == "RUNNING"]
        found = [Replica(each["replica_id"], each["pid"], actors_of(each["pid"])) for each in running]
        self.seen |= {pid for replica in found for pid in replica.actors.values()}
        return sorted(found, key=lambda replica: replica.id)

    def wait_for(self, is_so: Callable[[list[Replica]], bool], timeout_s: float = START_S) -> float:
        """Wait until the replicas are so; returns the seconds."""
        begun = time.monotonic()
        while not is_so(found := self.replicas()):
            assert time.monotonic() - begun < timeout_s, f"after {timeout_s} s the replicas are {found}"
            time.sleep(0.1)
        return time.monotonic() - begun


@contextmanager
def cluster(engine: Mapping[str, Any]) -> Iterator[Cluster]:
    """A cluster of this machine, without its dashboard."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        yield Cluster(engine)
    finally:
        serve.shutdown()
        ray.shutdown()


def kill(pid: int) -> None:
    """As the kernel does when memory is short."""
    os.kill(pid, signal.SIGKILL)


def pids_named(beginning: str) -> list[int]:
    """Processes whose command line begins so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone meanwhile
            found += [int(path.parent.name)] if path.read_bytes().startswith(beginning.encode()) else []
    return found


def actors_of(pid: int) -> dict[str, int]:
    """The processes of the engine in a replica's process, by role."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == pid and b"overlap_spec.runtime.actor" in words:
            found[words[words.index(b"overlap_spec.runtime.actor") + 1].decode()] = int(path.name)
    return found


def seconds_until_gone(pids: set[int]) -> float:
    """Wait until none of these processes runs any more; returns the seconds."""
    begun = time.monotonic()
    while left := {pid for pid in pids if runs(pid)}:
        assert time.monotonic() - begun < GONE_S, f"still there: {left}"
        time.sleep(0.02)
    return time.monotonic() - begun


def runs(pid: int) -> bool:
    """False of a process that is gone, or ended and not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
