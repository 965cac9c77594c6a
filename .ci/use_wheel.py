"""Use an installed wheel as README tells its readers: every command once, with the default model, in real processes.

    python -I use_wheel.py CHAT_COMMAND

The interpreter is that of an environment with the wheel and its declared dependencies alone; the standard library is
all that this script needs. The working directory holds nothing of the source. CHAT_COMMAND is README's.
"""

import contextlib
import http.client
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("overlap_spec", "overlap_spec_kernels")
EXTRAS = {"overlap_spec.entrypoints.otlp": "opentelemetry", "overlap_spec.entrypoints.ray": "ray"}  # that need one
TEST_GROUP = ("accelerate", "openai", "pytest", "transformers")  # they bring packages that are not declared
COMMAND = str(Path(sysconfig.get_path("scripts"), "overlap-spec"))
LIMIT_S = 180.0  # for each command; a slow machine that is also busy starts an engine in 40 s
END_S = 40.0  # open requests have 30 s
NUM_TOKENS = 16
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


class Failed(Exception):
    """What is wrong with the wheel, for whoever reads the log."""


def check(holds: object, what: str) -> None:
    """Raises: Failed with `what` if it does not hold."""
    if not holds:
        raise Failed(what)


def environment_is_clean() -> str:
    """The packages come from this environment, which holds no package of the test group."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        check(spec is not None and spec.origin, f"{name} is not installed")
        assert spec is not None and spec.origin is not None
        check(Path(spec.origin).is_relative_to(sys.prefix), f"{name} comes from {spec.origin}, not from {sys.prefix}")
    present = [name for name in TEST_GROUP if importlib.util.find_spec(name) is not None]
    check(not present, f"{', '.join(present)} installed: they would hide a dependency that is not declared")
    return sys.prefix


def every_module_imports() -> str:
    """None needs more than the declared dependencies to be imported, but for those that need an extra."""
    modules = [name for name in PACKAGES for name in (name, *_modules_of(name))]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            if not _needs_an_extra(name, error):
                raise Failed(f"import {name}: {error!r}") from error
    return f"{len(modules)} modules"


def _needs_an_extra(name: str, error: BaseException | None) -> bool:
    """Whether the module lacks what the extra of its package brings, and nothing else, or names the extra."""
    for package, brings in EXTRAS.items():
        if f"{name}.".startswith(f"{package}."):
            return f"'{brings}" in str(error) or f"[{brings}]" in str(error)
    return False


def _modules_of(package: str) -> Iterator[str]:
    """Names of all modules below a package but `__main__`, which runs when imported."""
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.", onerror=_raise)
    return (module.name for module in found if not module.name.endswith(".__main__"))


def _raise(name: str) -> None:
    if _needs_an_extra(name, sys.exc_info()[1]):
        return
    raise Failed(f"import {name}: {sys.exc_info()[1]!r}")


def chat_answers(command: list[str]) -> str:
    """README's question to the default model, and a short answer: words come."""
    answer = run(command).strip()
    check(len(answer.split()) >= 5, f"not an answer: {answer!r}")
    return f"{len(answer.split())} words: {answer[:60]!r} .."


def serve_streams() -> str:
    """README's `serve`, one streamed request, and an end by SIGTERM that leaves nothing of ours behind."""
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as (process, address):
        chunks = list(stream(address))
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
        check(len(text.split()) >= 5 and len(chunks) > 2, f"not a streamed answer: {chunks}")
        check(ends[-1] == "length" and not any(ends[:-1]), f"finish reasons of {NUM_TOKENS} tokens: {ends}")
        process.terminate()
        status = process.wait(END_S)
        check(status == 0, f"serve ended with {status} after SIGTERM")
        check(not _group_runs(process.pid), "serve ended after SIGTERM, and processes that it had started run on")
        left = [path.name for path in Path(scratch).glob("overlap-spec-*")]
        check(not left, f"serve left {left} in the directory for temporary files")
        return f"{len(chunks)} chunks: {text!r}"


@contextlib.contextmanager
def served(scratch: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`overlap-spec serve` that is ready: its process, a group of its own, and the address it printed."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [COMMAND, "serve", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,
        )
        watch = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        try:
            yield process, _address_of(process)
        except Exception as error:
            log.seek(0)
            raise Failed(f"{error}\n{log.read()}") from error
        finally:
            watch.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.strip() == "ready":
            found = re.search(r"http://(\S+)", "".join(lines))
            check(found, f"no address in {lines}")
            assert found is not None
            return found[1]
    raise Failed(f"serve was not ready within {LIMIT_S} s, or ended before: {''.join(lines)}")


def _group_runs(group: int) -> bool:
    """Whether a process of the group is left; its actors may take a moment to be gone."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def stream(address: str) -> Iterator[dict[str, Any]]:
    """The chunks of one streamed chat completion."""
    connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
    request = {"messages": QUESTION, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(request), {"Content-Type": "application/json"})
    response = connection.getresponse()
    check(
        response.status == 200, f"HTTP {response.status}: {response.read().decode() if response.status != 200 else ''}"
    )
    for line in response:
        kind, _, data = line.decode().strip().partition(": ")
        if data == "[DONE]":
            return connection.close()
        if kind == "data":
            yield json.loads(data)
    raise Failed("the stream ended without [DONE]")


def latency_is_measured() -> str:
    """`bench latency` on its default prompts, which are part of the package."""
    run([COMMAND, "bench", "latency", "--num-tokens", "4", "--output", "latency.json"])
    figures = json.loads(Path("latency.json").read_text())["engine"]
    check(figures["num_prompts"] == 20 and figures["num_tokens"] == 80, f"not 4 tokens for each of 20: {figures}")
    return f"{figures['tokens_per_second']} tok/s"


def methods_are_measured() -> str:
    """`bench methods` on the records and prompts that are part of the package: n-grams, the cheapest, beside plain."""
    words = ["--num-prompts", "1", "--num-tokens", "4", "--batch-sizes", "1", "--runs", "1", "--only", "NGRAM"]
    run([COMMAND, "bench", "methods", *words, "--output", "methods.json"])
    entries = json.loads(Path("methods.json").read_text())["methods"]
    outcomes = {entry["label"]: (entry["status"], entry.get("reason")) for entry in entries}
    check(len(entries) == 2 and all(entry["figures"] for entry in entries), f"not two methods with figures: {outcomes}")
    return ", ".join(outcomes)


def run(command: list[str]) -> str:
    """Run it to its end. Returns its stdout. Raises: Failed if its status is not 0."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{shlex.join(command)} ran longer than {LIMIT_S} s") from None
    said = f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    check(done.returncode == 0, said)
    return done.stdout


def main(chat_command: str) -> int:
    """Returns the exit status: 1 after the first check that fails."""
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        del os.environ[name]  # or the commands below could import something else
    checks: dict[str, Callable[[], str]] = {
        "environment": environment_is_clean,
        "imports": every_module_imports,
        "chat": lambda: chat_answers([*shlex.split(chat_command), "--max-tokens", str(NUM_TOKENS)]),
        "serve": serve_streams,
        "bench latency": latency_is_measured,
        "bench methods": methods_are_measured,
    }
    for name, checked in checks.items():
        begun = time.monotonic()
        try:
            print(f"{name}: {checked()} ({time.monotonic() - begun:.0f} s)", flush=True)
        except Failed as reason:
            print(f"the wheel fails at {name}: {reason}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
