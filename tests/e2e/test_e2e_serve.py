"""`overlap-spec serve` as a person and a client see it: table, curl line, real OpenAI client, disconnects."""

import asyncio
import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from support.command_line import Service, cpu_ticks, run_command
from support.promql import alert_queries, dashboard_queries, mistakes, names_in

from overlap_spec import Client, SamplingParams
from overlap_spec.messages import Stats

ABORT_S = 1.0  # the requests would go on for many seconds
ROLES = {"frontend", "scheduler", "worker"}
ONLY_WHERE_KNOWN = {  # figures of a device whose ceilings are known, and of a draft that has been judged
    "overlap_spec:step_efficiency",
    *("overlap_spec:spec_class_accept_length", "overlap_spec:spec_class_usual_accept_length"),
    "overlap_spec:spec_draft_collapsed",
}
LONG = {"ignore_eos": True, "max_tokens": 8000}
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def test_the_table_says_what_runs_and_ready_comes_last(service: Service) -> None:
    table = "\n".join(service.lines)
    for words in (
        "tiny",
        "EAGLE3 (5, 4, 8)",
        "float64, cpu",
        "2 (overlapped)",
        "8192 tokens",
        "bigram",
        "http://",
        "ipc://",
    ):
        assert words in table
    assert service.lines[-1] == "ready"


def test_what_was_adjusted_is_logged(service: Service) -> None:
    assert service.logs("draft tokens set to (5, 4, 8): the default for Llama")
    assert service.logs("SGLANG_ENABLE_SPEC_V2 is set: overlap is always on")
    assert "Traceback" not in service.log()


def test_top_finds_the_server_and_shows_what_it_has_done(service: Service) -> None:
    httpx.post(f"{service.url}/v1/completions", json={"model": "tiny", "prompt": "a b", "max_tokens": 4}, timeout=60)
    done = run_command(service.tmp_path, "top", "--once", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["url"], found["state"], found["method"], found["model"]) == (service.url, "ready", "EAGLE3", "tiny")
    assert found["num_requests"] >= 1 and found["first_token_s"]["p50"] > 0 and set(found["last_sign_s"]) == ROLES


def test_the_dashboard_asks_for_what_a_server_has(service: Service) -> None:
    names = names_in(service.get("/metrics").text)
    lacking = {line.rpartition(" ")[2] for line in mistakes([*dashboard_queries(), *alert_queries()], names)}
    assert lacking <= ONLY_WHERE_KNOWN, "all others are there from the first scrape on"


def test_the_curl_line_works_as_printed(service: Service) -> None:
    words = shlex.split(service.lines[-2])
    assert words[0] == "curl"
    header, body = words[words.index("-H") + 1], words[words.index("-d") + 1]
    reply = httpx.post(words[1], content=body, headers=dict([header.split(": ")]), timeout=30)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] <= 64
    assert reply.json()["choices"][0]["message"]["content"]


def test_the_openai_client_streams_what_it_gets_in_one_piece(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        options = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "temperature": 0}
        whole = client.chat.completions.create(**options)
        pieces, usage = [], None
        for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
    assert len(pieces) > 5
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 60


def test_a_busy_port_is_one_sentence_before_anything_is_loaded(service: Service) -> None:
    port = service.url.rpartition(":")[2]
    done = run_command(service.tmp_path, "serve", "--port", port, "--model", "/nowhere/at/all")
    assert done.returncode == 1
    _, sentence = done.stderr.splitlines()  # the first one names the model
    assert f"port {port}" in sentence, "the model that is nowhere was not looked for"
    assert service.get("/health").status_code == 200


@pytest.mark.slow
def test_a_public_host_without_a_key_is_warned_of_once_it_listens(tmp_path: Path) -> None:
    warning = "is reachable from other machines, and there is no --api-key"
    nowhere = ("--port", "0", "--model", "/nowhere/at/all")
    assert f"--host 0.0.0.0 {warning}" in run_command(tmp_path, "serve", "--host", "0.0.0.0", *nowhere).stderr
    failed = run_command(tmp_path, "serve", "--host", "300.1.1.1", *nowhere)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 2
    assert "cannot listen on 300.1.1.1" in failed.stderr


async def abort_time(service: Service, client: Client, leave: Callable[[], object]) -> float:
    """Seconds from `leave` until the engine reports one more abort and nothing running."""
    before = (await client.stats()).aborted_total
    began = time.monotonic()
    leave()
    while not is_over(await client.stats(), before):
        assert time.monotonic() - began < 5
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def is_over(stats: Stats, aborted_before: int) -> bool:
    return stats.aborted_total > aborted_before and stats.num_running + stats.num_queued == 0


def test_a_http_client_that_leaves_aborts_its_request(service: Service) -> None:
    async def leave_in_the_middle() -> float:
        body = {"messages": QUESTION, "stream": True, **LONG}
        async with Client(service.endpoint) as client, httpx.AsyncClient(timeout=30) as http:
            request = http.build_request("POST", f"{service.url}/v1/chat/completions", json=body)
            reply = await http.send(request, stream=True)
            lines = reply.aiter_lines()
            while "content" not in await anext(lines):
                pass
            closing: list[asyncio.Task[None]] = []
            seconds = await abort_time(service, client, lambda: closing.append(asyncio.create_task(reply.aclose())))
            await closing[0]
            return seconds

    assert min(asyncio.run(leave_in_the_middle()) for _ in range(2)) < ABORT_S
    assert service.get("/health").status_code == 200


def test_a_zmq_client_that_leaves_aborts_its_request(service: Service) -> None:
    async def leave_in_the_middle() -> float:
        async with Client(service.endpoint) as watching, Client(service.endpoint) as leaving:
            sampling = SamplingParams(max_new_tokens=8000, ignore_eos=True)
            deltas = leaving.generate("The sky is", sampling)
            await anext(deltas)
            closing: list[asyncio.Task[None]] = []
            seconds = await abort_time(service, watching, lambda: closing.append(asyncio.create_task(leaving.close())))
            await closing[0]
            await deltas.aclose()
            return seconds

    assert min(asyncio.run(leave_in_the_middle()) for _ in range(2)) < ABORT_S


def test_who_asks_sees_the_last_steps_of_every_process(service: Service) -> None:
    """The first question starts the records; the answer to a later one has steps planned while others ran."""
    assert service.get("/ui/timeline").json()["records"] == []
    body = {"messages": QUESTION, "temperature": 0, **LONG, "max_tokens": 200}
    tracks = {"client", "frontend", "scheduler", "worker host"}
    deadline, records = time.monotonic() + 60, []
    while {record[0] for record in records} < tracks and time.monotonic() < deadline:  # they record for a few seconds
        assert httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        records = service.get("/ui/timeline?steps=40").json()["records"]
    assert {record[0] for record in records} == tracks
    ends = {step: end for _, _, _, end, step, more in records if "phase" in more}  # the last of its parts
    plans = {step: end for _, name, _, end, step, _ in records if name == "plan"}
    queued = [plans[step + 1] < ends[step] for step in ends if step + 1 in plans]
    assert len(queued) > 10 and sum(queued) > len(queued) / 2  # all, where a core is free for each process


def test_server_info_shows_flags_and_facts_without_secrets(service: Service) -> None:
    info = service.get("/server_info").json()
    assert info["page_size"] == 16
    assert info["speculative_algorithm"] == "EAGLE3"
    assert "api_key" not in json.dumps(info)


@pytest.mark.slow
def test_an_unknown_draft_is_refused_before_the_server_is_ready(service: Service, tiny_flags: tuple[str, ...]) -> None:
    flags = [*tiny_flags[:-1], tiny_flags[1]]  # the target as its own EAGLE-3 head
    done = run_command(service.tmp_path, "serve", "--port", "0", *flags, "--log-level", "error")
    assert done.returncode == 2
    assert "but EAGLE3 drafts with an EAGLE-3 head; use --speculative-algorithm STANDALONE" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.full
def test_an_idle_service_sleeps(service: Service) -> None:
    """Over 10 s: each actor at most one clock tick, the HTTP process at most 0.5%."""
    time.sleep(1)
    before = {pid: cpu_ticks(pid) for pid in (*service.children.values(), service.process.pid)}
    time.sleep(10)
    spent = {pid: cpu_ticks(pid) - ticks for pid, ticks in before.items()}
    assert spent.pop(service.process.pid) <= 0.005 * 10 * os.sysconf("SC_CLK_TCK")
    assert max(spent.values()) <= 1, spent
