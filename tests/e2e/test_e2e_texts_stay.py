"""What one client writes is in no log, no metric, no answer of another and no file that others read.

Refusals by the frontend, which the HTTP process does not know, and the ends of processes: killed, crashed, told to show
their stacks. `unit/entrypoints/test_server_texts_in_logs.py` has every field of the HTTP process.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.command_line import Service
from support.prying import KEYS, key_flags

from overlap_spec.runtime.processes import DUMP_SIGNAL

pytestmark = pytest.mark.slow

MARK = "Mrs Doe's illness"
TURNS = [{"role": "user", "content": MARK}]
CHAT, GENERATE, COMPLETE = "/v1/chat/completions", "/generate", "/v1/completions"
AGAIN = re.compile(r"recovered from|started again \d")  # how the log of a death ends
SCHEMA = {"type": "object", "properties": {MARK: {"$ref": f"#/{MARK}"}}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((GENERATE, {"text": MARK, "sampling_params": given}) for given in (
        {"stop_regex": f"({MARK}"}, {"regex": f"({MARK}"}, {"ebnf": f"root ::= {MARK}"}, {"ebnf": f'root ::= "{MARK}'},
        {"json_schema": json.dumps(SCHEMA)}, {"json_schema": MARK}, {"json_schema": json.dumps({"type": MARK})},
        {"structural_tag": json.dumps({"begin": MARK})}, {"stop": [MARK] * 1000}, {"bad_words": [MARK, ""]},
    )),
    *((CHAT, {"messages": given}) for given in (
        [{"role": MARK, "content": MARK}], [{"role": "user", "content": [{"type": MARK}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": MARK}}]}],
        [{"role": "tool", "tool_call_id": MARK, "content": MARK}], [{"role": "assistant", "tool_calls": [MARK]}],
    )),
    *((CHAT, {"messages": TURNS, **given}) for given in (
        {"chat_template_kwargs": {"add_generation_prompt": MARK}}, {"tool_choice": MARK}, {"model": MARK},
        {"chat_template": "{{ " + MARK}, {"chat_template": "{{ raise_exception('" + MARK.replace("'", "") + "') }}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": MARK, "schema": SCHEMA}}},
        {"response_format": {"type": MARK}}, {"tools": [{"type": "function", "function": {"name": MARK}}]},
    )),
    (COMPLETE, {"prompt": MARK * 9000}), (COMPLETE, {"prompt": [MARK, 5]}), (COMPLETE, {"prompt": MARK, "n": MARK}),
]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_flags: tuple[str, ...]) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("served")
    with Service(directory, *tiny_flags, *key_flags(directory), "--audit-rate", "1") as running:
        yield running


def send(service: Service, name: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.request("POST" if body else "GET", service.url + path, json=body, headers=headers, timeout=120)


def has_text(content: str | bytes) -> bool:
    """The whole or its most telling part; as it is, in JSON or quoted by Python."""
    return b"illness" in (content if isinstance(content, bytes) else content.encode())


def test_refusals_are_told_to_their_client_alone(service: Service) -> None:
    refused = [reply for path, body in REFUSED if (reply := send(service, "alice", path, body)).status_code == 400]
    assert len(refused) > len(REFUSED) // 2 and any(has_text(reply.text) for reply in refused)
    assert service.logs(f"id={refused[-1].headers['x-request-id']}")
    leaked = [line for line in service.log().splitlines() if has_text(line)]
    assert not leaked, leaked


def answered(service: Service, into: list[str]) -> threading.Thread:
    """A thread sends Alice's long request, and appends the answer to `into`."""
    body = {"prompt": MARK, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    thread = threading.Thread(target=lambda: into.append(send(service, "alice", COMPLETE, body).text))
    thread.start()
    return thread


def test_processes_that_end_leave_nothing_of_a_text(service: Service) -> None:
    """The worker and the frontend crash, the scheduler is killed, all show their stacks; bob asks all the time."""
    told: list[str] = []
    ends = ("worker", signal.SIGSEGV), ("scheduler", signal.SIGKILL), ("frontend", signal.SIGABRT)
    for role, number in ends:
        before = len(service.log())
        thread = answered(service, hers := [])
        time.sleep(0.2)
        for pid in service.actors().values():
            os.kill(pid, DUMP_SIGNAL)
        time.sleep(0.2)
        os.kill(service.actors()[role], number)
        while not AGAIN.search(service.log(), before):
            told += [send(service, "bob", path, None).text for path in ("/health", "/metrics", "/server_info")]
            time.sleep(0.1)
        told.append(send(service, "bob", COMPLETE, {"prompt": "Hi", "max_tokens": 3}).text)
        thread.join()
        assert '"finish_reason":"length"' in hers[0]
    assert "Segmentation fault" in service.log() and "Current thread" in service.log(), "stacks are there"
    assert not any(map(has_text, told)) and not has_text(service.log())
    assert not any(name in text for text in told for name in ("alice", "Alice")), "nor is there anything of her key"


def test_no_file_that_others_may_read_has_a_text(service: Service) -> None:
    """After all that, of what the processes have left in their temporary and cache directories."""
    files = [path for path in service.tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if path.name != "stderr.log" and has_text(path.read_bytes())]
    assert not [path for path in files if "fault" in path.name and path.stat().st_mode & 0o077]
