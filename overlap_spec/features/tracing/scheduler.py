"""The scheduler's loop with a record of each step's host work, for `bench step` and for the page at `/ui`."""

from overlap_spec.messages import StepResult
from overlap_spec.runtime.tracing import NO_TRACE
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.loop import Links, Scheduler
from overlap_spec.scheduler.requests import Step


def attach(parts: Parts) -> None:
    """There is nothing to do at a hook's points: the loop is another one."""


def loop(links: Links) -> type[Scheduler] | None:
    """The loop that runs, where the process takes records."""
    return None if links.trace is NO_TRACE else TracedScheduler


class TracedScheduler(Scheduler):
    """Records how long it takes to plan a step, to settle one and to send replies."""

    def plan_step(self) -> Step | None:
        if not self.links.trace.is_on:
            return super().plan_step()
        begun = self.links.trace.now()
        step = super().plan_step()
        if step is not None:
            sizes = {"batch": len(step.windows) + len(step.chunks), "in_flight": len(self.inflight)}
            self.links.trace.span("plan", begun, step.plan.step_id, **sizes)
        return step

    def settle(self, result: StepResult) -> None:
        if not self.links.trace.is_on:
            return super().settle(result)
        begun = self.links.trace.now()
        super().settle(result)
        self.links.trace.span("settle", begun, result.step_id)

    def empty_outbox(self) -> None:
        if not self.links.trace.is_on:
            return super().empty_outbox()
        begun = self.links.trace.now()
        super().empty_outbox()
        self.links.trace.span("send deltas", begun)
