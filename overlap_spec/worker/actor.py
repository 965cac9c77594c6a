"""The worker process: takes plans, launches them, sends results back in step order.

Not here: what a step is (`executor.py`) and what is in a plan (the scheduler). The worker decides nothing.
"""

import asyncio
from functools import partial
from typing import assert_never

import torch

from overlap_spec.actor import ActorContext
from overlap_spec.messages import Shutdown, StepPlan, ToScheduler, ToWorker, WorkerReady
from overlap_spec.transport import Inbox, Outlet
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor, StepHandle
from overlap_spec.worker.geometry import MAX_DEPTH, Geometry, LoadedModels
from overlap_spec.worker.warmup import ChunkSize, capture_graphs, cuda_prompt_lengths, measure_chunk, warm_up


class Worker:
    """Two tasks: one launches what arrives, the other publishes what is done."""

    def __init__(self, executor: Executor, inbox: Inbox[ToWorker], scheduler: Outlet[ToScheduler]) -> None:
        self._executor = executor
        self._inbox = inbox
        self._scheduler = scheduler
        self._launched: asyncio.Queue[StepHandle] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until Shutdown. Raises: what a step raised. Cancellation: steps in flight run to their end."""
        tasks = {asyncio.create_task(self._launch()), asyncio.create_task(self._publish())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _launch(self) -> None:
        while True:
            message = await self._inbox.recv()
            match message:
                case StepPlan():
                    self._launched.put_nowait(self._executor.launch(message))
                case Shutdown():
                    return
                case _:
                    assert_never(message)

    async def _publish(self) -> None:
        while True:
            handle = await self._launched.get()
            self._scheduler.send(await self._executor.result(handle))
            await asyncio.wrap_future(handle.finished)  # a draft that fails after its step's tokens left


def worker_ready(geometry: Geometry, models: LoadedModels, chunk: ChunkSize) -> WorkerReady:
    """What the scheduler needs to know."""
    return WorkerReady(
        num_slots=geometry.num_slots,
        num_pages=geometry.num_pages,
        page_size=geometry.page_size,
        max_len=geometry.max_len,
        width=geometry.width,
        max_depth=MAX_DEPTH,
        key_lookahead=models.method.key_lookahead,
        vocab_size=models.target.vocab_size,
        chunk_tokens=chunk.tokens,
        chunk_pairs=chunk.pairs,
    )


def device_name(device: str) -> str:
    """The device as a person would name it."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def _graph_fact(batch_sizes: tuple[int, ...], seconds: float) -> str:
    if not batch_sizes:
        return "none"
    return f"batches of 1 to {batch_sizes[-1]} ({len(batch_sizes)} sizes, captured in {seconds:.1f} s)"


async def main(context: ActorContext) -> None:
    """Load, warm up, say so, and work until told to stop."""
    settings = context.settings
    inbox, scheduler = context.inbox(ToWorker), context.outlet("scheduler")
    executor, geometry, models = build(settings, partial(context.progress, "loading weights"))
    try:
        context.progress("warming up", 0, 0)
        on_cpu = settings.model.device == "cpu"
        warm_up(executor, geometry, () if on_cpu else cuda_prompt_lengths(geometry))
        if settings.graph_batch_sizes:
            context.progress("capturing CUDA graphs", 0, 0)
        capture_s = capture_graphs(executor, geometry, settings.graph_batch_sizes)
        measured = on_cpu and settings.scheduler.chunk_tokens is None
        chunk = measure_chunk(executor, geometry) if measured else ChunkSize(geometry.max_chunk, 0)
        scheduler.send(worker_ready(geometry, models, chunk))
        context.ready(
            {
                "device": device_name(settings.model.device),
                "tokens": (geometry.num_pages - 1) * geometry.page_size,
                "pages": geometry.num_pages - 1,
                "page_size": geometry.page_size,
                "slots": geometry.num_slots,
                "chunk_tokens": chunk.tokens,
                "graphs": _graph_fact(settings.graph_batch_sizes, capture_s),
                "weights_mib": (models.target.num_bytes + models.proposer.num_bytes) >> 20,
            }
        )
        await Worker(executor, inbox, scheduler).run()
    finally:
        executor.close()
