"""`overlap-spec chat` in real processes: one answer, lines from a pipe, a conversation in a terminal."""

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import COMMAND, COMMAND_S, environment, run_command

STARTING = ("loading weights", "warming up")  # what stderr says before anything else
SAMPLING = ("--max-tokens", "24", "--temperature", "1", "--seed", "5")
FIGURES = re.compile(r"^\d+ tokens, [\d.]+ tok/s, accept length \d\.\d\d, first token \d+\.\d\d s", re.MULTILINE)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_flags: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    """One answer, drafted for."""
    directory = tmp_path_factory.mktemp("chat")
    done = run_command(directory, "chat", "Hello", *tiny_flags, *SAMPLING)
    assert list(directory.glob("overlap-spec-*")) == []
    return done


@pytest.mark.slow
def test_one_answer_goes_to_stdout_and_its_figures_to_stderr(first: "subprocess.CompletedProcess[str]") -> None:
    assert first.returncode == 0, first.stderr
    *said, figures = first.stderr.splitlines()
    assert FIGURES.match(figures), first.stderr
    assert figures.startswith("24 tokens")
    assert said == [said[0], "loading weights", "warming up"] and said[0].startswith("starting ")
    assert first.stdout.strip()


@pytest.mark.full
def test_greedy_is_greedy_drafted_or_not(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    drafted = run_command(tmp_path, "chat", "Hello", *tiny_flags, "--max-tokens", "24")
    plain = run_command(tmp_path, "chat", "Hello", *tiny_flags[:-4], "--max-tokens", "24")
    assert drafted.stdout == plain.stdout and drafted.stdout.strip()


@pytest.mark.full
def test_a_seed_repeats_an_answer_with_and_without_a_draft(
    first: "subprocess.CompletedProcess[str]", tmp_path: Path, tiny_flags: tuple[str, ...]
) -> None:
    plain = run_command(tmp_path, "chat", "Hello", *tiny_flags[:-4], *SAMPLING)
    assert first.returncode == plain.returncode == 0
    assert first.stdout == plain.stdout


@pytest.mark.full
def test_lines_from_a_pipe_are_turns_of_one_conversation(
    first: "subprocess.CompletedProcess[str]", tmp_path: Path, tiny_flags: tuple[str, ...]
) -> None:
    done = run_command(tmp_path, "chat", *tiny_flags, *SAMPLING, stdin="Hello\n\nHello\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("first token") == 2
    assert done.stdout.startswith(first.stdout)
    assert done.stdout != first.stdout * 2, "the second answer stands further on, behind the first turn"


@pytest.mark.full
def test_a_pipe_may_start_over_and_leave(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    done = run_command(
        tmp_path, "chat", *tiny_flags, "--max-tokens", "12", stdin="Hello\n/reset\nHello\n/quit\nHello\n"
    )
    first, second = done.stdout.splitlines()
    assert (done.returncode, first) == (0, second), "nothing was left of the first turn"


@pytest.mark.full
def test_what_no_request_can_be_is_one_sentence(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    done = run_command(tmp_path, "chat", "Hello", *tiny_flags, "--max-tokens", "9000")
    assert (done.returncode, done.stdout) == (1, "")
    error = [line for line in done.stderr.splitlines() if line not in STARTING and not line.startswith("starting ")]
    assert len(error) == 1
    assert "maximum context length" in error[0]


@pytest.mark.full
def test_flags_without_effect_are_said(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    done = run_command(
        tmp_path, "chat", "Hi", *tiny_flags, "--max-tokens", "2", "--port", "1", SGLANG_ENABLE_SPEC_V2="1"
    )
    assert done.returncode == 0
    assert "--port has no effect in a chat" in done.stderr
    assert "overlap is always on" in done.stderr


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    command = [*COMMAND, "chat", "Hello", *tiny_flags, "--max-tokens", "3000", "--temperature", "1", "--seed", "1"]
    piped = f"{' '.join(map(shlex.quote, command))} | true"
    done = subprocess.run(
        ["bash", "-c", piped], capture_output=True, text=True, env=environment(tmp_path), timeout=COMMAND_S
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert list(tmp_path.glob("overlap-spec-*")) == []


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        self._master, slave = os.openpty()
        env = environment(tmp_path, TERM="dumb")
        self.process = subprocess.Popen([*COMMAND, "chat", *flags], stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = COMMAND_S) -> str:
        """Read until `pattern` matches what has come since the last call."""
        deadline, seen = time.monotonic() + timeout_s, ""
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {seen!r} after {self.screen!r}"
            ready, _, _ = select.select([self._master], [], [], 0.1)
            if ready:
                with contextlib.suppress(OSError):  # the other end is closed
                    seen += os.read(self._master, 65536).decode(errors="replace")
        self.screen += seen
        return seen

    def interrupt_prompt(self) -> None:
        """Ctrl-C at the prompt, again if it got lost.

        CPython's `input` holds a signal back until the next key if it comes after the prompt is shown and before
        readline waits: one in 200, where both ends share a core.
        """
        for _ in range(4):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.wait_for(r"> $", 10)
                return
        raise AssertionError(f"no new prompt after {self.screen!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path: Path, tiny_flags: tuple[str, ...]) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, *tiny_flags, "--max-tokens", "8000", "--temperature", "1", "--seed", "1")
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_conversation_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and not the chat."""
    terminal.wait_for(r"Ctrl-D leaves[\s\S]*> $")
    began = 0
    while not began:  # a sampled answer may end at once; ask until one is long enough to be interrupted
        terminal.type("Hello\n")
        terminal.wait_for(r"Hello\r\n[^\r]{20}")
        terminal.process.send_signal(signal.SIGINT)
        began = "tokens," not in terminal.wait_for(r"> $")
    terminal.type("/reset\n")
    terminal.wait_for(r"> $")
    terminal.interrupt_prompt()  # a new line, nothing else
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    *hellos, reset = (tmp_path / "cache" / "chat_history").read_text().splitlines()
    assert {*hellos} == {"Hello"} and reset == "/reset"
    assert list(tmp_path.glob("overlap-spec-*")) == []
