"""Work on a client's bytes in processes that are killed at their limits of time and memory.

    run(payload) --socket--> [template process] --fork--> [job] --answer--> run returns
                             loads the work once          nice, RLIMIT_AS, a timer of its CPU time

A job inherits what the template process has loaded, so it starts in about a millisecond, and whatever it takes is given
back when it ends. It reads its payload from a socket pair and writes its answer there. The template process holds that
socket as well, until the job has ended: it reports how a job ended that could not answer, and it kills one whose caller
has closed the other end.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from overlap_spec.config import isolated_environment
from overlap_spec.errors import OverlapSpecError
from overlap_spec.runtime.processes import import_path

NICE = 10  # jobs leave the cores to the processes that serve streams
WALL_TIMES = 4  # a job on busy cores may take so many times its limit of CPU time
START_S = 60.0  # until the template process has loaded the work
READ_BYTES = 256 << 10
HEAD = struct.Struct("=cQ")  # how a job ended, and how many bytes of an answer or a reason follow
LIMITS = struct.Struct("=dQ")  # the job's seconds of CPU time, and how many bytes of its payload follow
ANSWER, RAISED, NO_MEMORY, KILLED = b"A", b"R", b"M", b"K"
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies
OUT_OF_MEMORY = (signal.SIGABRT, signal.SIGKILL, signal.SIGBUS)  # a library's failed allocation, or the kernel's choice

Work = Callable[[bytes], bytes]


class TooLong(OverlapSpecError):
    """A job has used up its time."""


class TooLarge(OverlapSpecError):
    """A job wanted more memory than it may have."""


class WorkFailed(OverlapSpecError):
    """A job raised an error, which `str` tells, or ended in another way."""


class Isolated:
    """Runs one function on bytes, each time in a process of its own.

    `work`: "package.module:factory"; factory(argument) returns the function, once, in the template process.
    `most_bytes`: memory that a job may take beyond what that process has. Needs a running event loop for `run`.
    """

    def __init__(self, work: str, argument: str = "", *, most_bytes: int) -> None:
        self._command = (sys.executable, "-P", "-m", "overlap_spec.runtime.isolated", work, argument, str(most_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The template process, if it has been started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the template process now, so that the first job need not wait for it. A second call does nothing."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                env=isolated_environment() | {"PYTHONPATH": import_path()},
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=(theirs.fileno(),),
            )

    async def run(self, payload: bytes, timeout_s: float) -> bytes:
        """What the function returns. `timeout_s`: of CPU time; of waiting, WALL_TIMES as much, and the start.

        Raises: TooLong, TooLarge, WorkFailed. Cancellation: the job is killed.
        """
        head = LIMITS.pack(timeout_s, len(payload))
        try:
            async with asyncio.timeout(WALL_TIMES * timeout_s + START_S):
                answer = await self._ask(head, payload) or await self._ask(head, payload)
        except TimeoutError:
            raise TooLong(f"it took more than {WALL_TIMES * timeout_s:g} s on busy cores") from None
        return _read_answer(answer, timeout_s)

    def close(self) -> None:
        """End the template process, and with it all jobs. A second call does nothing."""
        self._end()

    async def _ask(self, head: bytes, payload: bytes) -> bytes:
        """What comes back; nothing if the template process has died."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self._hand_over(theirs)
            return await _exchange(ours, head, payload)

    def _hand_over(self, job: socket.socket) -> None:
        """Give the template process a job's socket; one that has died is started again."""
        self.start()
        assert self._control is not None
        try:
            socket.send_fds(self._control, [b"j"], [job.fileno()])
        except OSError:  # it has just died
            self._end()
            self.start()
            socket.send_fds(self._control, [b"j"], [job.fileno()])

    def _end(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


async def _exchange(job: socket.socket, head: bytes, payload: bytes) -> bytes:
    """Send a job its work and read to its end. A job that ends early has said why, or its template process has."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(job, head)
        await loop.sock_sendall(job, payload)
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await loop.sock_recv(job, READ_BYTES):
            parts.append(part)
    return b"".join(parts)


def _read_answer(answer: bytes, timeout_s: float) -> bytes:
    """Raises: TooLong, TooLarge, WorkFailed."""
    if len(answer) < HEAD.size:
        raise WorkFailed("its process ended without an answer")
    kind, size = HEAD.unpack_from(answer)
    body = answer[HEAD.size : HEAD.size + size]
    if kind == ANSWER and len(answer) == HEAD.size + size:
        return body
    if kind == NO_MEMORY:
        raise TooLarge("it wanted too much memory")
    if kind == RAISED:
        raise WorkFailed(body.decode(errors="replace"))
    # Of a job that was killed while it answered, what the template process reports follows the part.
    how = int.from_bytes(answer[-1:], "little")
    if how == signal.SIGPROF:
        raise TooLong(f"it took more than {timeout_s:g} s")
    if how in OUT_OF_MEMORY:
        raise TooLarge("it wanted too much memory")
    raise WorkFailed(f"its process was ended by signal {how}")


# --- the template process ---------------------------------------------------------------------------------


class _Template:
    """Forks a job for every socket that comes, and tells callers of jobs that were killed."""

    def __init__(self, control: socket.socket, work: Work, most_bytes: int) -> None:
        self._control = control
        self._work = work
        self._most_bytes = most_bytes
        self._jobs: dict[int, tuple[int, socket.socket]] = {}  # by the socket's descriptor: the process
        self._ended, wake = socket.socketpair()
        self._ended.setblocking(False)
        wake.setblocking(False)
        self._wake = wake  # kept open
        self._libc = ctypes.CDLL(None)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the caller's process has closed its end, or is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._control.fileno():
                    if (job := self._next_job()) is None:
                        return
                    if self._fork(job):
                        poll.register(job, 0)  # reports that the caller has closed its end
                elif descriptor == self._ended.fileno():
                    self._ended.recv(4096)
                elif descriptor in self._jobs:
                    os.kill(self._jobs[descriptor][0], signal.SIGKILL)
                    poll.unregister(descriptor)
            self._reap(poll)

    def _next_job(self) -> socket.socket | None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        return socket.socket(fileno=descriptors[0]) if data else None

    def _fork(self, job: socket.socket) -> bool:
        """Start a job. False: there are no more processes to be had."""
        try:
            pid = os.fork()
        except OSError as error:
            _say(job, RAISED, f"no process could be started: {error}".encode())
            job.close()
            return False
        if pid == 0:
            self._do(job)
        self._jobs[job.fileno()] = pid, job
        return True

    def _do(self, job: socket.socket) -> NoReturn:
        """What a job does, in its own process."""
        try:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a job does not outlive its template process
            signal.set_wakeup_fd(-1)
            self._control.close()
            for _, other in self._jobs.values():
                other.close()
            job.setblocking(True)
            timeout_s, size = LIMITS.unpack(_read(job, LIMITS.size))
            payload = _read(job, size)
            _limit(self._most_bytes, timeout_s)
            try:
                kind, body = ANSWER, self._work(payload)
            except MemoryError:
                kind, body = NO_MEMORY, b""
            except Exception as error:
                kind, body = RAISED, f"{type(error).__name__}: {error}".encode(errors="replace")
            signal.setitimer(signal.ITIMER_PROF, 0)  # an answer is whole
            _say(job, kind, body)
        finally:
            os._exit(0)

    def _reap(self, poll: select.poll) -> None:
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            descriptor = next(each for each, (job_pid, _) in self._jobs.items() if job_pid == pid)
            _, job = self._jobs.pop(descriptor)
            with contextlib.suppress(KeyError):
                poll.unregister(descriptor)
            if os.WIFSIGNALED(status):
                job.setblocking(False)
                _say(job, KILLED, bytes([os.WTERMSIG(status)]))
            job.close()


def _say(job: socket.socket, kind: bytes, body: bytes) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, or reads no more
        job.sendall(HEAD.pack(kind, len(body)))
        job.sendall(body)


def _read(job: socket.socket, size: int) -> bytes:
    """So many bytes. Raises: EOFError if the caller has gone."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = job.recv_into(view[filled:])
        if not count:
            raise EOFError
        filled += count
    view.release()
    return bytes(data)


def _limit(most_bytes: int, timeout_s: float) -> None:
    """Bound this process from here on."""
    os.nice(NICE)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever library it is in
    signal.setitimer(signal.ITIMER_PROF, timeout_s)


def _factory(name: str) -> Callable[[str], Work]:
    module, _, attribute = name.partition(":")
    found: Callable[[str], Work] = getattr(importlib.import_module(module), attribute)
    return found


def main() -> None:
    """The template process: MODULE:FACTORY ARGUMENT MOST_BYTES DESCRIPTOR."""
    name, argument, most_bytes, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the caller decides
    control = socket.socket(fileno=int(descriptor))
    try:
        work = _factory(name)(argument)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    gc.collect()
    gc.freeze()  # jobs share these objects' memory as long as nothing writes to it
    template = _Template(control, work, int(most_bytes))
    template.serve()


if __name__ == "__main__":
    main()
