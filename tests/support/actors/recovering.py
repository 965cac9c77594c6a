"""A tokenizer for tests of recoveries: it renews its links when it is told, and is drained at once."""

from overlap_spec.messages import Drained, LivenessProbe, Recover, Shutdown, TokenizerFacts, ToTokenizer
from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Be ready, follow every recovery, leave on Shutdown."""
    inbox = context.step_inbox(ToTokenizer, spins=False)
    context.ready(TokenizerFacts(context.role, ""))
    while True:
        match await inbox.recv():
            case Recover(generation):
                context.renew(generation)
                inbox = context.step_inbox(ToTokenizer, spins=False)
            case LivenessProbe():
                context.report_alive()
            case Shutdown(drain=True):
                context.send_supervisor(Drained())
            case _:
                return
