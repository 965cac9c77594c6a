"""The cases of `run.py`, on one Ray cluster, in this order; each returns figures, and fails by an assertion."""

import argparse
import asyncio
import functools
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cluster import PORT, START_S, Cluster, actors_of, cluster, kill, pids_named, seconds_until_gone
from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer
from traffic import MODEL, Chat, Outcome, alone, chats, converse, stream_all

from overlap_spec.bench.report import describe_run

NUM_CHATS, DIFFERENT, TOKENS, AT_ONCE, KILLED_AFTER = 200, 40, 64, 16, 75
ON_THE_WAY_S = 1.0
LONG = 800  # tokens of a stream that outlives what is done to its replica
Figures = dict[str, Any]


def replica_killed(ray: Cluster) -> Figures:
    """Of 200 streams, those fail that were open on the replica that was killed, and no other."""
    ray.deploy({"num_replicas": 2})
    sent = chats(DIFFERENT, TOKENS) * (NUM_CHATS // DIFFERENT)
    expected = asyncio.run(alone(ray.engine, sent[:DIFFERENT])) * (NUM_CHATS // DIFFERENT)
    victim, times = ray.replicas()[0], {}

    def killing() -> None:
        kill(victim.pid)
        times["killed_at"] = time.monotonic()

    outcomes = asyncio.run(stream_all(ray.url, sent, AT_ONCE, at(KILLED_AFTER, killing)))
    orphans_s = seconds_until_gone(set(victim.actors.values()))
    failed = [outcome for outcome in outcomes if outcome.error]
    open_there = [outcome for outcome in outcomes if was_open(outcome, victim.id, times["killed_at"])]
    assert failed and {outcome.replica for outcome in failed} == {victim.id}, Counter(each.error for each in failed)
    assert all(outcome in open_there for outcome in failed)
    assert all("has died" in outcome.error for outcome in failed), failed
    pairs = list(zip(outcomes, expected, strict=True))
    assert all(outcome.text == text for outcome, text in pairs if not outcome.error)
    assert all(text.startswith(outcome.text) for outcome, text in pairs if outcome.error)
    ray.wait_for(lambda found: len(found) == 2 and victim.id not in {each.id for each in found})
    back_s = time.monotonic() - times["killed_at"]
    (again,) = asyncio.run(stream_all(ray.url, sent[:1], 1))
    assert again.text == expected[0]
    return {
        "chats": len(outcomes),
        "different_chats": DIFFERENT,
        "open_on_the_killed_replica": len(open_there),
        "failed": len(failed),
        "equal_to_a_solo_run": sum(outcome.text == text for outcome, text in pairs),
        "chats_by_replica": sorted(Counter(outcome.replica for outcome in outcomes).values()),
        "children_gone_after_s": round(orphans_s, 2),
        "replaced_after_s": round(back_s, 1),
    }


def at(number: int, what: Callable[[], None]) -> Callable[[int], None]:
    """Do something when so many answers have begun."""
    return lambda begun: what() if begun == number else None


def was_open(outcome: Outcome, replica: str, when: float) -> bool:
    """Whether that replica was streaming it then; its first bytes may still have been on their way to the client."""
    return outcome.replica == replica and outcome.begun_at <= when + ON_THE_WAY_S and when <= outcome.ended_at


def worker_killed(ray: Cluster) -> Figures:
    """A worker that dies is recovered from inside its replica: streams pause and lose nothing."""
    ray.deploy({"num_replicas": 2})
    sent = chats(8, LONG // 2, seed=1)
    expected = asyncio.run(alone(ray.engine, sent))
    before = ray.replicas()
    killing = functools.partial(kill, before[0].actors["worker"])
    outcomes = asyncio.run(stream_all(ray.url, sent, len(sent), at(len(sent), killing)))
    assert [outcome.text for outcome in outcomes] == expected, [outcome.error for outcome in outcomes]
    assert [replica.pid for replica in ray.replicas()] == [replica.pid for replica in before]
    there = sum(outcome.replica == before[0].id for outcome in outcomes)
    assert there, "no stream was on that replica"
    return {"streams": len(sent), "on_that_replica": there, "failed": 0, "replicas_replaced": 0}


def engine_failed(ray: Cluster) -> Figures:
    """Without recovery the replica of an engine that has failed is replaced, and the other goes on."""
    ray.deploy({"num_replicas": 2}, recover=False)
    before = ray.replicas()
    kill(before[0].actors["frontend"])
    begun = time.monotonic()
    ray.wait_for(lambda found: len(found) == 2 and before[0].id not in {replica.id for replica in found})
    seconds = time.monotonic() - begun
    assert before[1].id in {replica.id for replica in ray.replicas()}
    seconds_until_gone(set(before[0].actors.values()))
    return {"replaced_after_s": round(seconds, 1)}


def prefix_routing(ray: Cluster) -> Figures:
    """Conversations find more of their prompts cached if each stays with the replica that knows it."""
    rates = {}
    for name, on in (("by_prefix", True), ("by_queue", False)):
        ray.deploy({"num_replicas": 2, "prefix_routing": on})
        rates[name] = asyncio.run(converse(ray.url, conversations=16, turns=4, seed=5))
    assert rates["by_prefix"]["hit_rate"] > rates["by_queue"]["hit_rate"] + 0.05, rates
    return rates


def autoscaling(ray: Cluster) -> Figures:
    """Requests that wait in the engine bring a second replica, quiet takes it away; no stream is lost."""
    flags = {"max_replicas": 2, "target_ongoing_requests": 64.0, "upscale_delay_s": 1.0, "downscale_delay_s": 2.0}
    ray.deploy(flags, max_running_requests=2)
    assert len(ray.replicas()) == 1
    begun, times = time.monotonic(), {}

    def watch() -> None:
        ray.wait_for(lambda found: len(found) == 2)
        times["up"] = time.monotonic()

    watching = threading.Thread(target=watch)
    watching.start()
    sent = chats(24, LONG // 2, seed=2)
    outcomes = asyncio.run(stream_all(ray.url, sent, len(sent)))
    quiet_at = time.monotonic()
    watching.join()
    down_s = ray.wait_for(lambda found: len(found) == 1)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    used = Counter(outcome.replica for outcome in outcomes)
    return {
        "streams": len(sent),
        "failed": 0,
        "two_replicas_after_s": round(times["up"] - begun, 1),
        "streams_by_replica": sorted(used.values()),
        "quiet_after_s": round(quiet_at - begun, 1),
        "one_replica_after_quiet_s": round(down_s, 1),
    }


def drained(ray: Cluster) -> Figures:
    """One replica less, and then other flags, in the midst of streams: none is lost."""
    ray.deploy({"num_replicas": 2})
    return {
        "scaled_down": while_streaming(ray, lambda: ray.scale(1), num_leaving=1),
        "redeployed": while_streaming(ray, lambda: ray.deploy({}, max_queued_requests=100), num_leaving=1),
    }


def while_streaming(ray: Cluster, change: Callable[[], object], num_leaving: int) -> Figures:
    """Start a change when all streams have begun; so many replicas are to leave."""
    before = {replica.id for replica in ray.replicas()}
    changing = threading.Thread(target=change)
    sent = chats(12, LONG, seed=3)
    outcomes = asyncio.run(stream_all(ray.url, sent, len(sent), at(len(sent), changing.start)))
    changing.join()
    errors = [outcome.error for outcome in outcomes if outcome.error]
    gone = before - {replica.id for replica in ray.replicas()}
    there = sum(outcome.replica in gone for outcome in outcomes)
    assert not errors and len(gone) == num_leaving and there, (errors, gone, there)
    return {"streams": len(sent), "on_the_replica_that_left": there, "failed": 0}


def client_leaves(ray: Cluster) -> Figures:
    """A client that closes its connection has its request aborted."""
    ray.deploy_words(num_replicas="1", num_gpus_per_replica="0", prefix_routing="false")
    body = {"model": MODEL, "stream": True, **Chat([{"role": "user", "content": "a"}], 8000).body()}
    body |= body.pop("extra_body")
    request = urllib.request.Request(f"{ray.url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        response.readline()
        left_at = time.monotonic()
    while aborted(ray) < 1:
        assert time.monotonic() - left_at < 10, "the request goes on"
        time.sleep(0.05)
    return {"aborted_after_s": round(time.monotonic() - left_at, 2)}


def aborted(ray: Cluster) -> float:
    """The counter of the one replica."""
    with urllib.request.urlopen(f"{ray.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("overlap_spec:num_aborted_requests"))


def command_line(engine: Mapping[str, Any]) -> Figures:
    """`overlap-spec serve-ray` starts a cluster, answers, and ends with it and all processes at a SIGTERM."""
    flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    own = ["--port", str(PORT), "--num-replicas", "1", "--num-gpus-per-replica", "0"]
    begun = time.monotonic()
    server = subprocess.Popen([sys.executable, "-m", "overlap_spec", "serve-ray", *flags, *own])
    try:
        wait_for_health(server)
        ready_s = time.monotonic() - begun
        (outcome,) = asyncio.run(stream_all(f"http://127.0.0.1:{PORT}", chats(1, 8), 1))
        assert outcome.text and not outcome.error, outcome
        children = {pid for replica in pids_named("ray::ServeReplica") for pid in actors_of(replica).values()}
        assert len(children) == 3, children
        server.terminate()
        status = server.wait(60)
    finally:
        server.kill()
    assert status == 0, status
    seconds_until_gone(children)
    return {"ready_after_s": round(ready_s, 1), "status": status, "processes_left": 0}


def wait_for_health(server: subprocess.Popen[bytes]) -> None:
    """Until the address answers that the engine is ready."""
    for _ in range(int(START_S)):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as response:
                assert json.load(response)["state"] == "ready"
                return
        except OSError:
            time.sleep(1)
    raise AssertionError("the server has not become ready")


CASES: tuple[Callable[[Cluster], Figures], ...] = (
    replica_killed,
    worker_killed,
    engine_failed,
    prefix_routing,
    autoscaling,
    drained,
    client_leaves,
)


def main() -> None:
    """Run the cases, write what they have found, and look for processes that were left behind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="*")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("ray", "openai")}
    report = describe_run("cpu", 1, ["tests/ray_serve"]) | {"command": "python tests/ray_serve/run.py"}
    report["versions"] |= versions
    chosen = [case for case in CASES if not given.only or case.__name__ in given.only]
    with tempfile.TemporaryDirectory() as folder:
        engine = model(Path(folder))
        with cluster(engine) if chosen else nullcontext() as ray:
            for case in chosen:
                write(given.output, report, case, ray)
        if ray is not None:
            seconds_until_gone(ray.seen)
            report["processes"] = {"of_engines_started": len(ray.seen), "left_at_the_end": 0}
        if not given.only or command_line.__name__ in given.only:
            write(given.output, report, command_line, engine)
    print(f"{sum(case.__name__ in report for case in (*CASES, command_line))} passed, 0 failed")


def write(output: Path | None, report: Figures, case: Callable[[Any], Figures], with_what: object) -> None:
    """Run a case, and add its figures to the report and its file."""
    report[case.__name__] = timed(case, with_what)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


def timed(case: Callable[[Any], Figures], with_what: object) -> Figures:
    """Run a case; its figures, and how long it took."""
    print(f"{case.__name__} ..", flush=True)
    begun = time.monotonic()
    figures = {**case(with_what), "case_s": round(time.monotonic() - begun, 1)}
    print(case.__name__, figures, flush=True)
    return figures


def model(folder: Path) -> dict[str, Any]:
    """A tiny random model with a head, exact: any two ways to compute its tokens agree."""
    target = tiny_target(seed=1, max_position_embeddings=8192)
    write_checkpoint(folder, target)
    write_tokenizer(folder)
    write_checkpoint(folder / "head", tiny_eagle3(seed=2, target=target))
    return {
        "model_path": str(folder),
        "served_model_name": MODEL,
        "dtype": "float64",
        "device": "cpu",
        "max_total_tokens": 60_000,
        "max_running_requests": 16,
        "log_level": "warning",
        "audit_rate": 0.0,
        "drain_timeout": 120.0,  # what a loaded machine needs
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(folder / "head"),
    }


if __name__ == "__main__":
    main()
