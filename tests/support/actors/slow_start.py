"""A fake actor whose start never ends."""

import asyncio

from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Stay in one phase."""
    context.progress("compiling kernels", 0, 0)
    await asyncio.sleep(3600)
