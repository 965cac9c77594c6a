"""Runs plans, one step after another, on the device.

One thread starts all steps. On CUDA it enqueues their work and never waits for the device; on a CPU it does the work.
What a step needs of the one before it is in the slot rows.

A step has one or two parts, windows and then prompts. `Executor._run` is the whole of it.

A feature may have work for the host in the middle of a step (`hooks.py`). So a launch is a generator that yields what
it waits for. The launch of any other step yields nothing and is complete at once.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from overlap_spec.messages import StepPlan
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.devices import Device, DeviceEvent, Packer
from overlap_spec.worker.hooks import Hooks, Wait
from overlap_spec.worker.inputs import DraftLag, PartInputs, Step, StepInputs
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.runner import EagerRunner, Part, Runner
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import DeviceTimes, HostTimes, Launch, StepHandle

OnPublished = Callable[[StepHandle], None]
Swapped = tuple[Tensor, Tensor, Tensor]  # slots of a step, rows of these, and what is to be put back there
POLL_S = 0.0001  # between looks at what a launch waits for, where there is nothing else to do


class Executor:
    """The worker's one path for CPU and CUDA.

    `hooks`: None where no feature is attached. `most_missed`: rows that a draft may leave unabsorbed.
    """

    def __init__(
        self,
        device: Device,
        slots: SlotRows,
        decode_step: DecodeStep,
        prefill_step: PrefillStep,
        hooks: Hooks | None = None,
        most_missed: int = 0,
    ) -> None:
        self.device = device
        self.slots = slots
        self.hooks = hooks or Hooks()
        self.decode_step = decode_step
        self.prefill_step = prefill_step
        self.eager = EagerRunner(decode_step, prefill_step, self.hooks.placed)
        self._runner: Runner = self.eager
        self.announce: Callable[[StepPlan], None] = lambda plan: None  # to other ranks, which launch the same
        self._lag = DraftLag(0 if self.is_self_drafting else most_missed)
        self._inputs = StepInputs(slots, prefill_step, self._lag)
        self._before: DeviceTimes | None = None
        self._mode = (
            torch.inference_mode()
        )  # of all launches, which do not overlap: making one takes half a microsecond

    def use(self, runner: Runner) -> None:
        """Run steps by this from now on: at first they are launched operation by operation. Nothing is in flight."""
        self._runner = runner
        self._inputs.use_another()

    def start(self, plan: StepPlan, on_published: OnPublished = lambda _: None, received: float = 0.0) -> Launch:
        """Begin to enqueue a step; the one before must be enqueued. Sync: never. Raises: what the step raises.

        `on_published` is called for each part, when its tokens are on their way and, but for windows alone on CUDA, its
        draft is still to be launched; `received` is the time.monotonic() at which the plan came.
        """
        now, (part, *others) = time.monotonic(), plan.parts()
        handle = StepHandle(part, HostTimes(received or now, now), self._before, is_last=not others)
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

    @property
    def is_self_drafting(self) -> bool:
        """Whether the proposer drafts without a model (`SelfDrafting`)."""
        return self.decode_step.self_drafting is not None

    def replays_prompts(self, plan: StepPlan) -> bool:
        """Whether a graph holds this prefill step."""
        shape = self._runner.shape_for(Step(plan, ()).exact(self.slots.num_pages), lambda: 0)
        return shape is not None and self._runner.replays(shape)

    def forget(self) -> None:
        """Let go of what requests have said, where it is kept for others. Sync: never."""
        if self.decode_step.self_drafting is not None:
            with torch.inference_mode():
                self.decode_step.self_drafting.forget()

    def close(self) -> None:
        """Let go of what was captured, once the device is through with it: steps may be in flight, and abandoned."""
        self.device.finish()
        for close in reversed(self.hooks.close):
            close()
        self.use(self.eager)

    def _run_both(self, step: Step, on_published: OnPublished) -> Iterator[Wait]:
        """Windows and prompts together, unless a hook wants them apart or no graph holds both."""
        together = not any([apart(step.plan) for apart in self.hooks.runs_apart])
        if together and self._runner.shape_for(step.exact(self.slots.num_pages), lambda: 0) is not None:
            yield from self._run(step, on_published)
            return
        for part in step.apart():
            part.handles[0].host.launch_begin = time.monotonic()
            yield from self._run(part, on_published)

    def _run(self, step: Step, on_published: OnPublished) -> Iterator[Wait]:
        """Launch a step. Tokens leave before a draft is launched: that takes a CPU long, and the host beside prompts.

        Of windows alone on CUDA the draft is launched first: so the device never waits for the host to send tokens.
        """
        for changed in self.hooks.changed if step.plan.resets else ():
            changed(step.plan)
        shape, inputs = self._inputs.load(step, self._runner, self.device, self._begin)
        for handle in step.handles if self.hooks.before_layers else ():
            yield from self._before_layers(handle)
        parts = self._runner.forward(shape, *[each.on_device for each in inputs])
        drafts_first, last = self.device.asynchronous and step.chunks is None, step.handles[-1]
        swapped: list[Swapped] = []
        works = list(zip(step.handles, parts, inputs, strict=True))
        for handle, part, given in works:
            for before_decide in self.hooks.before_decide:
                yield from before_decide(handle)
            if handle.left_out:
                swapped.append(self._leave_out(handle, part))
            self._publish(handle, part, given)
            if handle is not last:  # the time of the layers is the windows', that of all drafts the prompts'
                last.device.begin, last.host.launch_begin = self._end(handle)
            if not drafts_first:
                self._hand_over(handle, on_published)
        for handle, part, given in works:
            if handle.plan.drafts:
                given.draft(part, handle.plan.width)
        if drafts_first:
            self._hand_over(last, on_published)
        for slots, rows, left_out in swapped:
            slots.index_copy_(0, rows, left_out)
        self._inputs.launched(step)
        self._end(last)

    def _before_layers(self, handle: StepHandle) -> Iterator[Wait]:
        for before_layers in self.hooks.before_layers:
            for wait in before_layers(handle):
                yield wait
                handle.device.begin = self.device.now()  # the wait is none of this step's work

    def _hand_over(self, handle: StepHandle, on_published: OnPublished) -> None:
        """The copy out has begun."""
        for published in self.hooks.published:
            published(handle)
        on_published(handle)

    def _leave_out(self, handle: StepHandle, part: Part) -> Swapped:
        """Let the dummy slot and the dummy page take the place of slots that hooks leave out: theirs stay as they are.

        All that is written for a slot are rows of its window, which its next step writes again. Page tables are
        gathered by every step.
        """
        packer, batch = Packer(), part.rows.batch
        packer.add(handle.left_out)
        packer.add(handle.left_out.values())
        rows, slots = packer.upload(self.device)
        batch.slots.index_fill_(0, rows, self.slots.dummy)
        batch.page_table.index_fill_(0, rows, 0)
        return batch.slots, rows, slots

    def _publish(self, handle: StepHandle, part: Part, given: PartInputs) -> None:
        """Let the part decide, and copy out the rows of its slots, without padding, and outputs that are asked for."""
        published, of_prompts = given.decide(part)
        handle.columns, num_slots = published.columns, len(handle.plan.rows)
        handle.num_outputs, num_rows = len(published.outputs), num_slots * published.columns.longest
        outputs = [output[:num_rows] for output in published.outputs]
        handle.download = self.device.download(published.rows[:num_slots], *outputs, *of_prompts)
        handle.device.decided = handle.download.done

    def _begin(self) -> DeviceEvent:
        """Where a step begins: at the end of the one before, if the device is not there yet.

        An event of its own at the same place would take the device more than a microsecond.
        """
        before = self._before
        return self.device.now() if before is None or before.end.passed() else before.end

    def _end(self, handle: StepHandle) -> tuple[DeviceEvent, float]:
        """All of a part is launched. Returns when, in the device's time and in the host's."""
        handle.device.end, handle.host.launch_end = self.device.now(), time.monotonic()
        self._before = handle.device
        return handle.device.end, handle.host.launch_end
