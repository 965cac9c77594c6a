"""Runs plans, one step after another, on the device. Not here: sockets, and deciding what to run.

`launch` queues a step and returns; one thread takes the queue in order and enqueues each step's work. On CUDA
that thread never waits for the device; on a CPU it is the device. What a step needs of the one before it is in
the slot rows.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from overlap_spec.messages import Phase, StepPlan, StepResult
from overlap_spec.models.interfaces import TargetModel
from overlap_spec.spec.interfaces import Prompts, SpecMethod
from overlap_spec.spec.rows import chunk_rows, window_rows
from overlap_spec.spec.sampler import draw
from overlap_spec.spec.types import Window
from overlap_spec.worker.chunks import Chunks
from overlap_spec.worker.devices import Device, Download, Moment
from overlap_spec.worker.packing import Packer
from overlap_spec.worker.slots import SlotRows


class StepHandle:
    """A launched step. Its tokens leave as soon as they are copied out, while the draft still works."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.published: Future[tuple[Download, Moment, Moment]] = Future()
        self.finished: Future[None] = Future()  # the launch thread is done with the step

    def wait(self) -> StepResult:
        """Block until the tokens are on the host. Raises: what the step raised."""
        download, started, decided = self.published.result()
        rows: list[list[int]] = download.wait().tolist()
        tokens = [[token for token in row[:-1] if token >= 0] for row in rows]
        return StepResult(self.plan.step_id, tokens, [row[-1] for row in rows], decided.since(started))


class Executor:
    """The worker's one path for CPU and CUDA."""

    def __init__(
        self, device: Device, slots: SlotRows, target: TargetModel, method: SpecMethod, page_size: int
    ) -> None:
        self._device = device
        self.slots = slots
        self._target = target
        self.method = method
        self._page_size = page_size
        self._token_ids = torch.arange(target.vocab_size, device=device.torch_device)
        self._launcher = ThreadPoolExecutor(1, "launch")
        self._waiter = ThreadPoolExecutor(1, "results")

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue a step. Sync: never; exceptions arrive at the handle."""
        handle = StepHandle(plan)
        self._launcher.submit(self._run, handle)
        return handle

    async def result(self, handle: StepHandle) -> StepResult:
        """Wait for a step's tokens in a thread. Cancellation: the step runs on, its result is lost."""
        return await asyncio.get_running_loop().run_in_executor(self._waiter, handle.wait)

    def close(self) -> None:
        """Finish what is queued and stop the threads."""
        self._launcher.shutdown()
        self._waiter.shutdown()

    def _run(self, handle: StepHandle) -> None:
        step = self._decode if handle.plan.phase is Phase.DECODE else self._prefill
        try:
            with torch.inference_mode():
                step(handle)
        except BaseException as error:
            if not handle.published.done():
                handle.published.set_exception(error)
            handle.finished.set_exception(error)
        else:
            handle.finished.set_result(None)

    def _decode(self, handle: StepHandle) -> None:
        """Verify the window proposed by the step before, commit, publish, propose the next one."""
        plan, started = handle.plan, self._device.now()
        (slots,) = self._load(plan, [work.slot for work in plan.work])
        batch = self.slots.batch(slots, plan.work)
        window = Window(self.slots.window[slots, : plan.width])

        rows = window_rows(batch, plan.width, self._page_size)
        output = self._target.forward(window.tokens.clamp(min=0).reshape(-1), rows)
        logits = self._target.logits(output.hidden).view(len(plan.work), plan.width, -1)
        verdict = self.method.verifier.verify(window, logits, batch)
        after = self.slots.commit(batch, verdict)
        self._publish(handle, started, verdict.tokens, window.num_proposed)  # tokens leave before the draft works

        self.method.proposer.extend(batch, rows, output, verdict)
        self.slots.set_guesses(after, self.method.proposer.propose(after))

    def _prefill(self, handle: StepHandle) -> None:
        """Run prompt chunks; draw the first token of each prompt that they complete, and propose its first window."""
        plan, started, chunks = handle.plan, self._device.now(), Chunks(handle.plan.work)
        slots, tokens, next_tokens, positions, owners, row_starts, completed, last_rows, lengths = self._load(
            plan,
            [work.slot for work in plan.work],
            chunks.tokens(),
            chunks.next_tokens(),
            chunks.positions(),
            chunks.owners(),
            chunks.row_starts,
            chunks.completed,
            chunks.last_rows(),
            chunks.lengths(),
        )
        page_table = self.slots.page_table[slots]
        rows = chunk_rows(page_table, owners, positions, row_starts, chunks.longest, self._page_size)
        output = self._target.forward(tokens, rows)

        batch = self.slots.batch(slots[completed], chunks.completed_work())
        published = torch.full((len(plan.work), 1), -1, dtype=torch.int64, device=tokens.device)
        if chunks.completed:
            logits = self._target.logits(output.hidden[last_rows])[:, None]
            drawn = draw(logits, lengths[:, None], batch.sampling, self._token_ids).squeeze(1)
            published[completed, 0] = drawn
            next_tokens[last_rows] = drawn
        self._publish(handle, started, published, torch.zeros_like(published[:, 0]))

        self.method.proposer.prefill(Prompts(tokens, next_tokens, last_rows, batch.slots), rows, output)
        if chunks.completed:
            after = self.slots.start(batch, lengths, drawn)
            self.slots.set_guesses(after, self.method.proposer.propose(after))

    def _load(self, plan: StepPlan, *runs: Iterable[int]) -> list[Tensor]:
        """Copy the step's integers in, write resets and pages into the slot rows, return `runs` on the device."""
        packer = Packer()
        packer.add(value for work in plan.work for value in self.slots.pack_reset(work))
        packer.add(value for work in plan.work for value in self.slots.pack_pages(work))
        for run in runs:
            packer.add(run)
        resets, pages, *loaded = packer.upload(self._device)
        self.slots.apply(resets, pages)
        return loaded

    def _publish(self, handle: StepHandle, started: Moment, tokens: Tensor, num_proposed: Tensor) -> None:
        """Start the copy out. Shapes: tokens [B, W] i64 padded with -1, num_proposed [B] i64."""
        decided = self._device.now()
        packed = torch.cat((tokens, num_proposed[:, None]), 1)
        handle.published.set_result((self._device.download(packed), started, decided))
