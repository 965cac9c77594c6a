"""What a service holds: descriptors, threads and memory of its processes, slots and pages of its engine."""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from support.command_line import Service

GAUGES = ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "kv_evictable_tokens", "audit_backlog")
SETTLED_S = 20.0
SPARE_DESCRIPTORS = 4  # of connections between processes, which are made again after a recovery
POOL_THREADS = 6  # of pools, which start their threads as more work comes at once than ever before


@dataclass(frozen=True)
class Held:
    """Of one process. `rss`: bytes."""

    descriptors: int
    threads: int
    rss: int


def held_by(service: Service) -> dict[str, Held]:
    """By role; the HTTP server is `main`. A process that ends meanwhile is left out."""
    found: dict[str, Held] = {}
    for role, pid in {"main": service.process.pid, **service.actors()}.items():
        with suppress(OSError):
            found[role] = held(pid)
    return found


def held(pid: int) -> Held:
    """Of one process, as the kernel counts. Raises: OSError if it has ended, though its parent may not know yet."""
    of = Path(f"/proc/{pid}")
    found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", (of / "status").read_text(), re.M))
    if "VmRSS" not in found:
        raise ProcessLookupError(pid)
    rss, threads = int(found["VmRSS"]), int(found["Threads"])
    return Held(len(list((of / "fd").iterdir())), threads, rss << 10)


def drained(service: Service) -> str:
    """Empty the prefix cache once nothing runs. "" if every slot and page is back, else what is not."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        flushed = httpx.post(f"{service.url}/flush_cache?timeout={SETTLED_S:g}", timeout=2 * SETTLED_S)
        left = gauges_above_zero(httpx.get(f"{service.url}/metrics", timeout=SETTLED_S).text)
        if flushed.status_code == 200 and not left:
            return ""
        if time.monotonic() > deadline:
            return f"flush: {flushed.status_code} {flushed.text!r}; {left}"
        time.sleep(0.1)


def gauges_above_zero(metrics: str) -> dict[str, float]:
    """Of the gauges that are 0 in an engine that holds nothing."""
    found = {name: re.findall(rf"^overlap_spec:{name} (\S+)$", metrics, re.M) for name in GAUGES}
    return {name: float(values[0]) for name, values in found.items() if values and float(values[0])}


def as_before(service: Service, before: dict[str, Held], timeout_s: float = 10.0) -> str:
    """Wait until no process has more descriptors and threads than before, but few. "" then, else what is more."""
    deadline = time.monotonic() + timeout_s
    while True:
        more = [
            f"{role}: {now.descriptors} descriptors and {now.threads} threads, had {had.descriptors} and {had.threads}"
            for role, now in held_by(service).items()
            if now.descriptors > (had := before[role]).descriptors + SPARE_DESCRIPTORS
            or now.threads > had.threads + POOL_THREADS
        ]
        if not more or time.monotonic() > deadline:
            return "; ".join(more)
        time.sleep(0.1)
