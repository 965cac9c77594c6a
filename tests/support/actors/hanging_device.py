"""The worker, on a device that does not finish its fifth step."""

from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker import worker_actor
from overlap_spec.worker.step import StepHandle

ready = StepHandle.ready


def ready_or_never(handle: StepHandle) -> bool:
    """Whether a step is done."""
    return handle.plan.step_id < 5 and ready(handle)


async def main(context: ActorContext) -> None:
    """Run the worker."""
    StepHandle.ready = ready_or_never
    await worker_actor.main(context)
