"""What a server tells of a bench run, in `/metrics`, `/server_info` and its log, beside the client's own clock."""

import asyncio
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from support.command_line import Service

from overlap_spec.bench.runs import Endpoint, Json, answer_batch

RUN_S = 2.5  # expected: several reports, and one log line, which come every second and every five
POLL_S = 0.05
WITHIN = 0.03
TRIES = 6  # a client that waits for a busy core has another clock
BATCH, PROMPT, WARM_UP, MOST = 4, 64, 200, 3000  # tokens of a row
SPEED = re.compile(r"Decode batch, .*gen throughput \(token/s\): ([\d.]+)")
CHAIN = (
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)

Figures = dict[str, float]


@dataclass
class Run:
    """One batch. `reports`: figures after each report of the server, the first of them from before the run."""

    wall_s: float
    first_token_s: float
    answers: list[Json]
    reports: list[Figures]
    state: Json  # of `/server_info`
    speeds: list[float]  # of log lines

    @property
    def tokens(self) -> int:
        return sum(answer["completion_tokens"] for answer in self.answers)

    @property
    def verify_steps(self) -> list[int]:
        return [answer["spec_verify_ct"] or answer["completion_tokens"] - 1 for answer in self.answers]

    def counted(self, name: str) -> float:
        return self.reports[-1][f"{name}_total"] - self.reports[0][f"{name}_total"]


@pytest.fixture(scope="module", params=["plain", "chain"])
def server(
    request: pytest.FixtureRequest, tiny_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Of this file alone: all that it counts is of these runs."""
    is_plain = request.param == "plain"
    method = (*tiny_flags[:-4], "--speculative-algorithm", "NONE") if is_plain else (*tiny_flags, *CHAIN)
    with Service(tmp_path_factory.mktemp("figures"), *method, "--disable-radix-cache") as running:
        yield running


def figures_of(server: Service) -> Figures:
    """The series of `/metrics` that have no labels."""
    lines = server.get("/metrics").text.splitlines()
    found = [line.removeprefix("overlap_spec:").split() for line in lines if line.startswith("overlap_spec:")]
    return {name: float(value) for name, value in found if "{" not in name}


@contextmanager
def watched(server: Service) -> Iterator[list[Figures]]:
    """The figures now and after each report until the block ends."""
    reports, over = [figures_of(server)], threading.Event()

    def look() -> None:
        if (newest := figures_of(server))["steps_total"] != reports[-1]["steps_total"]:
            reports.append(newest)

    def watch() -> None:
        while not over.wait(POLL_S):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield reports
    finally:
        over.set()
        thread.join()
        look()


def run_of(server: Service) -> Run:
    """As the benchmark of throughput makes one, for about `RUN_S`."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    endpoint, draw = Endpoint(host, int(port)), random.Random(0)
    prompts = [[draw.randrange(50) for _ in range(PROMPT)] for _ in range(BATCH)]
    warm_up_s, _ = asyncio.run(answer_batch(endpoint, prompts, WARM_UP))
    first_token_s = min(asyncio.run(answer_batch(endpoint, prompts, 1))[0] for _ in range(3))
    time.sleep(1.1)  # or the run's end would be too near to the last log line for one of its own
    num_tokens = min(int(WARM_UP * RUN_S / warm_up_s), MOST)
    logged = len(SPEED.findall(server.log()))
    with watched(server) as reports:
        wall_s, answers = asyncio.run(answer_batch(endpoint, prompts, num_tokens))
        assert server.logs("Decode batch")
        time.sleep(4 * POLL_S)
    state = server.get("/server_info").json()["internal_states"][0]
    speeds = [float(speed) for speed in SPEED.findall(server.log())[logged:]]
    return Run(wall_s, first_token_s, answers, reports, state, speeds)


def ratios_of(run: Run) -> Figures:
    """Seconds and speeds that the server tells, over the client's."""
    steps = list(zip(run.reports, run.reports[1:], strict=False))
    taken = [(after["generation_tokens_total"] - before["generation_tokens_total"], after) for before, after in steps]
    devices = [(after["steps_total"] - before["steps_total"], after) for before, after in steps]
    decode_s, client_s = run.counted("decode_time_seconds"), run.wall_s - run.first_token_s
    (speed,) = run.speeds
    return {
        "gen_throughput": sum(tokens / after["gen_throughput"] for tokens, after in taken) / run.wall_s,
        "step_time": sum(n * (after["step_time_seconds"] + after["gpu_gap_seconds"]) for n, after in devices)
        / run.wall_s,
        "decode_time": decode_s / client_s,
        "a step": decode_s / run.counted("decode_steps") * max(run.verify_steps) / client_s,
        "log": speed * run.wall_s / run.tokens,
    }


@pytest.mark.full_but_every(2)
@pytest.mark.slow
def test_a_server_tells_what_a_client_measures(server: Service) -> None:
    """Counts exactly; tok/s and step times within 3%."""
    seen = []
    for _ in range(TRIES):
        run = run_of(server)
        assert run.counted("generation_tokens") == run.tokens
        assert run.counted("prompt_tokens") == BATCH * PROMPT and run.counted("num_requests") == BATCH
        assert run.counted("spec_verify_calls") == sum(run.verify_steps)
        assert run.state["last_gen_throughput"] == run.reports[-1]["gen_throughput"]
        assert run.state["step_time"] == run.reports[-1]["step_time_seconds"]
        committed = (run.tokens - BATCH) / sum(run.verify_steps)
        if "avg_spec_accept_length" in run.state:
            assert run.state["avg_spec_accept_length"] == pytest.approx(committed, rel=WITHIN)
        if len(run.speeds) == 1:  # else the run took longer than one line is for
            seen.append(ratios_of(run))
            if all(any(abs(each[name] - 1) < WITHIN for each in seen) for name in seen[0]):
                return  # a figure that is wrong is so in every run, and a core that is busy spoils another at each
    pytest.fail(f"over the client's: {seen}")
