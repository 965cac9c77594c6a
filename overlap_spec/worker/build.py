"""Puts a worker together: weights, then sizes, then caches, then the executor. Not here: what steps do."""

import torch
from torch import Tensor

from overlap_spec.config import AcceptSettings, Settings
from overlap_spec.errors import ConfigError
from overlap_spec.models.interfaces import Progress
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.loader import load_target
from overlap_spec.spec.coins import CoinVerifier, DraftProbs, Rejection, Thresholds
from overlap_spec.spec.compiled import compiled_draw
from overlap_spec.spec.interfaces import SpecMethod, Verifier
from overlap_spec.spec.methods import EngineShape, method_named
from overlap_spec.spec.sampler import Draw, draw_columns
from overlap_spec.spec.simulated import SimulatedVerifier, SyntheticAcceptance
from overlap_spec.spec.verifier import ChainVerifier
from overlap_spec.worker.devices import CpuDevice, CudaDevice, Device
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.geometry import MAX_DEPTH, Geometry, LoadedModels, settle_geometry, torch_dtype
from overlap_spec.worker.slots import SlotRows


def load_models(settings: Settings, place: torch.device, progress: Progress) -> LoadedModels:
    """Read target and draft. Raises: CheckpointError, ConfigError."""
    dtype = torch_dtype(settings.model.dtype)
    method = method_named(settings.spec.method)
    target = load_target(settings.model.files, dtype, place, progress)
    return LoadedModels(target, method.load(settings.spec, target, progress), method)


def prepare_place(settings: Settings) -> torch.device:
    """Set torch up for these settings. float32 means IEEE float32: no TF32."""
    torch.set_num_threads(settings.num_threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if settings.model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", f"there is a CUDA driver, but torch {torch.__version__} cannot use it; use cpu")
    return torch.device(settings.model.device)


def build_executor(
    models: LoadedModels,
    geometry: Geometry,
    place: torch.device,
    accept: AcceptSettings | None = None,
    simulated_accept_len: float | None = None,
    compile_max_batch: int = 0,
) -> Executor:
    """Take the caches' memory and join everything.

    `accept`: how guesses are judged; None: by matching. `simulated_accept_len`: acceptance is synthetic (benchmarks).
    `compile_max_batch`: 0 compiles nothing.
    Raises: ConfigError if the method's guesses cannot be judged as `accept` says.
    """

    def cache(shape: KVShape) -> KVCache:
        return KVCache.allocate(shape, geometry.num_pages, geometry.page_size, geometry.dtype, place)

    target = models.target.attach(cache(models.target.kv_shape), geometry.num_positions, models.proposer.aux_layers)
    slots = SlotRows(geometry.num_slots, geometry.width, geometry.num_page_columns, place)
    shape = EngineShape(
        num_rows=slots.num_rows,
        num_positions=geometry.num_positions,
        page_size=geometry.page_size,
        dtype=geometry.dtype,
        device=place,
        hidden_size=target.hidden_size,
        max_deferred=geometry.max_deferred,
        probs=DraftProbs() if accept is not None and accept.rejection else None,
    )
    proposer = models.proposer.attach(cache(models.proposer.kv_shape), shape)
    draw = compiled_draw(compile_max_batch) if compile_max_batch else draw_columns
    verifier = _verifier(accept, shape.probs, torch.arange(target.vocab_size, device=place), draw)
    if simulated_accept_len is not None:
        verifier = SimulatedVerifier(verifier, SyntheticAcceptance(simulated_accept_len, place))
    method = SpecMethod(proposer, verifier)
    return Executor(_device(place), slots, target, method, geometry.page_size)


def _verifier(accept: AcceptSettings | None, probs: DraftProbs | None, token_ids: Tensor, draw: Draw) -> Verifier:
    """Who judges guesses. Shapes: token_ids [V] i64."""
    if accept is not None and accept.thresholds:
        return CoinVerifier(Thresholds(accept.threshold_single, accept.threshold_acc), token_ids)
    if probs is None:
        return ChainVerifier(token_ids, draw)
    if not probs.allocated:
        raise ConfigError("speculative_use_rejection_sampling", "this method's guesses are not drawn at random")
    return CoinVerifier(Rejection(probs), token_ids)


def build(settings: Settings, progress: Progress) -> tuple[Executor, Geometry, LoadedModels]:
    """Everything, from settings to an executor that is not warm yet."""
    place = prepare_place(settings)
    models = load_models(settings, place, progress)
    geometry = settle_geometry(settings, models, place)
    spec = settings.spec
    executor = build_executor(
        models, geometry, place, spec.accept, spec.simulated_accept_len, settings.compile_max_batch
    )
    return executor, geometry, models


def _device(place: torch.device) -> Device:
    return CpuDevice() if place.type == "cpu" else CudaDevice(ring=MAX_DEPTH + 1)
