"""A frontend for tests of recoveries: it renews its links when it is told, and is drained at once."""

from collections.abc import Callable

from overlap_spec.messages import Drained, FrontendFacts, LivenessProbe, Recover, Shutdown, ToFrontend
from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Be ready, follow every recovery, leave on Shutdown."""
    await follow(context, lambda: True)


async def follow(context: ActorContext, is_drained: Callable[[], bool]) -> None:
    """The same. `is_drained`: asked whenever the frontend is told to drain."""
    inbox = context.step_inbox(ToFrontend, spins=False)
    context.ready(FrontendFacts(context.role, ""))
    while True:
        match await inbox.recv():
            case Recover(generation):
                context.renew(generation)
                inbox = context.step_inbox(ToFrontend, spins=False)
            case LivenessProbe():
                context.report_alive()
            case Shutdown(drain=True):
                if is_drained():
                    context.send_supervisor(Drained())
            case _:
                return
