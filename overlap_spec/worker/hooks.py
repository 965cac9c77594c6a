"""Where features attach to the worker: a hook overrides the points that it needs, and the others cost nothing.

    changed ── before_layers ── layers ── before_decide ── decide ── published ── draft ── launched        one step
    serves ── message ── replies, is_busy, watched                                                         the loop

The executor and the loop call points, and know no feature. All are called in the worker's one thread, in the order of
plans, and those of a point in the order in which features are attached. None may ask the device for a value.

**Contract.** What a hook makes the device do follows from plans and from tokens, never from the clock. Several devices
that run one model are each told the same plans, and their hooks must launch the same work. A hook that goes by time
has `timed = True`, and can be attached only where one device runs the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from overlap_spec.errors import ConfigError
from overlap_spec.messages import Extension, StepPlan
from overlap_spec.runtime.tracing import Recorder
from overlap_spec.sampling.stages import LogitStage, RowOutput, RowPacker, SlotColumns
from overlap_spec.worker.runner import PartKind
from overlap_spec.worker.step import NO_MARKS, ProfileMarks, StepHandle

ONE_PLACED = "one feature can have steps of its own"

Wait = Callable[[], bool]  # asked until it is true; must not block


class PlacedStep(RowPacker, Protocol):
    """A step of a feature's own: windows of one column, at given places. It packs the one output of its kind."""

    @property
    def size(self) -> int:
        """Slots that it is padded to, at least."""

    def laid_out(self, size: int, dummy: int) -> Iterable[int]:
        """Its integers, for so many slots, as its kind of part reads them."""


@dataclass(frozen=True)
class Needs:
    """What a feature takes of the device, known before it attaches: `needs(settings, models)` of its module.

    `num_bytes`: of memory; `column_bytes`: for each column of each slot's window; `slot_bytes`: for each slot.
    `placed_slots`: slots beside those of requests, for steps of its own. `placed_batches`: how many slots such steps
    are padded to, ascending.
    """

    column_bytes: int = 0
    placed_slots: int = 0
    placed_batches: tuple[int, ...] = ()
    slot_bytes: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Needs") -> "Needs":
        assert not (self.placed_slots and other.placed_slots), ONE_PLACED
        return Needs(
            self.column_bytes + other.column_bytes,
            self.placed_slots + other.placed_slots,
            self.placed_batches + other.placed_batches,
            self.slot_bytes + other.slot_bytes,
            self.num_bytes + other.num_bytes,
        )


class StepHook:
    """Base of what a feature does in the worker. Every point does nothing: a feature overrides some.

    `timed`: what it makes the device do depends on the time that something takes. `stages`: what it does to logits.
    `outputs`: what it gives out beside tokens. `placed`: what runs steps of its own. `columns`: what it keeps of each
    slot. `warms_up`: fields of a request that asks for it, in one of the steps that are run before the engine is ready.
    `marks`: receives the ends of a decode step's parts.
    """

    timed: bool = False
    stages: Sequence[LogitStage] = ()
    outputs: Sequence[RowOutput] = ()
    placed: PartKind | None = None
    columns: SlotColumns | None = None
    warms_up: Mapping[str, Any] = {}
    marks: ProfileMarks | None = None

    def changed(self, plan: StepPlan) -> None:
        """Requests take slots: the plan's `resets`, of which there are some. What the step before read is launched."""

    def runs_apart(self, plan: StepPlan) -> bool:
        """Whether the layers of this step must not run together with those of another: rows may be left out of it.

        Asked before `changed`.
        """
        return False

    def placed_step(self, plan: StepPlan) -> PlacedStep | None:
        """The step, if it is one of the feature's own, which `placed` runs. Asked of plans with extensions."""
        return None

    def before_layers(self, handle: StepHandle) -> Iterable[Wait]:
        """The step's slots have their requests and pages; its layers are launched next. May write windows.

        Yields what must be over before the launch goes on, and is asked to go on when it is. () where nothing is.
        """
        return ()

    def before_decide(self, handle: StepHandle) -> Iterable[Wait]:
        """The layers are launched, and tokens are drawn next. May write what stages read, and leave out rows.

        Yields as `before_layers`.
        """
        return ()

    def published(self, handle: StepHandle) -> None:
        """The step's tokens are on their way to the host (`StepHandle.ready`)."""

    def launched(self, handle: StepHandle) -> None:
        """All work of the step is enqueued, that of the draft too."""

    def serves(self, trace: Recorder) -> None:
        """The loop begins: nothing is in flight. `trace`: takes records of this process."""

    def watched(self, seconds: float) -> None:
        """The engine is watched from now on, for so many seconds. 0: it is not."""

    def message(self, message: Extension) -> bool:
        """A message of a feature. True: of this one."""
        return False

    def replies(self) -> Sequence[Extension]:
        """What the scheduler is to be told before the next result."""
        return ()

    def is_busy(self) -> bool:
        """Whether `replies` is to be asked again soon, although no message comes."""
        return False

    def ready(self) -> Sequence[Extension]:
        """What its other parts are told once the worker is ready."""
        return ()

    def warm_up(self) -> None:
        """Run once what no captured step holds. Nothing is in flight."""

    def close(self) -> None:
        """The worker ends. Nothing is in flight, and what was captured is still there."""


class Hooks:
    """The features that are attached, by name, and for each point the bound methods of those that override it."""

    def __init__(self, num_devices: int = 1) -> None:
        """`num_devices`: that run one model, each with hooks of its own."""
        self.by_name: dict[str, StepHook] = {}
        self.changed: list[Callable[[StepPlan], None]] = []
        self.runs_apart: list[Callable[[StepPlan], bool]] = []
        self.placed_step: list[Callable[[StepPlan], PlacedStep | None]] = []
        self.before_layers: list[Callable[[StepHandle], Iterable[Wait]]] = []
        self.before_decide: list[Callable[[StepHandle], Iterable[Wait]]] = []
        self.published: list[Callable[[StepHandle], None]] = []
        self.launched: list[Callable[[StepHandle], None]] = []
        self.serves: list[Callable[[Recorder], None]] = []
        self.watched: list[Callable[[float], None]] = []
        self.message: list[Callable[[Extension], bool]] = []
        self.replies: list[Callable[[], Sequence[Extension]]] = []
        self.is_busy: list[Callable[[], bool]] = []
        self.ready: list[Callable[[], Sequence[Extension]]] = []
        self.warm_up: list[Callable[[], None]] = []
        self.close: list[Callable[[], None]] = []
        self._num_devices = num_devices

    def add(self, name: str, hook: StepHook) -> None:
        """Attach a feature. Raises: ConfigError naming one that goes by time where several devices run the model."""
        if hook.timed and self._num_devices > 1:
            raise ConfigError("feature", f"{name} goes by time: ranks would do different work; use --tp-size 1")
        self.by_name[name] = hook
        for point, attached in vars(self).items():
            base = getattr(StepHook, point, None)
            if base is not None and getattr(type(hook), point) is not base:
                attached.append(getattr(hook, point))

    @property
    def stages(self) -> tuple[LogitStage, ...]:
        """Of all features, in their order."""
        return tuple(stage for hook in self.by_name.values() for stage in hook.stages)

    @property
    def outputs(self) -> tuple[RowOutput, ...]:
        """Of all features, in their order."""
        return tuple(output for hook in self.by_name.values() for output in hook.outputs)

    @property
    def columns(self) -> tuple[SlotColumns, ...]:
        """Of all features, in their order."""
        return tuple(hook.columns for hook in self.by_name.values() if hook.columns is not None)

    @property
    def warms_up(self) -> dict[str, Any]:
        """Fields of a request that asks for all features."""
        return {name: value for hook in self.by_name.values() for name, value in hook.warms_up.items()}

    @property
    def marks(self) -> ProfileMarks:
        """What receives the ends of a decode step's parts."""
        found = [hook.marks for hook in self.by_name.values() if hook.marks is not None]
        assert len(found) <= 1, "one feature can mark a step's parts"
        return found[0] if found else NO_MARKS

    @property
    def placed(self) -> PartKind | None:
        """What runs steps of a feature's own, if one has some."""
        found = [hook.placed for hook in self.by_name.values() if hook.placed is not None]
        assert len(found) <= 1, ONE_PLACED
        return found[0] if found else None

    def own_step(self, plan: StepPlan) -> PlacedStep | None:
        """The step as the feature lays it out that it is of; None: it is of requests."""
        if not plan.extensions:
            return None
        return next((step for placed_step in self.placed_step if (step := placed_step(plan)) is not None), None)

    def take(self, message: Extension) -> None:
        """Hand a message to the feature that it is of."""
        taken = any(take(message) for take in self.message)
        assert taken, f"no feature takes {type(message).__name__}"
