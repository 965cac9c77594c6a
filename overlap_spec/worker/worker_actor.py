"""The worker process: loads, warms up, says so, then runs its loop."""

import time
from functools import partial

import torch

from overlap_spec.config import Settings, SpecSettings, synthetic_acceptance, waiting_fact
from overlap_spec.ipc.step_link import SpinPolicy
from overlap_spec.messages import Roofline, StepCosts, ToWorker, WorkerReady
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.runtime.machine import num_cores, processor_name
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.loop import Worker
from overlap_spec.worker.profile_marks import TimedMarks
from overlap_spec.worker.sizing.costs import roofline
from overlap_spec.worker.sizing.geometry import (
    MAX_DEPTH,
    Geometry,
    LoadedModels,
    bytes_per_token,
    demand_of,
    memory_facts,
)
from overlap_spec.worker.sizing.memory_budget import free_bytes
from overlap_spec.worker.sizing.start_costs import NO_COSTS, start_costs
from overlap_spec.worker.sizing.warmup import FEW_TOKENS, ChunkSize, capture_graphs, cuda_prompt_lengths, warm_up
from overlap_spec.worker.step_trace import NO_TRACER, DeviceTracer, StepTracer

NO_CEILING = Roofline()


def worker_ready(
    geometry: Geometry,
    models: LoadedModels,
    executor: Executor,
    chunk: ChunkSize,
    ceiling: Roofline = NO_CEILING,
    costs: StepCosts = NO_COSTS,
) -> WorkerReady:
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
        step_costs=costs,
        max_deferred=0 if executor.is_self_drafting else geometry.max_deferred,
        roofline=ceiling,
        is_self_drafting=executor.is_self_drafting,
    )


def device_name(device: str) -> str:
    """The device as a person would name it."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def _cpu_facts(settings: Settings, models: LoadedModels) -> dict[str, str]:
    """What a figure of this machine depends on, and what was chosen for it."""
    return {
        "processor": f"{processor_name()}, {num_cores()} cores",
        "threads": f"{torch.get_num_threads()}, {waiting_fact()}",
        "linears": models.linears,
    }


def _graph_fact(batch_sizes: tuple[int, ...], seconds: float) -> str:
    if not batch_sizes:
        return "none"
    return f"batches of 1 to {batch_sizes[-1]} ({len(batch_sizes)} sizes, captured in {seconds:.1f} s)"


def _start_fact(batch_sizes: tuple[int, ...], seconds: float, of_captures: float) -> str:
    said = f"{seconds:.1f} s"
    return f"{said}, {seconds - of_captures:.1f} s without captures" if batch_sizes else said


def _ceilings_fact(ceiling: Roofline) -> str:
    flop = f"{ceiling.flop_per_s / 1e12:.3g} TFLOP/s" if ceiling.flop_per_s else "FLOP/s not known"
    return f"{ceiling.bytes_per_s / 1e9:.0f} GB/s, {flop}"


def _acceptance_fact(spec: SpecSettings) -> str:
    mean = spec.simulated_accept_len
    return "real" if mean is None else synthetic_acceptance(mean)


async def main(context: ActorContext) -> None:
    """Load, warm up, say so, and work until told to stop. Blocks its event loop, which has nothing else to do."""
    begun = time.perf_counter()
    settings = context.settings
    inbox, scheduler = context.step_inbox(ToWorker), context.outlet("scheduler")
    executor, geometry, models = build(settings, partial(context.progress, "loading weights"), measured=True)
    if settings.trace_dir is not None:
        executor.decode_step.parts = TimedMarks(executor.device)
    context.progress("warming up", 0, 0)
    on_cpu = settings.model.device == "cpu"
    warm_up(executor, geometry, *(((), FEW_TOKENS) if on_cpu else (cuda_prompt_lengths(geometry),)))
    if settings.graph_batch_sizes:
        context.progress("capturing CUDA graphs", 0, 0)
    free = free_bytes(settings.model.device)
    capture_s = capture_graphs(executor, geometry, settings.graph_batch_sizes)
    graph_bytes = free - free_bytes(settings.model.device)
    measured = start_costs(settings, executor, geometry)
    ceiling = roofline(models, geometry.dtype, torch.device(settings.model.device), measured.ceiling)
    executor.forget()  # what was said to warm up
    scheduler.send(worker_ready(geometry, models, executor, measured.chunk, ceiling, measured.steps))
    started_s = time.perf_counter() - begun
    context.ready(
        {
            "device": device_name(settings.model.device),
            "tokens": (geometry.num_pages - 1) * geometry.page_size,
            "pages": geometry.num_pages - 1,
            "page_size": geometry.page_size,
            "slots": geometry.num_slots,
            "chunk_tokens": measured.chunk.tokens,
            **(_cpu_facts(settings, models) if on_cpu else {}),
            "graphs": _graph_fact(settings.graph_batch_sizes, capture_s),
            "step_widths": " ".join(str(width) for width in geometry.step_widths),
            "start_up": _start_fact(settings.graph_batch_sizes, started_s, capture_s),
            "ceilings": _ceilings_fact(ceiling),
            "verification": str(settings.spec.accept) if geometry.width > 1 else "none",
            "acceptance": _acceptance_fact(settings.spec),
            **({} if on_cpu else memory_facts(demand_of(settings, models), graph_bytes)),
            "weights_mib": (models.target.num_bytes + models.proposer.profile.num_bytes) >> 20,
            "draft_weights_mib": models.proposer.profile.num_bytes >> 20,
            "kv_bytes_per_token": bytes_per_token(models, geometry.dtype),
            "draft_kv_bytes_per_token": models.proposer.profile.kv_shape.bytes_per_token(geometry.dtype),
        }
    )
    tracer = _step_tracer(context, executor)
    Worker(executor, inbox, context.step_outlet("scheduler"), SpinPolicy(settings.spin_s), tracer).run()
    tracer.finish()
    executor.close()


def _step_tracer(context: ActorContext, executor: Executor) -> StepTracer:
    if context.settings.trace_dir is None:
        return NO_TRACER
    return DeviceTracer(context.trace, executor.device, executor.decode_step.parts)
