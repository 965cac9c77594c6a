"""Runs plans, one step after another, on the device.

One thread starts all steps. On CUDA it enqueues their work and never waits for the device; on a CPU it does the work.
What a step needs of the one before it is in the slot rows. A step has one or two parts, windows and then prompts:
`Executor._run`. A feature may have work for the host in its middle (`hooks.py`), so a launch is a generator that yields
what it waits for. The launch of any other step yields nothing and is complete at once.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain

import torch

from overlap_spec.messages import StepPlan
from overlap_spec.models.recurrent_state import NO_SNAPSHOTS, StateSnapshots
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.devices import Device
from overlap_spec.worker.hooks import Hooks, Wait
from overlap_spec.worker.inputs import DraftLag, Step, StepInputs
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.runner import EagerRunner, Runner
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import HostTimes, Launch, StepHandle, Timeline

OnPublished = Callable[[StepHandle], None]
POLL_S = 0.0001  # between looks at what a launch waits for, where there is nothing else to do


class Executor:
    """The worker's one path for CPU and CUDA.

    `hooks`: None where no feature is attached. `lag`: None of a draft that leaves no rows unabsorbed.
    """

    def __init__(
        self,
        device: Device,
        slots: SlotRows,
        decode_step: DecodeStep,
        prefill_step: PrefillStep,
        hooks: Hooks | None = None,
        lag: DraftLag | None = None,
        snapshots: StateSnapshots = NO_SNAPSHOTS,
    ) -> None:
        self.device, self.slots, self.hooks = device, slots, hooks or Hooks()
        self.decode_step, self.prefill_step = decode_step, prefill_step
        self.eager = EagerRunner(decode_step, prefill_step, self.hooks.placed)
        self.runner: Runner = self.eager
        self.announce: Callable[[StepPlan], None] = lambda plan: None  # to other ranks, which launch the same
        self.is_self_drafting = decode_step.self_drafting is not None  # guesses come from no model
        self._inputs = StepInputs(slots, prefill_step, lag or DraftLag(0))
        self._snapshots = snapshots
        self._timeline = Timeline(device)
        self._mode = (
            torch.inference_mode()
        )  # of all launches, which do not overlap: making one takes half a microsecond

    def use(self, runner: Runner) -> None:
        """Run steps by this from now on: at first they are launched operation by operation. Nothing is in flight."""
        self.runner = runner
        self._inputs.use_another()

    def start(self, plan: StepPlan, on_published: OnPublished = lambda _: None, received: float = 0.0) -> Launch:
        """Begin to enqueue a step; the one before must be enqueued. Sync: never. Raises: what the step raises.

        `on_published` is called for each part, when its tokens are on their way and, but for windows alone on CUDA, its
        draft is still to be launched; `received` is the time.monotonic() at which the plan came.
        """
        now, (part, *others) = time.monotonic(), plan.parts()
        handle = StepHandle(part, HostTimes(received or now, now), self._timeline.before, is_last=not others)
        if not others:
            placed = self.hooks.own_step(plan) if plan.extensions and not plan.chunks else None
            return Launch(self._mode, self._run(Step(plan, (handle,), placed), on_published), handle)
        prompts = StepHandle(others[0], HostTimes(received or now, now), handle.device)
        return Launch(self._mode, self._run_both(Step(plan, (handle, prompts)), on_published), handle, prompts)

    def launch(self, plan: StepPlan, on_published: OnPublished = lambda _: None) -> StepHandle:
        """Enqueue a whole step. Sync: waits for what hooks wait for, where there are any."""
        self.announce(plan)
        launch = self.start(plan, on_published)
        while not launch.advance():
            time.sleep(POLL_S)
        return launch.handle

    def close(self) -> None:
        """Let go of what was captured, once the device is through with it: steps may be in flight, and abandoned."""
        self.device.finish()
        for close in reversed(self.hooks.close):
            close()
        self.use(self.eager)

    def _run_both(self, step: Step, on_published: OnPublished) -> Iterator[Wait]:
        """Windows and prompts together, unless a hook wants them apart or no graph holds both."""
        together = not any([apart(step.plan) for apart in self.hooks.runs_apart])
        if together and self.runner.shape_for(step.exact(self.slots.num_pages), lambda: 0) is not None:
            yield from self._run(step, on_published)
            return
        for part in step.apart():
            part.handles[0].host.launch_begin = time.monotonic()
            yield from self._run(part, on_published)

    def _run(self, step: Step, on_published: OnPublished) -> Iterator[Wait]:
        """Launch a step. Tokens leave before a draft is launched, which takes a CPU, or a host beside prompts, long."""
        hooks, inputs = self.hooks, self._inputs
        handed_over = (*hooks.published, on_published)  # told when the copy out of a part's tokens has begun
        for changed in hooks.changed if step.plan.resets else ():
            changed(step.plan)
        shape, given = inputs.load(step, self.runner, self.device, self._timeline.begin)
        for handle in step.handles if hooks.before_layers else ():
            for wait in chain.from_iterable(point(handle) for point in hooks.before_layers):
                yield wait
                handle.device.begin = self.device.now()  # the wait is none of this step's work
        self._snapshots.restore({each.slot: each.restored for each in step.plan.chunks if each.restored >= 0})
        parts = self.runner.forward(shape, *[each.on_device for each in given])
        self._snapshots.take({each.slot: each.snapshot for each in step.plan.chunks if each.snapshot >= 0})
        drafts_first, last = self.device.asynchronous and step.chunks is None, step.handles[-1]
        works = list(zip(step.handles, parts, given, strict=True))
        for handle, part, of_part in works:
            for before_decide in hooks.before_decide:
                yield from before_decide(handle)
            if handle.left_out:
                inputs.leave_out(handle, part, self.device)
            handle.copy_out(self.device, *of_part.decide(part))
            if handle is not last:  # the time of the layers is the windows', that of all drafts the prompts'
                last.device.begin, last.host.launch_begin = self._timeline.end(handle)
            for told in () if drafts_first else handed_over:
                told(handle)
        for handle, part, of_part in works:
            if handle.plan.drafts:
                of_part.draft(part, handle.plan.width)
        for told in handed_over if drafts_first else ():  # so the device never waits for the host to send tokens
            told(last)
        inputs.launched(step)
        self._timeline.end(last)
