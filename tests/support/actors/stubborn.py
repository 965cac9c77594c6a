"""A fake actor that is ready and then ignores every message."""

import asyncio

from overlap_spec.messages import FrontendFacts
from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Never leave."""
    context.ready(FrontendFacts(context.role, ""))
    await asyncio.sleep(3600)
