"""An actor for tests of the process topology: ready at once, alive, drained at once, gone on Shutdown."""

from overlap_spec.messages import Drained, FrontendFacts, LivenessProbe, Shutdown, ToScheduler
from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Be ready, drain at once, leave on Shutdown."""
    inbox = context.step_inbox(ToScheduler, spins=False)
    context.progress("loading", 1, 2)
    context.ready(FrontendFacts(context.role, ""))
    while True:
        message = await inbox.recv()
        if isinstance(message, LivenessProbe):
            context.report_alive()
            continue
        assert isinstance(message, Shutdown)
        if not message.drain:
            return
        context.send_supervisor(Drained())
