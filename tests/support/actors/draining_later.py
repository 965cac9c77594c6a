"""A frontend that is not drained before it has been told over a link that came after the first ones."""

import time

from overlap_spec.messages import Drained, FrontendFacts, LivenessProbe, Recover, Shutdown, ToFrontend
from overlap_spec.runtime.actor import ActorContext

START_S = 1.0  # longer than a closed link holds what was sent over it


async def main(context: ActorContext) -> None:
    """Be ready, follow every recovery, leave on Shutdown."""
    if context.generation:
        time.sleep(START_S)
    inbox = context.step_inbox(ToFrontend, spins=False)
    context.ready(FrontendFacts(context.role, ""))
    while True:
        match await inbox.recv():
            case Recover(generation):
                context.renew(generation)
                inbox = context.step_inbox(ToFrontend, spins=False)
            case LivenessProbe():
                context.report_alive()
            case Shutdown(drain=True) if max(context.generation, context.others):
                context.send_supervisor(Drained())
            case Shutdown(drain=False):
                return
