"""Graphs of some sizes for an executor, without those of an engine's other steps, and a count of what is run."""

from collections.abc import Callable, Sequence

from torch import Tensor

from overlap_spec.messages import TwoPartSizes
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.graphs import GraphRunner, GraphSizes, Reach
from overlap_spec.worker.runner import Part, Runner
from overlap_spec.worker.startup.warmup import graph_runner
from overlap_spec.worker.step import PromptShape, StepShape


def runner_of(
    executor: Executor,
    batches: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
    prompts: Sequence[PromptShape] = (),
    beside: TwoPartSizes | None = None,
    hides_rare: bool = False,
) -> GraphRunner:
    """Not captured yet. `widths`: of windows; (): whole ones. The last one: see `GraphSizes`."""
    slots, step = executor.slots, executor.decode_step
    widths = widths or (slots.width,)
    sizes = GraphSizes(
        width=slots.width,
        reach=Reach(slots.num_pages, slots.width, step.page_size, step.method.tree is not None),
        batches=batches,
        widths=widths,
        absorbs_later=widths[0] == 1 < slots.width and not executor.is_self_drafting,
        prompts=tuple(prompts),
        beside=beside,
        hides_rare=hides_rare,
        reads_last=executor.prefill_step.reads_last,
    )
    return graph_runner(executor, sizes)


class CountingRunner:
    """Counts the steps whose windows and prompts run together."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_together = 0

    def shape_for(self, exact: StepShape, most_pages: Callable[[], int]) -> StepShape | None:
        return self._runner.shape_for(exact, most_pages)

    def replays(self, shape: StepShape) -> bool:
        return self._runner.replays(shape)

    def forward(self, shape: StepShape, *inputs: Tensor) -> tuple[Part, ...]:
        self.num_together += len(inputs) == 2
        return self._runner.forward(shape, *inputs)

    def absorb_missed(self, slots: Tensor, counts: Tensor, most: int) -> None:
        self._runner.absorb_missed(slots, counts, most)


def counted(executor: Executor) -> CountingRunner:
    """Count what an executor runs from now on."""
    runner = CountingRunner(executor.runner)
    executor.use(runner)
    return runner
