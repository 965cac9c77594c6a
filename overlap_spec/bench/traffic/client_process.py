"""A process that plays a part of the traffic: `python -m overlap_spec.bench.traffic.client_process`.

Messages come on stdin and go to stdout (`messages.py`). It is a process of its own so that neither the server nor
another client takes its time, and so that its use of the processor can be told.
"""

import asyncio
import contextlib
import os
import sys
import time

import msgspec
import uvloop

from overlap_spec.bench.traffic.messages import Ended, FromClient, Go, Job, Ready, ToClient, frame, read_frame
from overlap_spec.bench.traffic.player import Player
from overlap_spec.bench.traffic.targets import sender_for
from overlap_spec.errors import OverlapSpecError

PROGRESS_S = 0.25
CANCEL_S = 5.0  # for requests to leave

_decoder = msgspec.msgpack.Decoder(ToClient)


async def main() -> None:
    """Take a job, play it, report."""
    stdin = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    job = _decoder.decode(await read_frame(stdin))
    assert isinstance(job, Job), job
    async with sender_for(job.target) as sender:
        work = [(arrival, sender.prepare(arrival, job.seed)) for arrival in job.arrivals]
        player = Player(work, job.max_concurrency, job.slow_s)
        _send(Ready())
        go = _decoder.decode(await read_frame(stdin))
        if not isinstance(go, Go):
            return
        _send(await play(player, go.start_at, stdin))


async def play(player: Player, start_at: float, stdin: asyncio.StreamReader) -> Ended:
    """Play until the end, a Stop, or the end of the run that has started this process."""
    began, cpu = time.monotonic(), time.process_time()
    playing = asyncio.create_task(player.play(start_at))
    stopped = asyncio.create_task(_end_of(stdin))
    telling = asyncio.create_task(_tell(player))
    await asyncio.wait((playing, stopped), return_when=asyncio.FIRST_COMPLETED)
    ended = time.monotonic()
    cpu = time.process_time() - cpu
    for task in (playing, stopped, telling):
        task.cancel()
    await asyncio.wait((playing, telling, stopped), timeout=CANCEL_S)
    if playing.done() and not playing.cancelled():
        playing.result()
    return Ended(player.outcomes(), cpu, ended - began)


async def _end_of(stdin: asyncio.StreamReader) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        await read_frame(stdin)


async def _tell(player: Player) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        _send(player.progress())


def _send(message: FromClient) -> None:
    """Write a message. The run reads all the time, so this hardly ever waits."""
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except (ValueError, OverlapSpecError) as error:  # of an arrival's body
        sys.exit(f"overlap-spec: {error}")
    except (asyncio.IncompleteReadError, BrokenPipeError):
        sys.exit(1)  # the run that has started this process is gone
