"""Measures what the host spends on a token, from a step's result to the socket, without a GPU or a model.

    python benchmarks/host_path.py --output benchmarks/results/host_path_HOST.json

Processes and links are real: HTTP server, frontend, scheduler, client processes. Only the worker's device is played:
a step takes a given time and commits 1 to 4 tokens of a text, 2.5 on average. Each kind of load is measured

    sse        as server-sent events on one connection for each request (`overlap-spec bench serve`)
    batched    as one `/generate` with all prompts, whose answer comes whole
    first      until the first token: turns of a conversation in token ids and in text, and one `/generate` with all
               prompts for one token each; with a step of no time it is the host's part

with processor time by process: per token, per event where there are events, and per request for `first`.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvloop
from tokenizers import Tokenizer

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.bench.traffic.arrivals import Arrival
from overlap_spec.bench.traffic.figures import Limits, figures_of
from overlap_spec.bench.traffic.processes import Load, Target, play_load
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.service import served
from overlap_spec.messages import CpuFacts, StepPlan, StepResult, ToWorker, WorkerFacts, WorkerReady
from overlap_spec.runtime.actor import ROLES, ActorContext
from overlap_spec.runtime.machine import inspect
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.worker.hooks import Hooks
from overlap_spec.worker.loop import Worker
from overlap_spec.worker.step import HostTimes

WIDTH, PAGE_SIZE, PROMPT_TOKENS = 4, 16, 128
TURN_TOKENS, NEW_TOKENS = 7000, 10  # of a conversation's first turn, and of each one after it
TURN_CHARS, NEW_CHARS = 24_000, 40
STEP_US = "OVERLAP_SPEC_HOST_PATH_STEP_US"
TEXT = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
TICKS = os.sysconf("SC_CLK_TCK")


class PlayedStep:
    """A step that is done at a given time."""

    def __init__(self, result: StepResult, host: HostTimes, done: float) -> None:
        self.host = host
        self._result = result
        self._done = done

    def ready(self) -> bool:
        return time.monotonic() >= self._done

    def wait(self) -> StepResult:
        return self._result


class PlayedLaunch:
    """Enqueued at once."""

    def __init__(self, handle: PlayedStep) -> None:
        self.handle = handle
        self.handles = (handle,)

    def advance(self) -> bool:
        return True


class PlayedExecutor:
    """A device that takes `step_s` per step, one after another, behind an executor's interface."""

    hooks = Hooks()

    def __init__(self, step_s: float, text: list[int]) -> None:
        self._step_s = step_s
        self._text = text
        self._at: dict[int, int] = {}  # by slot
        self._free = 0.0
        self._rng = random.Random(0)

    def start(self, plan: StepPlan, on_published: Callable[[Any], None], received: float) -> PlayedLaunch:
        now = time.monotonic()
        self._free = max(now, self._free) + self._step_s
        runs = [self._run(slot, self._rng.randint(1, WIDTH)) for slot in plan.slots]
        runs += [self._run(chunk.slot, int(chunk.next_token < 0)) for chunk in plan.chunks]
        result = StepResult(plan.step_id, runs, [WIDTH - 1] * len(runs), self._step_s)
        step = PlayedStep(result, HostTimes(received, now), self._free)
        on_published(step)
        return PlayedLaunch(step)

    def _run(self, slot: int, count: int) -> list[int]:
        at = self._at.get(slot, slot * 37 % len(self._text))
        self._at[slot] = (at + count) % (len(self._text) - WIDTH)
        return self._text[at : at + count]


async def main(context: ActorContext) -> None:
    """The worker process (`overlap_spec.runtime.actor` calls it)."""
    settings = context.settings
    inbox, scheduler = context.step_inbox(ToWorker), context.outlet("scheduler")
    slots, model = settings.scheduler.max_running_requests, settings.model
    pages = slots * (model.max_len // PAGE_SIZE + 2)
    scheduler.send(WorkerReady(slots, pages, PAGE_SIZE, model.max_len, WIDTH, 2, 1, model.files.vocab_size, 8192))
    context.ready(facts(slots, pages))
    tokenizer = Tokenizer.from_file(str(Path(model.files.tokenizer_dir or "") / "tokenizer.json"))
    text = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    executor: Any = PlayedExecutor(float(os.environ[STEP_US]) / 1e6, text)
    Worker(executor, inbox, context.step_outlet("scheduler"), SpinPolicy(settings.spin_s)).run()


def facts(slots: int, pages: int) -> WorkerFacts:
    """Of a device that is played."""
    platform = CpuFacts("none", 0, 0, "none", "none")
    return WorkerFacts(
        device="none", num_pages=pages - 1, page_size=PAGE_SIZE, num_slots=slots, chunk_tokens=8192, platform=platform,
        graph_batch_sizes=(), graph_counts={}, graph_s={}, step_widths=(WIDTH,), start_s={}, bytes_per_s=0.0,
        flop_per_s=0.0, verification="played", acceptance="played", weight_bytes=0, draft_weight_bytes=0,
        kv_bytes_per_token=0, draft_kv_bytes_per_token=0,
    )  # fmt: skip


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Meter:
    """Processor time of the engine's processes over a stretch of time."""

    def __init__(self, engine: Engine) -> None:
        self._pids = engine.pids | {"server": os.getpid()}
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        self._began = time.monotonic()

    def figures(self, num_tokens: int, num_events: int = 0) -> dict[str, Any]:
        """Microseconds of each process for a token, of the server for an event, and the shares of a core in use."""
        spent = {name: cpu_s(pid) - self._before[name] for name, pid in self._pids.items()}
        wall = time.monotonic() - self._began
        per_event = {"server_us_per_event": round(1e6 * spent["server"] / num_events, 1)} if num_events else {}
        return per_event | {
            "cpu_us_per_token": {name: round(1e6 * s / num_tokens, 2) for name, s in spent.items()},
            "cpu_share": {name: round(s / wall, 2) for name, s in spent.items()},
        }


async def sse(engine: Engine, batch: int, tokens: int, num_processes: int) -> dict[str, Any]:
    """One connection for each request."""
    arrivals = [Arrival(at=0.0, prompt_len=PROMPT_TOKENS, output_len=tokens) for _ in range(batch)]
    async with served(engine) as (host, port):
        target = Target(url=f"http://{host}:{port}", vocab_size=engine.settings.model.files.vocab_size)
        meter = Meter(engine)
        played = await play_load(Load(target, arrivals, num_processes), lambda running: "")
    found = figures_of(played, Limits())
    events = sum(len(each.arrival_times()) for each in played.outcomes)
    began = min(each.sent_at for each in played.outcomes)
    wall = max(each.arrival_times()[-1] for each in played.outcomes if each.times) - began
    return {
        "tokens_per_second": round(batch * tokens / wall),
        "tokens_per_event": round(batch * tokens / events, 2),
        "gap_ms": found["gap_ms"],
        "client_shares": [round(share, 2) for share in played.cpu_shares],
        **meter.figures(batch * tokens, events),
    }


async def batched(engine: Engine, batch: int, tokens: int) -> dict[str, Any]:
    """All prompts in one request, whose answer is not streamed."""
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}}
    async with served(engine) as (host, port), httpx.AsyncClient(timeout=300) as http:
        meter = Meter(engine)
        began = time.monotonic()
        answer = await http.post(f"http://{host}:{port}/generate", json=body)
        wall = time.monotonic() - began
        answer.raise_for_status()
        assert sum(each["meta_info"]["completion_tokens"] for each in answer.json()) == batch * tokens
    return {"tokens_per_second": round(batch * tokens / wall), **meter.figures(batch * tokens)}


class Timed:
    """The time to the first byte of answers, and the processor time that they take."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._times: list[float] = []

    async def ask(self, body: dict[str, Any]) -> None:
        """Send a request and read all of its answer."""
        began = time.monotonic()
        async with self._http.stream("POST", "/generate", json=body) as answer:
            answer.raise_for_status()
            arrived = [time.monotonic() async for _ in answer.aiter_raw()]
        self._times.append(arrived[0] - began)

    def figures(self, meter: Meter) -> dict[str, Any]:
        """Milliseconds, the processor's by process."""
        times = sorted(self._times[1:])  # the first one's prompt was new
        cpu = meter.figures(1000 * len(self._times))["cpu_us_per_token"]
        return {
            "median_ms": round(1e3 * statistics.median(times), 2),
            "best_ms": round(1e3 * times[0], 2),
            "cpu_ms": cpu,
        }


def turns(rng: random.Random) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Bodies of requests for one token, by number: each turn of a conversation is the one before and a little more."""
    ids = [rng.randrange(5, 40_000) for _ in range(TURN_TOKENS + 100 * NEW_TOKENS)]
    text = (TEXT.read_text() + TEXT.with_name("operating.md").read_text())[: TURN_CHARS + 100 * NEW_CHARS]
    sampling = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0}
    asked = {"sampling_params": sampling, "stream": True}
    return {
        "ids": lambda turn: {"input_ids": ids[: TURN_TOKENS + turn * NEW_TOKENS], **asked},
        "text": lambda turn: {"text": text[: TURN_CHARS + turn * NEW_CHARS], **asked},
    }


async def first(engine: Engine, batch: int, count: int) -> dict[str, Any]:
    """Up to the first token, `count` times each."""
    rng, found = random.Random(1), dict[str, Any]()
    bodies = turns(rng)
    bodies["prompts"] = lambda _: {
        "input_ids": [[rng.randrange(5, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)],
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0},
    }
    async with served(engine) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        for name, body in bodies.items():
            timed, meter = Timed(http), Meter(engine)
            for number in range(count):
                await timed.ask(body(number))
            found[name] = timed.figures(meter)
    return found


async def play(load: str, engine: Engine, batch: int, tokens: int, num_processes: int) -> dict[str, Any]:
    """One kind of load."""
    if load == "sse":
        return await sse(engine, batch, tokens, num_processes)
    return await (batched if load == "batched" else first)(engine, batch, tokens)


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case, each in an engine of its own."""
    rows = []
    for case in arguments.cases:
        batch, step_us, tokens = (int(word) for word in case.split(":"))
        os.environ[STEP_US] = str(step_us)
        config = EngineConfig(max_running_requests=batch, context_length=8192, log_level="warning")
        roles = ROLES | {"worker": Path(__file__).stem}
        async with Engine(config, roles=roles) as engine:
            for load in arguments.loads:
                work = play(load, engine, batch, tokens, arguments.client_processes)
                rows.append({"load": load, "batch": batch, "step_us": step_us, "tokens": tokens, **await work})
                print(rows[-1], flush=True)
    return rows


def run() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument(
        "--cases", nargs="+", default=["64:1100:512", "256:1900:512"], help="batch:step_us:tokens, of first: requests"
    )
    parser.add_argument("--loads", nargs="+", default=["sse", "batched"], choices=("sse", "batched", "first"))
    parser.add_argument("--client-processes", type=int, default=4)
    arguments = parser.parse_args()
    rows = uvloop.run(measure(arguments))
    if arguments.output:
        facts = describe_run("cpu", inspect().num_cores)
        write_report(arguments.output, {"benchmark": "host_path", "run": facts, "figures": rows})


if __name__ == "__main__":
    run()
