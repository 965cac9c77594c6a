"""A fake actor that is ready, answers one LivenessProbe, and then hangs in C code."""

import time

from overlap_spec.messages import FrontendFacts, LivenessProbe, ToScheduler
from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Hang after a first answer."""
    inbox = context.step_inbox(ToScheduler, spins=False)
    context.ready(FrontendFacts(context.role, ""))
    assert isinstance(await inbox.recv(), LivenessProbe)
    context.report_alive()
    hang_in_a_loop()


def hang_in_a_loop() -> None:
    """Never return, and never come back to Python."""
    time.sleep(3600)
