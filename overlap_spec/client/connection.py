"""Whether a client is connected, as its socket's monitor tells.

ZeroMQ's own threads keep a connection at both ends, and answer heartbeats while an event loop is busy. So a connection
is lost only if the other process has ended, is stopped or cut off, or refuses this client; not because it is busy.
"""

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from overlap_spec.client.link import Duplex


class Connection:
    """One client's connection, which is not there at first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost_at = clock()
        self._is_there = False

    @property
    def lost_s(self) -> float:
        """For how many seconds there has been no connection; 0 while there is one."""
        return 0.0 if self._is_there else self._clock() - self._lost_at

    def changed(self, is_there: bool) -> None:
        """Note that it is made, or is lost."""
        if self._is_there and not is_there:
            self._lost_at = self._clock()
        self._is_there = is_there

    async def follow(self, monitor: Duplex) -> None:
        """Read what a socket's monitor tells, without end. Cancellation: safe."""
        while True:
            while (frames := monitor.read()) is not None:
                event = parse_monitor_message(frames)["event"]
                self.changed(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            await monitor.readable()
