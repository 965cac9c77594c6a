"""What a step needs of the host, and how it gets to the device: new requests and pages, slots, chunks of prompts.

All of a step travels in one copy. Windows of the same slots as in the step before, without new requests and pages, need
none.

**How far each slot's draft lags behind** (`DraftLag`): steps of width 1 leave the draft out, which then has rows to
absorb. A step catches up when it is wider than that, or when a slot's rows would become more than the draft keeps.
The counts are the host's, so they follow from plans alone. The scheduler knows an upper bound of them, for its prefix
cache, which takes no root. A draft that has a row for the root lacks that, too, where a prompt's step proposes nothing.

As a rule, narrow steps have the slots of the one before. So they are counted once for all slots, and by slot only when
the batch changes: the worker's thread looks at no slot while it does not.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from overlap_spec_kernels import Published
from torch import Tensor

from overlap_spec.messages import StepPlan
from overlap_spec.sampling.context import SamplingWork
from overlap_spec.sampling.stages import RowPacker
from overlap_spec.worker.devices import Device, DeviceEvent, Ints, Packer
from overlap_spec.worker.hooks import PlacedStep
from overlap_spec.worker.prefill import Chunks, PrefillStep
from overlap_spec.worker.runner import Part, Runner
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import StepHandle, StepShape


class DraftLag:
    """Rows that drafts have not absorbed, by slot. `most`: those that a draft keeps; 0: it is never left out.

    `counts_roots`: whether the root has a row, which a prompt's step leaves to what it proposes.
    """

    def __init__(self, most: int, counts_roots: bool = False) -> None:
        self._most, self._counts_roots = most, counts_roots
        self._rows: dict[int, int] = {}  # of slots that have some, but for `_num_steps`
        self._batch: Sequence[int] = ()  # slots of the narrow steps that are counted together
        self._num_steps = 0  # of these, not in `_rows` yet
        self._room = 0  # how many of them there may be before a slot's rows are too many

    def forget(self, slots: Iterable[int]) -> None:
        """These slots get new requests."""
        for slot in slots:
            self._settle()
            self._rows.pop(slot, None)

    def before(self, slots: Sequence[int], width: int) -> list[int]:
        """The rows of each slot that its draft must absorb before a step of this width; empty if there is no need."""
        if width == 1 and self._num_steps < self._room and slots == self._batch:
            return []
        self._settle()
        if not self._rows:
            return []
        counts = [self._rows.get(slot, 0) for slot in slots]
        return counts if max(counts) >= (self._most if width == 1 else 1) else []

    def after(self, slots: Sequence[int], width: int, caught_up: bool, left_out: Collection[int] = ()) -> None:
        """Count a step that was launched. `left_out`: slots that took no part in it, but for catching up."""
        if width == 1 and self._room and not (caught_up or left_out) and slots == self._batch:
            self._num_steps += 1
            return
        if width > 1 and not caught_up:
            return  # `before` has counted by slot
        if caught_up:
            self.forget(slots)
        self._settle()
        if width == 1 and self._most:
            self._rows.update({slot: self._rows.get(slot, 0) + 1 for slot in slots if slot not in left_out})
            self._batch, self._room = slots, self._most - max([self._rows.get(slot, 0) for slot in slots])

    def after_prompts(self, slots: Sequence[int]) -> None:
        """Count the roots of prompts that were completed, for which nothing was proposed."""
        if self._most and self._counts_roots:
            self._settle()
            self._rows.update(dict.fromkeys(slots, 1))

    def _settle(self) -> None:
        """Count by slot from now on."""
        if self._num_steps:
            self._rows.update({slot: self._rows.get(slot, 0) + self._num_steps for slot in self._batch})
        self._batch, self._num_steps, self._room = (), 0, 0


Run = Iterable[int] | Ints
Begin = Callable[[], DeviceEvent]


class Step:
    """A step, or a part of one that runs alone. `handles`: of its parts, windows before prompts.

    `placed`: a feature's own step; None: it is of requests.
    """

    def __init__(self, plan: StepPlan, handles: tuple[StepHandle, ...], placed: PlacedStep | None = None) -> None:
        self.plan = plan
        self.handles = handles
        self.placed = placed
        self.chunks = Chunks(plan.chunks, plan.resets) if plan.chunks else None
        self.has_windows = bool(plan.slots) and placed is None  # where the step before has left them

    def exact(self, num_pages: int) -> StepShape:
        """Exactly what there is. `num_pages`: columns of the page table."""
        if self.placed is not None:
            return StepShape(self.placed.size, 1, num_pages, placed=True)
        prompts = None if self.chunks is None else self.chunks.shape
        return StepShape(len(self.plan.slots), self.plan.width, num_pages, prompts)

    def apart(self) -> Iterator["Step"]:
        """Each part as a step of its own, in order."""
        for handle in self.handles:
            yield Step(handle.plan, (handle,))


@dataclass(frozen=True)
class PartInputs:
    """What a part takes of the host. Of windows the same object as long as their slots are the same."""

    slots: list[int]
    on_device: Tensor  # i64, as `PartKind.read` takes it
    sampling: SamplingWork
    packers: Sequence[RowPacker | None]

    def decide(self, part: Part) -> tuple[Published, list[Tensor]]:
        """Let a part decide. Also returns the outputs of prompt tokens, see `PrefillStep.outputs_of`. Sync: never."""
        return part.decide(self.sampling), []

    def draft(self, part: Part, width: int) -> None:
        """Let the part's draft work. Sync: never."""
        part.draft(self.sampling, width)


@dataclass(frozen=True)
class ChunkInputs(PartInputs):
    """What prompts take. `draws`: False if all go on, and nothing is replayed."""

    prompts: PrefillStep
    rows_out: list[Tensor]  # see `Chunks.rows_out`
    draws: bool

    def decide(self, part: Part) -> tuple[Published, list[Tensor]]:
        beside = self.prompts.outputs_of(part.rows, *self.rows_out) if self.rows_out else []
        return part.decide(self.sampling) if self.draws else self.prompts.draw_nothing(part.rows), beside

    def draft(self, part: Part, width: int) -> None:
        if self.draws:
            part.draft(self.sampling, width)
        else:
            self.prompts.absorb(part.rows)


class StepInputs:
    """Brings inputs to the device, in the order of steps."""

    def __init__(self, slots: SlotRows, prompts: PrefillStep, lag: DraftLag) -> None:
        self._slots = slots
        self._prompts = prompts
        self._lag = lag
        self._windows: PartInputs | None = None  # of the last step with windows, if no prompts have run since
        self._left_out: list[tuple[Tensor, Tensor, Tensor]] = []  # slots of a part, rows of these, what was there
        self._shapes: dict[int, StepShape] = {}  # of these windows alone, by width, as long as they get no pages

    def load(self, step: Step, runner: Runner, device: Device, begin: Begin) -> tuple[StepShape, list[PartInputs]]:
        """Copy in what is new, and let the draft catch up where it must. Returns the shape, and inputs by part.

        `begin`: marks where the device begins with the step. Sync: never.
        """
        plan, slots, handle, windows = step.plan, self._slots, step.handles[0], self._windows
        missed = self._lag.before(plan.slots, plan.width) if step.has_windows else []
        if missed or windows is None or windows.slots != plan.slots or not step.has_windows:
            windows = None
        if plan.resets:
            self._lag.forget(plan.resets)
        changes = slots.pack_changes(plan)
        if windows is not None and not changes[0] and step.chunks is None:
            handle.device.begin, handle.packers = begin(), windows.packers
            shape = self._shapes.get(plan.width)
            if shape is None:
                shape = self._shapes[plan.width] = self._shape_for(step, runner)
            return shape, [windows]
        shape = self._shape_for(step, runner)
        self._shapes = {plan.width: shape} if step.has_windows and step.chunks is None else {}
        own: list[Run] = []
        if step.has_windows and windows is None:
            own = [plan.slots, missed] if missed else [plan.slots]
        loaded = self._copy_in(step, changes, [*own, *self._others(step, shape)], device, begin)
        inputs = [] if windows is None else [windows]
        if own:
            inputs = [self._windows_of(plan.slots, loaded[0])]
        if missed:
            runner.absorb_missed(loaded[0], loaded[1], max(missed))
            handle.caught_up = True
        if len(loaded) > len(own):
            inputs.append(self._others_of(step, loaded[len(own) :]))
        for each, part in zip(step.handles, inputs, strict=True):
            each.packers = part.packers
        return shape, inputs

    def use_another(self) -> None:
        """Steps are run by another runner from now on, which may lay them out otherwise."""
        self._shapes = {}

    def _shape_for(self, step: Step, runner: Runner) -> StepShape:
        """What the step is laid out for."""
        slots = self._slots
        shape = runner.shape_for(step.exact(slots.num_pages), partial(slots.most_pages, step.plan.slots))
        assert shape is not None, "parts that no graph holds together run apart"
        return shape

    def leave_out(self, handle: StepHandle, part: Part, device: Device) -> None:
        """Let the dummy slot and the dummy page take the place of slots that hooks leave out, until `launched`.

        All that is written for a slot are rows of its window, which its next step writes again. Page tables are
        gathered by every step.
        """
        packer, batch = Packer(), part.rows.batch
        packer.add(handle.left_out)
        packer.add(handle.left_out.values())
        rows, slots = packer.upload(device)
        batch.slots.index_fill_(0, rows, self._slots.dummy)
        batch.page_table.index_fill_(0, rows, 0)
        self._left_out.append((batch.slots, rows, slots))

    def launched(self, step: Step) -> None:
        """All is launched: put back what was left out, and count what the draft has missed, before and of this step."""
        for slots, rows, left_out in self._left_out:
            slots.index_copy_(0, rows, left_out)
        self._left_out.clear()
        if step.has_windows:
            handle = step.handles[0]
            self._lag.after(step.plan.slots, step.plan.width, handle.caught_up, handle.left_out.values())
        if step.chunks is not None and (prompts := step.handles[-1].plan).drafts and prompts.width == 1:
            self._lag.after_prompts(step.chunks.completed())

    def _others(self, step: Step, shape: StepShape) -> list[Run]:
        """The integers of chunks, or of windows at given places."""
        dummy = self._slots.dummy
        if step.placed is not None:
            return [step.placed.laid_out(shape.slots, dummy)]
        if step.chunks is None or shape.prompts is None:
            return []
        return [step.chunks.laid_out(shape.prompts, dummy), *step.chunks.rows_out()]

    def _windows_of(self, slots: list[int], on_device: Tensor) -> PartInputs:
        self._windows = PartInputs(slots, on_device, self._slots.sampling_work(slots), self._slots.packers(slots))
        return self._windows

    def _others_of(self, step: Step, loaded: list[Tensor]) -> PartInputs:
        """Prompts that go on draw for the dummy slot where they are alone, as captured steps do."""
        rows, slots, chunks = step.handles[-1].plan.rows, self._slots, step.chunks
        if chunks is None:
            return PartInputs(rows, loaded[0], slots.sampling_work(rows), (step.placed,))
        self._windows = None  # a slot may have got a new owner, who samples otherwise
        completed = chunks.completed()
        common = rows, loaded[0], slots.sampling_work(completed), slots.packers(rows, chunks.counts_out())
        return ChunkInputs(*common, self._prompts, loaded[1:], draws=not step.plan.slots or bool(completed))

    def _copy_in(
        self, step: Step, changes: tuple[int, bytes], runs: list[Run], device: Device, begin: Begin
    ) -> list[Tensor]:
        """Write new requests and pages into their rows, and return `runs` on the device."""
        packer = Packer()
        for run in (changes[1], *runs):
            packer.add(run)
        step.handles[0].device.begin = begin()  # packing is not the device's work
        changed, *loaded = packer.upload(device)
        self._slots.apply(changed, changes[0])
        return loaded
