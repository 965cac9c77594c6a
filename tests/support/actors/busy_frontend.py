"""The frontend, which works for some seconds on a text that asks for it, as `busy 12`, and does nothing else then."""

import time

from overlap_spec.client.link import Arrival
from overlap_spec.frontend import frontend_actor
from overlap_spec.frontend.service import FrontendService
from overlap_spec.messages import TextPrompt, Tokenize
from overlap_spec.runtime.actor import ActorContext

from_client = FrontendService._from_client


async def busy_or_not(service: FrontendService, client: int, message: Arrival) -> None:
    """Handle a client's message."""
    match message:
        case Tokenize(_, TextPrompt(text)) if text.startswith("busy "):
            end = time.monotonic() + float(text.removeprefix("busy "))
            while time.monotonic() < end:
                sum(range(1000))
    await from_client(service, client, message)


async def main(context: ActorContext) -> None:
    """Run the frontend."""
    FrontendService._from_client = busy_or_not
    await frontend_actor.main(context)
