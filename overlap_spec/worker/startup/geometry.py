"""The sizes that everything in the worker agrees on, settled once the weights are in memory.

Of weights in 8 or 4 bits the start table tells their format, or that they were dequantised.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import msgspec
import torch
from overlap_spec_kernels import Float4Matrices, GroupedKernel, QuantizedStack, runs_gluon
from overlap_spec_kernels.attention.chunk_attention import CUTS
from overlap_spec_kernels.attention.latent_attention import MOST_SCRATCH_BYTES

from overlap_spec import features
from overlap_spec.config import Settings
from overlap_spec.config.quantization import QuantizationScheme
from overlap_spec.errors import ConfigError
from overlap_spec.hub.config_values import read_config
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.messages import CudaFacts, TwoPartSizes
from overlap_spec.models.interfaces import DraftProfile, LoadedTarget
from overlap_spec.models.layers.linear_forms import linears_of
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.models.recurrent_state import CHUNK
from overlap_spec.sampling.context import POOL_TOKEN_BYTES
from overlap_spec.speculative.drafts import LoadedProposer
from overlap_spec.speculative.interfaces import ABSORBED_ROWS
from overlap_spec.speculative.methods import Method
from overlap_spec.worker.graphs import two_part_sizes
from overlap_spec.worker.hooks import Needs
from overlap_spec.worker.ranks import Agreement
from overlap_spec.worker.startup.memory_budget import (
    CPU_POOL_BYTES,
    Budget,
    Demand,
    GpuMemory,
    cpu_budget,
    cuda_budget,
    num_pages,
    savings,
)

MAX_DEPTH = 2  # steps in flight, at most: tables and rings have room for so many
GPU_CHUNK_TOKENS = 8192  # SGLang's default for GPUs of this class
TORCH_CHUNK_TOKENS = 512  # less, because attention in torch holds a number for every head, row and key
GRAPH_FLOP = 2 * 10**13  # of the layers in a captured prefill step: with more, they take longer than their launches
PAYING_ROWS = 512  # of a step of trees with more columns than a path has, at most: see `largest_batches`
PAYING_FLOP, PAYING_INTENSITY = 7 * 10**12, 480  # of its layers, and for each byte of weights, where that is more rows
MAX_DEFERRED = 64  # draft rows that a slot may leave behind: answers that end before never pay for them
DEFERRED_SHARE = 1 / 64  # of the memory for KV pages, which what these rows are made of takes at most
RECURRENT_STATES, SNAPSHOTS = "of recurrent states", "of their snapshots"  # in tables of memory
MIN_REQUEST_TOKENS = 16  # a pool must at least run a request of this many tokens


@dataclass(frozen=True)
class LoadedModels:
    """Weights in memory, before any cache."""

    target: LoadedTarget
    proposer: LoadedProposer
    method: Method
    linears: str = "as loaded"  # the forms that were chosen for them
    kernel: GroupedKernel | None = None  # of a CPU, where weights keep their bits


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
    placed_slots: int = 0  # that steps of a feature's own have beside those of requests (`Needs`)
    placed_batches: tuple[int, ...] = ()  # how many slots such steps are padded to, ascending
    batch_rows: int = 0  # prompt tokens of a step with many requests that is captured, at most
    kv_dtype: torch.dtype | None = None  # of the KV pages; None: `dtype`
    two_parts: TwoPartSizes | None = None  # that are captured; None: steps of both have any size, and no graph
    most_deferred: int = MAX_DEFERRED  # draft rows of a slot that there is room for
    num_snapshots: int = 0  # of recurrent states, for the prefix cache
    largest: tuple[int, ...] = ()  # batch that steps of each width have; (): any
    has_drawn: bool = False  # output is computed again as windows are, in steps of its own

    @property
    def step_widths(self) -> tuple[int, ...]:
        """Every width that a step may have, ascending."""
        return (*self.narrower, self.width)

    def largest_batch(self, width: int) -> int:
        """Of steps of this width."""
        return self.largest[self.step_widths.index(width)] if self.largest else self.num_slots

    @property
    def cache_dtype(self) -> torch.dtype:
        """What KV pages hold, those of the draft too."""
        return self.kv_dtype or self.dtype

    @property
    def pages(self) -> tuple[int, int, torch.dtype]:
        """Number, size and format of KV pages."""
        return self.num_pages, self.page_size, self.cache_dtype

    @property
    def max_deferred(self) -> int:
        """Draft rows that steps of width 1 may leave unabsorbed; 0 where there are no such steps."""
        return self.most_deferred if 1 in self.narrower else 0

    @property
    def num_positions(self) -> int:
        """Positions that rows may take: steps in flight run past the last token, and the next window past them."""
        return self.max_len + (MAX_DEPTH + 1) * self.width

    @property
    def num_page_columns(self) -> int:
        """Pages in a slot's row."""
        return -(-self.num_positions // self.page_size)


def settle_geometry(
    settings: Settings, models: LoadedModels, device: torch.device, memory: GpuMemory | None = None
) -> Geometry:
    """Size the KV pool from what is left. `memory`: of a GPU that is not the one here.

    Raises: ConfigError saying what is missing and which flag to turn.
    """
    dtype = torch_dtype(settings.model.dtype)
    width = settings.spec.width
    demand, needs = demand_of(settings, models), needs_of(settings, models)
    budget = _budget(settings, demand, device, memory)
    deferred, room = _deferred(settings, demand, models.proposer.profile, budget)
    snapshots = num_snapshots(settings, models, budget, device, demand.states)
    if device.type != "cpu":
        budget = budget.less(room, "draft rows that wait")
        budget = budget.less(snapshots * demand.state, "snapshots of recurrent states")
    row_flop = max(models.target.work.row_flop, 1)
    pages = num_pages(settings.cache, demand.per_token, budget, MIN_REQUEST_TOKENS + 3 * width)
    return Geometry(
        num_slots=settings.scheduler.max_running_requests,
        width=width,
        page_size=settings.cache.page_size,
        max_len=settings.model.max_len,
        num_pages=pages,
        max_chunk=demand.chunk,
        dtype=dtype,
        narrower=settings.spec.narrower,
        placed_slots=needs.placed_slots,
        placed_batches=needs.placed_batches,
        batch_rows=GRAPH_FLOP // row_flop,
        kv_dtype=kv_dtype_of(settings),
        two_parts=two_parts_of(settings, demand.chunk, row_flop),
        most_deferred=deferred,
        largest=largest_batches(settings, models),
        has_drawn=settings.model.deterministic and models.target.kv_shape.state.num_layers > 0,
        num_snapshots=min(snapshots, max(pages * settings.cache.page_size // CHUNK, 1)),
    )


def largest_batches(settings: Settings, models: LoadedModels) -> tuple[int, ...]:
    """The batches up to which steps of each width may pay; (): any batch, as widths are not chosen by what they take.

    With half of `PAYING_ROWS` a dense model's products take longer than reading its weights: a step twice as wide takes
    nearly twice as long, but a tree whose longest path has fewer tokens than its window has columns does not commit
    twice as many. So nothing is captured for such steps. Small models are not bound by products, and with experts more
    rows share what is read. A power of two, as classes of batch sizes end there.
    """
    spec, scheduler, tree = settings.spec, settings.scheduler, models.proposer.profile.tree
    fixed = not spec.narrower or scheduler.width_rules or scheduler.keeps_width or settings.model.device == "cpu"
    if fixed or tree is None or tree.branch:  # looked-up guesses may be right to the end of a window
        return ()
    work, most = models.target.work, scheduler.max_running_requests
    rows = max(PAYING_ROWS, max(PAYING_FLOP, PAYING_INTENSITY * work.weight_bytes) // max(work.row_flop, 1))
    widths = (*spec.narrower, spec.width)
    return tuple(
        most if width <= tree.num_levels + 1 else min(1 << max(rows // width, 1).bit_length() - 1, most)
        for width in widths
    )


def num_snapshots(settings: Settings, models: LoadedModels, budget: Budget, device: torch.device, of_slots: int) -> int:
    """Snapshots of recurrent states for the prefix cache; 0 where no layer recurs, or without the cache.

    `budget`: what is left beside `of_slots`, the bytes of slots' states. On a CPU they take a share of another GiB.
    Raises: ConfigError if there is no room for one.
    """
    shape, cache, dtype = models.target.kv_shape, settings.cache, torch_dtype(settings.model.dtype)
    slots = settings.scheduler.max_running_requests
    if not (cache.prefix_cache and shape.state.num_layers):
        return 0
    if cache.max_states is not None:
        return cache.max_states - slots
    each, total = shape.state.bytes_per_state(dtype), CPU_POOL_BYTES
    if device.type == "cpu":
        of_slots = 0
    else:
        total = budget.num_bytes + of_slots
    share = int(total * cache.state_ratio / (1 + cache.state_ratio))
    if share < of_slots + each:
        beside = f" beside {of_slots} bytes of {slots} slots' states" if of_slots else ""
        raise ConfigError(
            "mamba_full_memory_ratio",
            f"{cache.state_ratio:g} leaves {share} bytes to recurrent states, and a snapshot takes {each}{beside};"
            " raise it, lower --max-running-requests, or use --disable-radix-cache",
        )
    return (share - of_slots) // each


class Sizes(msgspec.Struct, frozen=True):
    """What a rank has found by what is free in its memory, and by what its part of the layers computes."""

    num_pages: int
    most_deferred: int
    batch_rows: int
    two_parts: TwoPartSizes | None
    largest: tuple[int, ...]


def agreed_geometry(own: Geometry, agreement: Agreement) -> Geometry:
    """The sizes of all ranks: what each of them has memory for, and what rank 0 captures."""
    sizes = Sizes(own.num_pages, own.most_deferred, own.batch_rows, own.two_parts, own.largest)
    found = agreement.gathered("sizes", sizes, Sizes)
    return replace(
        own,
        num_pages=min(each.num_pages for each in found),
        most_deferred=min(each.most_deferred for each in found),
        batch_rows=found[0].batch_rows,
        two_parts=found[0].two_parts,
        largest=found[0].largest,
    )


def _deferred(settings: Settings, demand: Demand, profile: DraftProfile, budget: Budget) -> tuple[int, int]:
    """How many draft rows a slot may leave behind: whole catch-ups, one at least; and the bytes of all slots' rows."""
    if 1 not in settings.spec.narrower:
        return 0, 0
    row = (demand.max_running_requests + 1) * profile.features_size(demand.hidden_size) * demand.itemsize
    fitting = int(DEFERRED_SHARE * budget.num_bytes) // max(row, 1) // ABSORBED_ROWS * ABSORBED_ROWS
    rows = min(max(fitting, ABSORBED_ROWS), MAX_DEFERRED)
    return rows, rows * row


def two_parts_of(settings: Settings, max_chunk: int, row_flop: int) -> TwoPartSizes | None:
    """What is captured of steps of windows and prompts; None where none is.

    Of several widths, the narrowest: as many prompts fit beside it as in plain decoding.
    """
    scheduler, width = settings.scheduler, next(iter(settings.spec.narrower), settings.spec.width)
    if not (settings.graph_batch_sizes and scheduler.windows_with_prompts):
        return None
    most_rows = GRAPH_FLOP // row_flop
    return two_part_sizes(width, scheduler.max_running_requests, max_chunk, row_flop, most_rows)


def needs_of(settings: Settings, models: LoadedModels) -> Needs:
    """What features take, all together."""
    attached = features.modules(features.WORKER, settings.features)
    asked = (getattr(module, "needs", None) for module in attached)
    return sum((needs(settings, models) for needs in asked if needs is not None), Needs())


def bytes_per_token(models: LoadedModels, dtype: torch.dtype) -> int:
    """What a token takes in the caches of target and draft together."""
    return models.target.kv_shape.bytes_per_token(dtype) + models.proposer.profile.kv_shape.bytes_per_token(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16, .. by name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def kv_dtype_of(settings: Settings) -> torch.dtype:
    """What KV pages hold."""
    return torch_dtype(settings.cache.kv_dtype or settings.model.dtype)


def demand_of(settings: Settings, models: LoadedModels) -> Demand:
    """What these models and settings take of memory beside pages, and for each token of them."""
    target, draft, dtype = models.target, models.proposer.profile, torch_dtype(settings.model.dtype)
    kv_dtype = kv_dtype_of(settings)
    chunk, needs = _max_chunk(settings), needs_of(settings, models)
    return Demand(
        target_weights=target.num_bytes,
        draft_weights=draft.num_bytes - draft.log.num_bytes,
        target_kv=target.kv_shape.bytes_per_token(kv_dtype),
        draft_kv=draft.kv_shape.bytes_per_token(kv_dtype),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        itemsize=dtype.itemsize,
        kv_itemsize=kv_dtype.itemsize,
        max_running_requests=settings.scheduler.max_running_requests,
        width=settings.spec.width,
        chunk=chunk,
        scratch_rows=draft.scratch_rows,
        draft_log=draft.log,
        token_bytes=POOL_TOKEN_BYTES,
        level_rows=draft.step_rows,
        block_flag="" if draft.block is None else draft.block.flag,
        is_tree=draft.tree is not None,
        branch=0 if draft.tree is None else draft.tree.branch,
        branch_flag="" if draft.tree is None else draft.tree.branch_flag,
        history=settings.model.max_len if settings.logit_processor else 0,
        column_bytes=needs.column_bytes,
        slot_bytes=needs.slot_bytes,
        feature_bytes=needs.num_bytes,
        drawn_from=draft.draft_vocab_size if settings.spec.accept.rejection else 0,
        gathered_keys=CUTS.most_gathered(chunk, settings.model.max_len),
        **_roundable(settings, models),
        attention_scratch=sum(
            MOST_SCRATCH_BYTES for shape in (target.kv_shape, draft.kv_shape) if shape.latent_rank is not None
        ),
        layer_kv=max(shape.bytes_per_layer(dtype) for shape in (target.kv_shape, draft.kv_shape)),
        state=target.kv_shape.bytes_per_slot(0, dtype),
        state_column=target.kv_shape.state.bytes_per_column(dtype),
        placed_slots=needs.placed_slots,
    )


def _roundable(settings: Settings, models: LoadedModels) -> dict[str, int]:
    """The linears that --quantization fp8 would round, where there are kernels for them: none of the head."""
    model, head = settings.model, models.target.head
    rounded = model.files.quantization is not None or model.files.config.get("quantization_config") is not None
    if rounded or model.dtype != "bfloat16" or not runs_gluon(head.device):
        return {}
    sizes = [linear.num_bytes for linear in linears_of(models.target) if linear is not head]
    return {"roundable": sum(sizes), "widest": max(sizes, default=0)}


def memory_facts(demand: Demand, graph_bytes: int) -> CudaFacts:
    """What memory holds, and what gives some of it back."""
    held = {
        "of target weights": demand.target_weights,
        "of draft weights": demand.draft_weights,
        "of the draft's log": demand.draft_log.num_bytes,
        "of workspace": demand.workspace,
        "for trees": demand.scratch,
        "of draft probabilities": demand.draft_probs,
        RECURRENT_STATES: demand.states,
        "of features": demand.kept,
        "of CUDA graphs": graph_bytes,
    }
    return CudaFacts(
        held_bytes={purpose: num_bytes for purpose, num_bytes in held.items() if num_bytes},
        kv_bytes=demand.target_kv + demand.draft_kv,
        other_bytes=demand.token_bytes,
        savings=tuple(savings(demand)),
    )


def _budget(settings: Settings, demand: Demand, device: torch.device, memory: GpuMemory | None) -> Budget:
    if device.type == "cpu":
        return cpu_budget(settings.cache, demand.target_weights + demand.draft_weights + demand.draft_log.num_bytes)
    in_order = ", ".join(map(str, savings(demand)))
    return cuda_budget(settings.cache, demand.workspace + demand.beside, in_order, memory or GpuMemory.here())


def _max_chunk(settings: Settings) -> int:
    asked = settings.scheduler.chunk_tokens
    if asked == -1:
        return settings.model.max_len
    in_torch = settings.attention.target_torch or settings.attention.draft_torch
    return min(asked or (TORCH_CHUNK_TOKENS if in_torch else GPU_CHUNK_TOKENS), settings.model.max_len)


def weight_formats(settings: Settings, models: LoadedModels) -> tuple[str, str]:
    """Of target and draft; "" for weights in 16 bits or more."""
    files, spec = settings.model.files, settings.spec
    target = quantization_scheme(files.config, files.weights, files.quantization)
    draft = None
    if spec.draft_path is not None:
        config = read_config(Path(spec.draft_path) / "config.json")
        draft = quantization_scheme(config, spec.draft_path, spec.draft_quantization)
    return (
        _described(target, models.target, settings.model.dtype),
        _described(draft, models.proposer, settings.model.dtype),
    )


def _described(scheme: QuantizationScheme | None, weights: object, dtype: str) -> str:
    if scheme is None:
        return ""
    if any(True for _ in _kept(weights)):
        return str(scheme)
    return f"{scheme.stored.value}, DEQUANTISED to {dtype} while loading: no kernel here multiplies by them"


def _kept(node: object) -> Iterator[QuantizedLinear | QuantizedStack | Float4Matrices]:
    """The linears and experts in few bits below a tree of dataclasses and tuples."""
    if isinstance(node, QuantizedLinear | QuantizedStack | Float4Matrices):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from _kept(child)
    elif is_dataclass(node):
        for field in fields(node):
            yield from _kept(getattr(node, field.name))
