"""A fake actor that fails with a socket of its own still open."""

import zmq

from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Leave a socket to the context, and an error to the supervisor."""
    context.zmq.socket(zmq.DEALER).connect(f"ipc://{context.endpoints.run_dir}/unbound.sock")
    raise ZeroDivisionError("seven by nothing")
