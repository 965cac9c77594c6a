"""The sizes that everything in the worker agrees on, settled once the weights are in memory."""

from dataclasses import dataclass

import torch

from overlap_spec.config import Settings
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.spec.methods import LoadedProposer, Method
from overlap_spec.worker.memory import Budget, cpu_budget, cuda_budget, num_pages, workspace_bytes

MAX_DEPTH = 2  # steps in flight that tables and rings are made for
GPU_CHUNK_TOKENS = 8192  # SGLang's default for GPUs of this class
MAX_DEFERRED = 16  # draft rows that one forward catches up with: enough to make its launches and weights cheap
MIN_REQUEST_TOKENS = 16  # a pool must at least run a request of this many tokens


@dataclass(frozen=True)
class LoadedModels:
    """Weights in memory, before any cache."""

    target: LoadedTarget
    proposer: LoadedProposer
    method: Method


@dataclass(frozen=True)
class Geometry:
    """Slots, window, pages and positions."""

    num_slots: int
    width: int
    page_size: int
    max_len: int
    num_pages: int
    max_chunk: int  # prompt tokens in a prefill step, at most
    dtype: torch.dtype
    narrower: tuple[int, ...] = ()  # widths below `width` that steps may have too, ascending

    @property
    def step_widths(self) -> tuple[int, ...]:
        """Every width that a step may have, ascending."""
        return (*self.narrower, self.width)

    @property
    def max_deferred(self) -> int:
        """Draft rows that steps of width 1 may leave unabsorbed; 0 where there are no such steps, or no draft."""
        return MAX_DEFERRED if 1 in self.narrower else 0

    @property
    def num_positions(self) -> int:
        """Positions that rows may take: steps in flight run past the last token, and the next window past them."""
        return self.max_len + (MAX_DEPTH + 1) * self.width

    @property
    def num_page_columns(self) -> int:
        """Pages in a slot's row."""
        return -(-self.num_positions // self.page_size)


def settle_geometry(settings: Settings, models: LoadedModels, device: torch.device) -> Geometry:
    """Size the KV pool from what is left. Raises: ConfigError saying what is missing and which flag to turn."""
    dtype = torch_dtype(settings.model.dtype)
    width = settings.spec.width
    per_token = models.target.kv_shape.bytes_per_token(dtype) + models.proposer.kv_shape.bytes_per_token(dtype)
    chunk = _max_chunk(settings)
    budget = _budget(settings, models, device, chunk * models.target.hidden_size * dtype.itemsize)
    return Geometry(
        num_slots=settings.scheduler.max_running_requests,
        width=width,
        page_size=settings.cache.page_size,
        max_len=settings.model.max_len,
        num_pages=num_pages(settings.cache, per_token, budget, MIN_REQUEST_TOKENS + 3 * width),
        max_chunk=chunk,
        dtype=dtype,
        narrower=settings.spec.narrower,
    )


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16, .. by name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _budget(settings: Settings, models: LoadedModels, device: torch.device, chunk_bytes: int) -> Budget:
    if device.type == "cpu":
        return cpu_budget(settings.cache, models.target.num_bytes + models.proposer.num_bytes)
    rows = settings.scheduler.max_running_requests * settings.spec.width
    return cuda_budget(settings.cache, workspace_bytes(rows * models.target.vocab_size, chunk_bytes))


def _max_chunk(settings: Settings) -> int:
    asked = settings.scheduler.chunk_tokens
    if asked == -1:
        return settings.model.max_len
    return min(asked or GPU_CHUNK_TOKENS, settings.model.max_len)
