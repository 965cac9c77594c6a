"""Runs plans, one step after another, on the device. Not here: sockets, and deciding what to run.

`launch` queues a step and returns; one thread takes the queue in order and enqueues each step's work. On CUDA
that thread never waits for the device; on a CPU it is the device. What a step needs of the one before it is in
the slot rows.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.messages import Phase, StepPlan, StepResult
from overlap_spec.models.interfaces import TargetModel
from overlap_spec.spec.interfaces import Prompts, SpecMethod
from overlap_spec.spec.rows import chunk_rows
from overlap_spec.spec.sampler import draw
from overlap_spec.worker.chunks import Chunks
from overlap_spec.worker.decode import Decoder, DecodeStep
from overlap_spec.worker.devices import Device, Download, Moment
from overlap_spec.worker.packing import Packer
from overlap_spec.worker.slots import SlotRows


@dataclass(frozen=True)
class Span:
    """A stretch of the device's time."""

    begin: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        """Both ends must have passed."""
        return self.end.since(self.begin)


@dataclass(frozen=True)
class Published:
    """Tokens on their way out. `worked`: this step so far, and what the step before did after its tokens left."""

    download: Download
    worked: tuple[Span, ...]


class StepHandle:
    """A launched step. Its tokens leave as soon as they are copied out, while the draft still works."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.started: Moment  # set when the launch thread takes it up
        self.published: Future[Published] = Future()
        self.finished: Future[None] = Future()  # the launch thread is done with the step

    def wait(self) -> StepResult:
        """Block until the tokens are on the host. Raises: what the step raised."""
        published = self.published.result()
        rows: list[list[int]] = published.download.wait().tolist()
        tokens = [[token for token in row[:-1] if token >= 0] for row in rows]
        seconds = sum(span.seconds for span in published.worked)
        return StepResult(self.plan.step_id, tokens, [row[-1] for row in rows], seconds)


class Executor:
    """The worker's one path for CPU and CUDA. `decoder` may be replaced before the first step, by one with graphs."""

    def __init__(
        self, device: Device, slots: SlotRows, target: TargetModel, method: SpecMethod, page_size: int
    ) -> None:
        self.slots = slots
        self.decode_step = DecodeStep(slots, target, method, page_size)
        self.decoder: Decoder = self.decode_step
        self._device = device
        self._target = target
        self._page_size = page_size
        self._token_ids = torch.arange(target.vocab_size, device=device.torch_device)
        self._decided = device.now()
        self._tail: tuple[Span, ...] = ()  # of the step before
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
                handle.started = self._device.now()
                step(handle)
                self._tail = (Span(self._decided, self._device.now()),)
        except BaseException as error:
            if not handle.published.done():
                handle.published.set_exception(error)
            handle.finished.set_exception(error)
        else:
            handle.finished.set_result(None)

    def _decode(self, handle: StepHandle) -> None:
        """Verify the window proposed by the step before, commit, publish, propose the next one."""
        plan = handle.plan
        (slots,) = self._load(plan, [work.slot for work in plan.work])
        verified = self.decoder.verify(slots, plan.width, self.slots.sampling_work(plan.work))
        self._publish(handle, verified.published[: len(plan.work)])  # tokens leave before the draft works
        self.decoder.draft(verified)

    def _prefill(self, handle: StepHandle) -> None:
        """Run prompt chunks; draw the first token of each prompt that they complete, and propose its first window."""
        plan, chunks = handle.plan, Chunks(handle.plan.work)
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

        batch = self.slots.batch(slots[completed], self.slots.sampling_work(chunks.completed_work()))
        published = torch.full((len(plan.work), 2), -1, dtype=torch.int64, device=tokens.device)
        published[:, 1] = 0  # no guesses in a prefill
        if chunks.completed:
            logits = self._target.logits(output.hidden[last_rows])[:, None]
            drawn = draw(logits, lengths[:, None], batch.sampling, self._token_ids).squeeze(1)
            published[completed, 0] = drawn
            next_tokens[last_rows] = drawn
        self._publish(handle, published)

        self.decode_step.method.proposer.prefill(Prompts(tokens, next_tokens, last_rows, batch.slots), rows, output)
        if chunks.completed:
            after = self.slots.start(batch, lengths, drawn)
            self.slots.set_guesses(after, self.decode_step.method.proposer.propose(after))

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

    def _publish(self, handle: StepHandle, published: Tensor) -> None:
        """Start the copy out. Shapes: [B, n + 1] i64: tokens padded with -1, then the number of guesses."""
        self._decided = self._device.now()
        worked = (Span(handle.started, self._decided), *self._tail)
        handle.published.set_result(Published(self._device.download(published), worked))
