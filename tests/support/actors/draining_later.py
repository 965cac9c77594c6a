"""A frontend that is not drained before it has been told over a link that came after the first ones."""

import time

from overlap_spec.runtime.actor import ActorContext
from support.actors.recovering import follow

START_S = 1.0  # longer than a closed link holds what was sent over it


async def main(context: ActorContext) -> None:
    """Be ready, follow every recovery, leave on Shutdown."""
    if context.generation:
        time.sleep(START_S)
    await follow(context, lambda: max(context.generation, context.others) > 0)
