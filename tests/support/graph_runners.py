"""Graphs of some sizes for an executor, without those of an engine's other steps."""

from collections.abc import Sequence

from overlap_spec.messages import TwoPartSizes
from overlap_spec.worker.chunks import PromptShape
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.graph_sizes import SHORT_BATCH, GraphSizes, Reach
from overlap_spec.worker.graphs import GraphRunner
from overlap_spec.worker.startup.warmup import graph_runner


def runner_of(
    executor: Executor,
    batches: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
    prompts: Sequence[PromptShape] = (),
    beside: TwoPartSizes | None = None,
) -> GraphRunner:
    """Not captured yet. `widths`: of windows; (): whole ones."""
    slots, step = executor.slots, executor.decode_step
    widths = widths or (slots.width,)
    sizes = GraphSizes(
        width=slots.width,
        reach=Reach(slots.num_pages, slots.width, step.page_size, 0 if step.method.tree else SHORT_BATCH),
        batches=batches,
        widths=widths,
        absorbs_later=widths[0] == 1 < slots.width and not executor.is_self_drafting,
        prompts=tuple(prompts),
        beside=beside,
        reads_last=executor.prefill_step.reads_last,
    )
    return graph_runner(executor, sizes)
