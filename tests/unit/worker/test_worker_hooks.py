"""Where features attach to the worker: what a hook is asked and told, in which order, and what it may do to a step."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.fakes import ScriptedProposer, TableModel
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.messages import (
    Extension,
    LivenessProbe,
    ResetSlot,
    Rows,
    SamplingParams,
    Shutdown,
    StepPlan,
    StepResult,
)
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.runtime.tracing import WORKER, LiveTrace, Recorder
from overlap_spec.sampling.stages import Decided
from overlap_spec.speculative.interfaces import SpecMethod
from overlap_spec.speculative.verifiers import ChainVerifier
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.devices import CpuDevice
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.hooks import Hooks, Needs, StepHook, Wait
from overlap_spec.worker.loop import Worker
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import NO_MARKS, NoMarks, StepHandle

TABLE = [(7 * token + 3) % 23 for token in range(23)]
WIDTH = 4
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Noting(StepHook):
    """Notes every point under its name. Its waits are over when they are looked at for the second time."""

    def __init__(self, name: str, noted: list[str], leaves_out: Sequence[int] = ()) -> None:
        self.name, self.noted, self.leaves_out = name, noted, leaves_out
        self.looks = 0

    def note(self, point: str) -> None:
        self.noted.append(f"{self.name} {point}")

    def changed(self, plan: StepPlan) -> None:
        self.note(f"changed {sorted(plan.resets)}")

    def before_layers(self, handle: StepHandle) -> Iterator[Wait]:
        self.note("waits for layers")
        yield self._second_look
        self.note("layers")

    def before_decide(self, handle: StepHandle) -> Iterator[Wait]:
        self.note("decide")
        if handle.plan.slots:
            for row in self.leaves_out:
                handle.leave_out(row)
        yield lambda: True

    def published(self, handle: StepHandle) -> None:
        self.note(f"published {handle.tokens()}")

    def close(self) -> None:
        self.note("close")

    def _second_look(self) -> bool:
        self.looks += 1
        return self.looks % 2 == 0


class Bench:
    """An executor over hand-computable parts with hooks, which notes also what is launched."""

    def __init__(self, *hooks: Callable[[list[str]], StepHook]) -> None:
        self.noted: list[str] = []
        self.model = TableModel(TABLE)
        self.slots = SlotRows(3, WIDTH, 16, no_processors(len(TABLE), page_size=4))
        proposer = ScriptedProposer(self.model, self.slots.window, WIDTH - 1)
        method = SpecMethod(proposer, ChainVerifier(torch.arange(len(TABLE))))
        steps = DecodeStep(self.slots, self.model, method, 4), PrefillStep(self.slots, self.model, method, 4)
        attached = Hooks()
        for index, make in enumerate(hooks):
            attached.add(str(index), make(self.noted))
        self.executor = Executor(CpuDevice(), self.slots, *steps, attached)
        self.model.forward = self._noting(self.model.forward)
        self.num_plans = 0

    def plan(self, *parts: SlotPart) -> StepPlan:
        self.num_plans += 1
        return plan_of(self.num_plans, list(parts), WIDTH)

    def prompt(self, slot: int) -> StepPlan:
        tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, slot))
        reset = ResetSlot(GREEDY, 3, (), 3)
        first = 1 + 5 * slot
        return self.plan(SlotPart(slot=slot, new_pages=list(range(first, first + 4)), tokens=tokens, reset=reset))

    def run(self, plan: StepPlan) -> list[list[int]]:
        return self.executor.launch(plan, lambda handle: self.noted.append("handed over")).wait().tokens

    def _noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.noted.append("layers run")
            return forward(*given)

        return run


def test_a_hook_is_asked_only_where_it_overrides_a_point() -> None:
    class Publishes(StepHook):
        def published(self, handle: StepHandle) -> None: ...

    hooks, publishes = Hooks(), Publishes()
    hooks.add("idle", StepHook())
    hooks.add("publishes", publishes)
    assert hooks.published == [publishes.published] and list(hooks.by_name) == ["idle", "publishes"]
    assert not (hooks.changed or hooks.before_layers or hooks.before_decide or hooks.runs_apart)
    assert not (hooks.launched or hooks.serves or hooks.watched)
    assert not (hooks.message or hooks.replies or hooks.is_busy or hooks.warm_up or hooks.close)


def test_points_of_a_step_come_in_order_and_hooks_in_that_of_the_table() -> None:
    bench = Bench(lambda noted: Noting("a", noted), lambda noted: Noting("b", noted))
    first = bench.run(bench.prompt(0))
    of_step = ["a waits for layers", "a layers", "b waits for layers", "b layers", "layers run", "a decide", "b decide"]
    published = [f"a published {first}", f"b published {first}", "handed over"]
    assert bench.noted == ["a changed [0]", "b changed [0]", *of_step, *published]
    bench.noted.clear()
    run = bench.run(bench.plan(SlotPart(slot=0)))
    assert bench.noted == [*of_step, f"a published {run}", f"b published {run}", "handed over"]
    bench.noted.clear()
    bench.executor.close()
    assert bench.noted == ["b close", "a close"]


def test_tokens_are_those_of_an_executor_without_hooks() -> None:
    found = []
    for hooks in ((), (lambda noted: Noting("a", noted),)):
        bench = Bench(*hooks)
        found.append([bench.run(bench.prompt(0)), *(bench.run(bench.plan(SlotPart(slot=0))) for _ in range(3))])
        bench.executor.close()
    assert found[0] == found[1]


def test_a_row_that_a_hook_leaves_out_commits_nothing_and_goes_on_with_the_same_window() -> None:
    bench = Bench(lambda noted: Noting("a", noted, leaves_out=(1,)))
    other = Bench()
    for each in (bench, other):
        each.run(each.prompt(0))
        each.run(each.prompt(1))
    before = bench.slots.window[0].tolist()
    first, late = bench.run(bench.plan(SlotPart(slot=1), SlotPart(slot=0)))
    assert late == [] and bench.slots.window[0].tolist() == before
    bench.executor.hooks.by_name["0"].leaves_out = ()
    in_time = other.run(other.plan(SlotPart(slot=1), SlotPart(slot=0)))
    assert first == in_time[0]
    then = other.run(other.plan(SlotPart(slot=1), SlotPart(slot=0)))
    assert bench.run(bench.plan(SlotPart(slot=1), SlotPart(slot=0))) == [then[0], in_time[1]]


def test_a_wait_before_the_layers_is_none_of_the_steps_work() -> None:
    bench = Bench(lambda noted: Noting("a", noted))
    marks: list[str] = []
    now = bench.executor.device.now

    def noted_now() -> Any:
        marks.append(bench.noted[-1] if bench.noted else "")
        return now()

    bench.executor.device.now = noted_now
    handle = bench.executor.launch(bench.prompt(0))
    assert marks == ["a changed [0]", "a waits for layers", f"a published {handle.tokens()}"]
    assert handle.host.waited > 0


class Told(Extension, frozen=True):
    """A message of the feature below."""


class Other(Extension, frozen=True):
    """A message of none."""


class Answers(StepHook):
    """Answers its message, or a step whose tokens have left."""

    def __init__(self) -> None:
        self.to_tell: list[Extension] = []

    def published(self, handle: StepHandle) -> None:
        self.to_tell.append(Told())

    def message(self, message: Extension) -> bool:
        if isinstance(message, Told):
            self.to_tell.append(message)
        return isinstance(message, Told)

    def replies(self) -> Sequence[Extension]:
        told, self.to_tell = self.to_tell, []
        return told


class Inbox:
    """One batch of messages for each look, and then the end."""

    def __init__(self, *batches: list[Any]) -> None:
        self.batches = deque(batches)

    def poll(self) -> list[Any]:
        return self.batches.popleft() if self.batches else [Shutdown(False)]

    def wait(self, timeout_s: float | None) -> None:
        pass


class Sent:
    """What the scheduler is sent."""

    def __init__(self) -> None:
        self.kinds: list[type] = []

    def send(self, message: Any) -> None:
        self.kinds.append(type(message))


def test_replies_leave_before_the_result_of_the_step_in_which_they_arose() -> None:
    bench, sent = Bench(lambda noted: Answers()), Sent()
    Worker(bench.executor, Inbox([bench.prompt(0)], []), sent, SpinPolicy(0.0)).run()
    assert sent.kinds == [Told, StepResult]


def test_a_message_is_taken_by_the_hook_that_it_is_of_and_no_other() -> None:
    bench, sent = Bench(lambda noted: StepHook(), lambda noted: Answers()), Sent()
    worker = Worker(bench.executor, Inbox([Told()], []), sent, SpinPolicy(0.0))
    worker.run()
    assert sent.kinds == [Told]
    with pytest.raises(AssertionError, match="no feature takes Other"):
        bench.executor.hooks.take(Other())


class Follows(StepHook):
    """Notes what the loop tells of steps."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def serves(self, trace: Recorder) -> None:
        self.noted.append(f"serves, {'traced' if trace.is_on else 'untraced'}")

    def watched(self, seconds: float) -> None:
        self.noted.append(f"watched {seconds}")

    def launched(self, handle: StepHandle) -> None:
        self.noted.append(f"launched {handle.plan.step_id}")


def test_the_loop_tells_that_it_begins_who_watches_and_what_is_launched() -> None:
    bench, trace = Bench(Follows), LiveTrace(WORKER)
    trace.watch(5.0)
    inbox = Inbox([LivenessProbe(2.0), bench.prompt(0)], [bench.plan(SlotPart(slot=0))], [])
    Worker(bench.executor, inbox, Sent(), SpinPolicy(0.0), trace).run()
    told = [line for line in bench.noted if line not in ("layers run", "handed over")]
    assert told == ["serves, traced", "watched 2.0", "launched 1", "launched 2"]


def test_hooks_close_while_what_was_captured_is_still_there() -> None:
    bench = Bench(lambda noted: Noting("a", noted))
    used = bench.executor.use
    bench.executor.use = lambda runner: (bench.noted.append("let go"), used(runner))
    bench.executor.close()
    assert bench.noted == ["a close", "let go"]


def test_one_hook_marks_the_parts_of_steps() -> None:
    hooks, marking = Hooks(), StepHook()
    assert hooks.marks is NO_MARKS
    marking.marks = NoMarks()
    hooks.add("marking", marking)
    assert hooks.marks is marking.marks
    hooks.add("also", marking)
    with pytest.raises(AssertionError, match="one feature can mark"):
        _ = hooks.marks


def test_a_hook_that_goes_by_time_is_refused_where_several_devices_run_a_model() -> None:
    class Timed(StepHook):
        timed = True

    Hooks().add("timed", Timed())
    Hooks(num_devices=2).add("untimed", StepHook())
    with pytest.raises(ConfigError, match="^--feature: timed goes by time: .*use --tp-size 1"):
        Hooks(num_devices=2).add("timed", Timed())


class Tags(Rows, frozen=True):
    """What the output below has given out."""

    tag: list[int]
    of_tokens: list[float]
    of_prompts: list[float]


class TagOutput:
    """Writes its tag for every token, and ten more for a prompt's."""

    name = "tag"

    def __init__(self, tag: int, is_asked: bool = True) -> None:
        self.tag, self.is_asked = tag, is_asked

    def asked(self, sampling: SamplingParams) -> bool:
        return self.is_asked

    def asking(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def write(self, logits: Tensor, decided: Decided) -> Tensor:
        return torch.full((decided.tokens.numel(), 1), float(self.tag), dtype=torch.float64)

    def write_prompts(self, logits: Any, hidden: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        return torch.full((len(tokens), 1), 10.0 + self.tag, dtype=torch.float64)

    def packer(self, slots: Sequence[int], prompt_counts: Sequence[int]) -> "TagOutput | None":
        return self if self.is_asked else None

    def pack(
        self, tokens: list[list[int]], longest: int, of_tokens: memoryview | None, of_prompts: memoryview | None
    ) -> Tags:
        blocks = [[] if block is None else list(block.cast("B").cast("d")) for block in (of_tokens, of_prompts)]
        return Tags([self.tag], *blocks)


def test_each_output_packs_its_own_block_whether_others_are_asked_for_or_not() -> None:
    class Gives(StepHook):
        outputs = (TagOutput(1, is_asked=False), TagOutput(2), TagOutput(3))

    bench = Bench(lambda noted: Gives())
    bench.slots.draw_through((), bench.executor.hooks.outputs)
    plan = bench.prompt(0)
    plan = replace(plan, chunks=[replace(chunk, rows_out=(0, 2)) for chunk in plan.chunks])
    found = bench.executor.launch(plan).wait().extensions
    assert [(each.tag, each.of_tokens, each.of_prompts) for each in found] == [
        ([2], [2.0], [12.0] * 2),
        ([3], [3.0], [13.0] * 2),
    ]
    goes_on = bench.prompt(1)
    goes_on = replace(goes_on, chunks=[replace(each, rows_out=(0, 2), next_token=4) for each in goes_on.chunks])
    found = bench.executor.launch(goes_on).wait().extensions
    assert [(each.of_tokens, each.of_prompts) for each in found] == [([], [12.0] * 2), ([], [13.0] * 2)]
    found = bench.executor.launch(bench.plan(SlotPart(slot=0))).wait().extensions
    assert [(each.tag, each.of_tokens, each.of_prompts) for each in found] == [
        ([2], [2.0] * WIDTH, []),
        ([3], [3.0] * WIDTH, []),
    ]


def test_a_step_is_a_features_own_if_its_hook_returns_it_and_plain_plans_are_not_asked_about() -> None:
    class Owns(StepHook):
        placed = "windows at given places"
        asked: list[int] = []

        def placed_step(self, plan: StepPlan) -> Any:
            self.asked.append(plan.step_id)
            return "own" if plan.step_id == 2 else None

    hooks = Hooks()
    hooks.add("idle", StepHook())
    hooks.add("owns", owns := Owns())
    plain, own, other = (plan_of(step, [], 1, extensions=(Told(),) if step > 1 else ()) for step in (1, 2, 3))
    assert [hooks.own_step(plan) for plan in (plain, own, other)] == [None, "own", None]
    assert owns.asked == [2, 3] and hooks.placed == "windows at given places"
    hooks.add("another", Owns())
    with pytest.raises(AssertionError, match="one feature"):
        assert hooks.placed


def test_needs_add_up_and_only_one_feature_has_slots_for_steps_of_its_own() -> None:
    masks, audits = Needs(column_bytes=8), Needs(2, placed_slots=3, placed_batches=(1, 3))
    assert masks + Needs() + audits == audits + masks == Needs(10, 3, (1, 3))
    with pytest.raises(AssertionError, match="one feature"):
        assert audits + audits


def test_what_features_have_for_their_other_parts_leaves_when_the_worker_is_ready() -> None:
    class Has(StepHook):
        def ready(self) -> tuple[Extension]:
            return (Told(),)

    hooks = Hooks()
    for name, hook in (("idle", StepHook()), ("one", Has()), ("other", Has())):
        hooks.add(name, hook)
    assert [ready() for ready in hooks.ready] == [(Told(),)] * 2
