"""The worker, which hangs in C code at its fifth step."""

import time
from typing import Any

from overlap_spec.messages import StepPlan
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker import worker_actor
from overlap_spec.worker.executor import Executor

start = Executor.start


def start_or_hang(executor: Executor, plan: StepPlan, *rest: Any) -> Any:
    """Start a step. One that warms up comes from no scheduler, and has no time of arrival."""
    if rest and plan.step_id > 4:
        time.sleep(3600)
    return start(executor, plan, *rest)


async def main(context: ActorContext) -> None:
    """Run the worker."""
    Executor.start = start_or_hang
    await worker_actor.main(context)
