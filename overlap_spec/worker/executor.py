"""Runs plans, one step after another, on the device.

One thread starts all steps. On CUDA it enqueues their work and never waits for the device; on a CPU it does the work.
What a step needs of the one before it is in the slot rows. A step on the same slots as the step before, without new
requests and pages, uploads nothing.

A feature may have work for the host in the middle of a step (`hooks.py`). So a launch is a generator that yields what
it waits for. The launch of any other step yields nothing and is complete at once.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from overlap_spec_kernels import Published
from torch import Tensor

from overlap_spec.messages import StepPlan
from overlap_spec.sampling.stages import RowPacker
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.worker.chunks import Chunks, Ints, Packer
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.devices import Device, DeviceEvent
from overlap_spec.worker.draft_lag import DraftLag
from overlap_spec.worker.handle import DeviceTimes, HostTimes, StepHandle
from overlap_spec.worker.hooks import Hooks, PlacedStep, Wait
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import EagerRunner, Runner, StepShape
from overlap_spec.worker.windows import Forwarded

OnPublished = Callable[[StepHandle], None]
POLL_S = 0.0001  # between looks at what a launch waits for, where there is nothing else to do


@dataclass(frozen=True)
class BatchSlots:
    """The slots of a decode step, on the device. The same object as long as the slots are the same."""

    slots: list[int]
    on_device: Tensor  # [B] i64
    sampling: SamplingWork
    packers: Sequence[RowPacker | None]


class Launch:
    """A step that is being launched; `handles` are of its parts, in order. Call `advance` until it returns True."""

    def __init__(self, waits: Iterator[Wait], *handles: StepHandle) -> None:
        self.handle = handles[0]
        self.handles = handles
        self._waits = waits
        self._wait: Wait | None = None
        self._since = 0.0

    def advance(self) -> bool:
        """Enqueue as much as can be. Returns whether all of it is. Sync: never. Raises: what the step raises."""
        if self._wait is not None and not self._wait():
            return False
        if self._wait is not None:
            waiting = next(handle for handle in self.handles if not handle.host.launch_end)
            waiting.host.waited += time.monotonic() - self._since
        with torch.inference_mode():
            for wait in self._waits:
                if not wait():
                    self._wait, self._since = wait, time.monotonic()
                    return False
        return True


class Executor:
    """The worker's one path for CPU and CUDA.

    `hooks`: None where no feature is attached. `max_deferred`: rows that a draft may leave unabsorbed.
    """

    def __init__(
        self,
        device: Device,
        slots: SlotRows,
        decode_step: DecodeStep,
        prefill_step: PrefillStep,
        hooks: Hooks | None = None,
        max_deferred: int = 0,
    ) -> None:
        self.slots = slots
        self.hooks = hooks or Hooks()
        self.decode_step = decode_step
        self.prefill_step = prefill_step
        self.device = device
        self.eager = EagerRunner(decode_step, prefill_step, self.hooks.placed)
        self._runner: Runner = self.eager
        self._batch_slots: BatchSlots | None = None
        self._before: DeviceTimes | None = None
        self._lag = DraftLag(0 if self.is_self_drafting else max_deferred)
        self.num_together = 0  # steps whose parts' layers ran together

    def use(self, runner: Runner) -> None:
        """Run steps by this from now on: at first they are launched operation by operation. Nothing is in flight."""
        self._runner = runner

    def start(self, plan: StepPlan, on_published: OnPublished = lambda _: None, received: float = 0.0) -> Launch:
        """Begin to enqueue a step; the one before must be enqueued. Sync: never. Raises: what the step raises.

        `on_published` is called for each part, when its tokens are on their way and its draft is still to be launched;
        `received` is the time.monotonic() at which the plan came.
        """
        now = time.monotonic()
        part, *others = plan.parts()
        handle = StepHandle(part, HostTimes(received or now, now), self._before, is_last=not others)
        if not others:
            return Launch(self._part(handle, on_published), handle)
        prompts = StepHandle(others[0], HostTimes(received or now, now), handle.device)
        return Launch(self._both(handle, prompts, on_published), handle, prompts)

    def launch(self, plan: StepPlan, on_published: OnPublished = lambda _: None) -> StepHandle:
        """Enqueue a whole step. Sync: waits for what hooks wait for, where there are any."""
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
        shape = self._runner.shape_for(StepShape(0, plan.width, 0, Chunks(plan.chunks).shape), _no_windows)
        return shape is not None and self._runner.replays(shape)

    def forget(self) -> None:
        """Let go of what requests have said, where it is kept for others. Sync: never."""
        if self.decode_step.self_drafting is not None:
            with torch.inference_mode():
                self.decode_step.self_drafting.forget()

    def close(self) -> None:
        """Let go of what was captured, once the device is through with it: steps may be in flight, and abandoned."""
        self.device.finish()
        self.use(self.eager)
        for close in reversed(self.hooks.close):
            close()

    def _part(self, handle: StepHandle, on_published: OnPublished) -> Iterator[Wait]:
        plan = handle.plan
        self._tell_changed(plan)
        if plan.chunks:
            yield from self._prefill(handle, on_published)
        elif (placed := self.hooks.own_step(plan)) is not None:
            yield from self._placed(handle, on_published, placed)
        else:
            yield from self._decode(handle, on_published)
        handle.device.end = self.device.now()
        handle.host.launch_end = time.monotonic()
        self._before = handle.device

    def _both(self, decode: StepHandle, prefill: StepHandle, on_published: OnPublished) -> Iterator[Wait]:
        """The windows and the prompts of a step: their layers together, if that can be."""
        chunks = Chunks(prefill.plan.chunks, prefill.plan.resets)
        shape = self._shape_together(decode.plan, prefill.plan, chunks)
        if shape is None:
            yield from self._part(decode, on_published)
            prefill.host.launch_begin = time.monotonic()
            yield from self._part(prefill, on_published)
            return
        for plan in (decode.plan, prefill.plan):
            self._tell_changed(plan)
        yield from self._launch_together(decode, prefill, (chunks, shape), on_published)
        self.num_together += 1
        self._before = prefill.device

    def _shape_together(self, decode: StepPlan, prefill: StepPlan, chunks: Chunks) -> StepShape | None:
        """What a step of both is laid out for. None: a hook wants them apart, or no graph holds both."""
        if any([apart(plan) for apart in self.hooks.runs_apart for plan in (decode, prefill)]):
            return None
        exact = StepShape(len(decode.slots), decode.width, self.slots.num_pages, chunks.shape)
        return self._runner.shape_for(exact, partial(self.slots.most_pages, decode.slots))

    def _launch_together(
        self,
        decode: StepHandle,
        prefill: StepHandle,
        laid_out: tuple[Chunks, StepShape],
        on_published: OnPublished,
    ) -> Iterator[Wait]:
        """The time of the layers is the windows', that of both drafts the prompts'.

        Chunks whose prompts all go on draw and propose nothing: streams wait for such steps one after another.
        """
        batch_slots, (chunks, shape) = self._slots_on_device(decode), laid_out
        assert shape.prompts is not None
        packed, *rows = self._load(prefill, chunks.laid_out(shape.prompts, self.slots.dummy), *chunks.rows_out())
        self._batch_slots = None  # as after any prefill step
        for handle in (decode, prefill):
            yield from self._before_layers(handle)
        windows, prompts = self._runner.forward(shape, batch_slots.on_device, packed)
        yield from self._before_decide(decode)
        assert not decode.left_out, "a hook that leaves out rows has its steps run apart"
        self._lag.after(decode.plan.slots, decode.plan.width, decode.caught_up)
        published = windows.decide(batch_slots.sampling)
        decode.packers = batch_slots.packers
        self._publish(decode, published)
        decode.device.end = prefill.device.begin = self.device.now()
        decode.host.launch_end = prefill.host.launch_begin = time.monotonic()
        self._hand_over(decode, on_published)
        yield from self._before_decide(prefill)
        sampling = self.slots.sampling_work(chunks.completed())
        prefill.packers = self.slots.packers(prefill.plan.rows, chunks.counts_out())
        step, completes = self.prefill_step, bool(chunks.completed())
        beside = step.outputs_of(prompts.rows, *rows) if rows else []
        published = prompts.decide(sampling) if completes else step.draw_nothing(prompts.rows)
        self._publish(prefill, published, *beside)
        self._hand_over(prefill, on_published)
        if decode.plan.drafts:
            windows.draft(batch_slots.sampling, decode.plan.width)
        if completes:
            prompts.draft(sampling, prefill.plan.width)
        else:
            step.absorb(prompts.rows)
        prefill.device.end = self.device.now()
        prefill.host.launch_end = time.monotonic()

    def _decode(self, handle: StepHandle, on_published: OnPublished) -> Iterator[Wait]:
        """Verify the window proposed by the step before, commit, publish, propose the next one."""
        width, batch_slots = handle.plan.width, self._slots_on_device(handle)
        yield from self._before_layers(handle)
        exact = StepShape(len(handle.plan.slots), width, self.slots.num_pages)
        shape = self._runner.shape_for(exact, partial(self.slots.most_pages, handle.plan.slots))
        assert shape is not None, "windows alone have a shape"
        (windows,) = self._runner.forward(shape, batch_slots.on_device)
        yield from self._before_decide(handle)
        rows_left_out = self._leave_out(handle, windows.rows)
        self._lag.after(handle.plan.slots, width, handle.caught_up, handle.left_out.values())
        published = windows.decide(batch_slots.sampling)
        handle.packers = batch_slots.packers
        self._publish(handle, published)
        draft = partial(windows.draft, batch_slots.sampling, width)
        drafts = handle.plan.drafts
        if drafts and self.device.asynchronous:
            draft()  # enqueued first, so that the device need not wait for this thread
        self._hand_over(handle, on_published)
        if drafts and not self.device.asynchronous:
            draft()  # tokens leave before the draft works
        for row, slots in rows_left_out:
            windows.rows.batch.slots.index_copy_(0, row, slots)

    def _leave_out(self, handle: StepHandle, forwarded: Forwarded) -> list[tuple[Tensor, Tensor]]:
        """Let the dummy slot and the dummy page take the place of slots that hooks leave out: theirs stay as they are.

        All that is written for a slot are rows of its window, which its next step writes again. Returns rows and slots
        to put back; page tables are gathered by every step.
        """
        if not handle.left_out:
            return []
        packer = Packer()
        packer.add(handle.left_out)
        packer.add(handle.left_out.values())
        rows, slots = packer.upload(self.device)
        forwarded.batch.slots.index_fill_(0, rows, self.slots.dummy)
        forwarded.batch.page_table.index_fill_(0, rows, 0)
        return [(rows, slots)]

    def _prefill(self, handle: StepHandle, on_published: OnPublished) -> Iterator[Wait]:
        """Run prompt chunks; draw the first token of each prompt that they complete, and propose its first window."""
        chunks = Chunks(handle.plan.chunks, handle.plan.resets)
        shape = self._runner.shape_for(StepShape(0, handle.plan.width, 0, chunks.shape), _no_windows)
        assert shape is not None and shape.prompts is not None, "prompts alone have a shape"
        self._batch_slots = None  # a slot may have got a new owner, who samples otherwise
        packed, *rows = self._load(handle, chunks.laid_out(shape.prompts, self.slots.dummy), *chunks.rows_out())
        sampling = self.slots.sampling_work(chunks.completed())
        yield from self._before_layers(handle)
        (prompts,) = self._runner.forward(shape, packed)
        handle.packers = self.slots.packers(handle.plan.rows, chunks.counts_out())
        beside = self.prefill_step.outputs_of(prompts.rows, *rows) if rows else []
        yield from self._before_decide(handle)
        self._publish(handle, prompts.decide(sampling), *beside)
        self._hand_over(handle, on_published)
        if handle.plan.drafts:
            prompts.draft(sampling, handle.plan.width)

    def _placed(self, handle: StepHandle, on_published: OnPublished, step: PlacedStep) -> Iterator[Wait]:
        """A step of a feature's own: nothing is committed, and the draft takes no part."""
        slots, handle.packers = handle.plan.slots, (step,)
        exact = StepShape(step.size, 1, self.slots.num_pages, placed=True)
        shape = self._runner.shape_for(exact, partial(self.slots.most_pages, slots))
        assert shape is not None, "windows alone have a shape"
        (packed,) = self._load(handle, step.laid_out(shape.slots, self.slots.dummy))
        yield from self._before_layers(handle)
        (windows,) = self._runner.forward(shape, packed)
        yield from self._before_decide(handle)
        self._publish(handle, windows.decide(self.slots.sampling_work(slots)))
        self._hand_over(handle, on_published)

    def _tell_changed(self, plan: StepPlan) -> None:
        if plan.resets:
            for changed in self.hooks.changed:
                changed(plan)

    def _before_layers(self, handle: StepHandle) -> Iterator[Wait]:
        for before_layers in self.hooks.before_layers:
            for wait in before_layers(handle):
                yield wait
                handle.device.begin = self.device.now()  # the wait is none of this step's work

    def _before_decide(self, handle: StepHandle) -> Iterator[Wait]:
        for before_decide in self.hooks.before_decide:
            yield from before_decide(handle)

    def _hand_over(self, handle: StepHandle, on_published: OnPublished) -> None:
        """The copy out has begun."""
        for published in self.hooks.published:
            published(handle)
        on_published(handle)

    def _slots_on_device(self, handle: StepHandle) -> BatchSlots:
        """The step's slots on the device; uploaded only if they are others than those of the last decode step."""
        slots = handle.plan.slots
        missed = self._lag.before(slots, handle.plan.width)
        if self._batch_slots is not None and self._batch_slots.slots == slots and not missed:
            self._load(handle)
            return self._batch_slots
        on_device, *counts = self._load(handle, slots, *([missed] if missed else []))
        self._batch_slots = BatchSlots(slots, on_device, self.slots.sampling_work(slots), self.slots.packers(slots))
        if missed:
            self._runner.absorb_missed(on_device, *counts)
            handle.caught_up = True
        return self._batch_slots

    def _load(self, handle: StepHandle, *runs: Iterable[int] | Ints) -> list[Tensor]:
        """Copy the step's integers in, write new requests and pages into their rows, return `runs` on the device."""
        packer, plan = Packer(), handle.plan
        self._lag.forget(plan.resets)
        count, changes = self.slots.pack_changes(plan)
        lists = self.slots.pack_lists(plan.resets) if plan.resets else ()
        if not (count or runs):
            handle.device.begin = self._begin()
            return []
        for run in (changes, *lists, *runs):
            packer.add(run)
        handle.device.begin = self._begin()  # packing is not the device's work
        changed, *loaded = packer.upload(self.device)
        self.slots.apply(changed, count)
        if lists:
            self.slots.apply_lists(*loaded[: len(lists)])
        return loaded[len(lists) :]

    def _begin(self) -> DeviceEvent:
        """Where a step begins: at the end of the one before, if the device is not there yet.

        An event of its own at the same place would take the device more than a microsecond.
        """
        before = self._before
        return self.device.now() if before is None or before.end.passed() else before.end

    def _publish(self, handle: StepHandle, published: Published, *prompts: Tensor) -> None:
        """Start to copy out the rows of the plan's slots, without padding, and the outputs that are asked for."""
        handle.columns, num_slots = published.columns, len(handle.plan.rows)
        beside: Sequence[Tensor] = prompts
        if published.outputs:
            num_rows, handle.num_outputs = num_slots * published.columns.longest, len(published.outputs)
            beside = *(output[:num_rows] for output in published.outputs), *prompts
        handle.download = self.device.download(published.rows[:num_slots], *beside)
        handle.device.decided = handle.download.done


def _no_windows() -> int:
    """Pages of a step's windows, where it has none."""
    return 0
