"""A worker whose second rank finds its socket taken. Whichever rank would read weights says so."""

import socket

from overlap_spec.config.ranks import rank_of
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker import entry, worker_actor


def read(*_given: object, **_named: object) -> None:
    raise AssertionError("weights are read")


async def main(context: ActorContext) -> None:
    """Rank 0 finds its own socket free."""
    worker_actor.build = read
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        if rank_of(context.role):
            taken.bind(str(context.endpoints.steps(context.role)))
        await entry.main(context)
