"""Puts a worker together: weights, then sizes, then caches, then the executor."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from overlap_spec_kernels import GroupedKernel, NoLibraryError, neutral_rules

from overlap_spec import features, hub
from overlap_spec.config import DUMMY, AcceptSettings, AttentionSettings, Settings, SpecSettings, cache_directory
from overlap_spec.config.speculation import ONLY_CHAINS
from overlap_spec.errors import ConfigError
from overlap_spec.models.interfaces import Progress, TargetModel
from overlap_spec.models.kv_cache import KVCache, KVShape, SlotSizes
from overlap_spec.models.layers.attention_choice import AttentionChoice
from overlap_spec.models.layers.linear_forms import in_one_order
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.loading.sources import open_directory
from overlap_spec.models.quantization.grouped import by_kernel, in_16_bits
from overlap_spec.models.recurrent_state import StateSnapshots
from overlap_spec.sampling.context import TokenPool
from overlap_spec.sampling.sampler import draw_columns
from overlap_spec.sampling.stages import LogitProcessor, LogitProcessors, load_processor
from overlap_spec.speculative.drafts import EngineShape
from overlap_spec.speculative.interfaces import SpecMethod, Tree
from overlap_spec.speculative.methods import method_of
from overlap_spec.speculative.verification import VerifierInputs
from overlap_spec.speculative.verifiers import DraftProbs, SimulatedVerifier, SyntheticAcceptance
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.devices import CpuDevice, CudaDevice, Device
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.hooks import Hooks, StepHook
from overlap_spec.worker.inputs import DraftLag
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.ranks import ONE, Ranks
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.startup.geometry import (
    MAX_DEPTH,
    Geometry,
    LoadedModels,
    agreed_geometry,
    settle_geometry,
    torch_dtype,
)
from overlap_spec.worker.startup.linear_choice import choose_linears, use_threads

EXACT = AcceptSettings()
CONVERTS_8_BITS = (8, 9)  # compute capability
KERNELS = "kernels"  # of a CPU, in the cache directory
UPLOADS = 6  # of a step: its integers, and up to five of features

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """What a feature may reach of a worker that is being built. No request has come yet, and nothing is captured."""

    settings: Settings
    target: TargetModel
    method: SpecMethod
    device: Device
    slots: SlotRows
    geometry: Geometry
    rank: int = 0  # of several that run the model, each with hooks of its own
    models: LoadedModels | None = None


def attach_features(parts: Parts) -> Hooks:
    """Attach the features that are there, as far as the settings ask for them."""
    hooks = Hooks(parts.settings.ranks)
    for module in features.modules(features.WORKER, parts.settings.features):
        hook: StepHook | None = module.attach(parts)
        if hook is not None:
            hooks.add(features.name_of(module), hook)
    parts.slots.draw_through(hooks.stages, hooks.outputs, hooks.columns)
    return hooks


def load_models(settings: Settings, place: torch.device, progress: Progress, rank: Rank = WHOLE) -> LoadedModels:
    """Read target and draft; of the target, the part of this rank. Raises: CheckpointError, ConfigError."""
    dtype = torch_dtype(settings.model.dtype)
    method = method_of(settings.spec, features.listed(features.WORKER, "METHODS", settings.features))
    method.verification(settings.spec.accept)  # refused before anything is read
    _check_draft(settings.spec)
    kernel = None if place.type == "meta" else _integer_kernel(settings)
    kept = kernel if settings.model.keeps_integers else None
    target = load_target(settings.model.files, dtype, place, progress, kept, settings.model.keeps_integers, rank)
    if kernel is not None and settings.model.deterministic:
        target = by_kernel(target, kernel)
    if settings.attention.target_in_order:
        target = in_one_order(target)
    loaded = method.load(settings.spec, target, progress)
    proposer = features.given(features.WORKER, "fuse", settings.features, settings.spec, loaded) or loaded
    if kernel is not None:
        proposer = in_16_bits(proposer, kernel)
    if settings.spec.topk > 1 and target.kv_shape.state.num_layers:
        raise ConfigError("speculative_eagle_topk", f"{ONLY_CHAINS}, got {settings.spec.topk}; use 1")
    if settings.spec.topk > 1 and proposer.profile.tree is None:
        raise ConfigError("speculative_eagle_topk", f"{method.name} guesses chains, got {settings.spec.topk}; use 1")
    return LoadedModels(target, proposer, method, kernel=kernel)


def _integer_kernel(settings: Settings) -> GroupedKernel | None:
    """The kernel for weights that stay in few bits, compiled at the first start; None: they become float32.

    Raises: ConfigError where the flag promises what only the kernel keeps.
    """
    deterministic = settings.model.deterministic and not settings.attention.target_in_order
    if not settings.model.keeps_integers and not deterministic:
        return None
    try:
        return GroupedKernel(Path(cache_directory()) / KERNELS)
    except NoLibraryError as error:
        if deterministic:
            raise ConfigError("enable_deterministic_inference", f"needs kernels compiled here: {error}") from None
        log.warning("weights of the .gguf file become float32, which takes more memory and time: %s", error)
        return None


def _check_draft(spec: SpecSettings) -> None:
    """Before the target, which may take minutes. Raises: CheckpointError if the draft is another method's."""
    if spec.draft_path is not None and spec.draft_load_format != DUMMY:
        shapes = open_directory(Path(spec.draft_path), spec.draft_load_format).shapes()
        hub.refuse_other_kind(spec.method, spec.draft_path, shapes)


def prepare_place(settings: Settings) -> torch.device:
    """Set torch up for these settings. float32 means IEEE float32: no TF32."""
    use_threads(settings.num_threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if settings.model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", f"there is a CUDA driver, but torch {torch.__version__} cannot use it; use cpu")
    if settings.model.device == "cuda":
        check_kv_dtype(settings, torch.cuda.get_device_capability())
    return torch.device(settings.model.device)


def check_kv_dtype(settings: Settings, capability: tuple[int, int]) -> None:
    """Raises: ConfigError if a GPU of this capability cannot convert 8 bits."""
    if settings.cache.kv_dtype is not None and capability < CONVERTS_8_BITS:
        raise ConfigError(
            "kv_cache_dtype",
            f"8 bits need a GPU of compute capability 8.9 or later, found {'.'.join(map(str, capability))};"
            " use bfloat16 with --dtype bfloat16",
        )


def build_executor(
    models: LoadedModels,
    geometry: Geometry,
    place: torch.device,
    accept: AcceptSettings = EXACT,
    simulated_accept_lens: tuple[float, ...] = (),
    attention: AttentionSettings | None = None,
    own_processors: tuple[LogitProcessor, ...] = (),
    settings: Settings | None = None,
    rank: int = 0,
) -> Executor:
    """Take the caches' memory and join everything.

    `accept`: how guesses are judged. `simulated_accept_lens`: acceptance is synthetic (benchmarks).
    `attention`: what runs it, if not what is fastest. `own_processors`: logit processors of one's own, of any request.
    `settings`: what features go by; None attaches none. `rank`: which of several this process is.
    Raises: ConfigError naming the flag if the method's guesses cannot be judged as `accept` asks.
    """

    def cache(shape: KVShape, scratch_rows: int = 0, num_placed: int = 0) -> KVCache:
        slot_sizes = SlotSizes(geometry.num_slots + 1 + num_placed, geometry.width, geometry.dtype)
        return KVCache.allocate(shape, *geometry.pages, place, scratch_rows, slot_sizes)

    target_cache = cache(models.target.kv_shape, num_placed=geometry.placed_slots)
    profile, tree = models.proposer.profile, models.proposer.profile.tree
    of_target, of_draft = attention_choices(attention or AttentionSettings(), models.kernel)
    target = models.target.attach(target_cache, geometry.num_positions, profile.aux_layers, of_target)
    pool = TokenPool.allocate(geometry.num_pages, geometry.page_size, place)
    processors = _processors(target.vocab_size, pool, geometry, own_processors)
    slots = SlotRows(geometry.num_slots, geometry.width, geometry.num_page_columns, processors, geometry.placed_slots)
    shape = EngineShape(
        num_rows=slots.num_rows,
        num_positions=geometry.num_positions,
        page_size=geometry.page_size,
        dtype=geometry.dtype,
        device=place,
        hidden_size=target.hidden_size,
        max_deferred=geometry.max_deferred,
        token_pool=pool,
        attention=of_draft,
        scratch_start=geometry.num_pages * geometry.page_size,
        probs=DraftProbs() if accept.rejection else None,
        simulated_accept_lens=simulated_accept_lens,
        target_cache=target_cache,
    )
    proposer = models.proposer.attach(cache(profile.kv_shape, slots.num_rows * profile.scratch_rows), shape)
    proposer = replaced("watch", proposer, settings, models, proposer, shape)
    device, token_ids = _device(place), torch.arange(target.vocab_size, device=place)
    inputs = VerifierInputs(accept, token_ids, tree is not None, replaced("draw", draw_columns, settings), shape.probs)
    verifier = models.method.verification(accept).verifier(inputs)
    if simulated_accept_lens:
        verifier = SimulatedVerifier(verifier, SyntheticAcceptance(simulated_accept_lens, slots.seeds))
    method = SpecMethod(proposer, verifier, None if tree is None else Tree(tree.num_levels, target_cache.move))
    parts = None if settings is None else Parts(settings, target, method, device, slots, geometry, rank, models)
    hooks = Hooks() if parts is None else attach_features(parts)
    decode_step = DecodeStep(slots, target, method, geometry.page_size, hooks.marks)
    prefill_step = PrefillStep(slots, target, method, geometry.page_size, _reads_last(models))
    snapshots = StateSnapshots.allocate(target_cache.state, geometry.num_snapshots)
    lag = DraftLag(0 if decode_step.self_drafting else geometry.max_deferred, profile.reads_roots)
    return Executor(device, slots, decode_step, prefill_step, hooks, lag, snapshots)


def replaced(name: str, part: T, settings: Settings | None, *others: object) -> T:
    """A part of the engine: as it is, or a feature's own, if one gives that by this name."""
    if settings is None:
        return part
    own: T | None = features.given(features.WORKER, name, settings.features, settings, *others)
    return own or part


def _reads_last(models: LoadedModels) -> bool:
    """Whether of the target's last layer no more than the last row of a chunk is read."""
    profile = models.proposer.profile
    return not profile.reads_hidden and models.target.num_layers - 1 not in profile.aux_layers


def _processors(
    vocab_size: int,
    pool: TokenPool,
    geometry: Geometry,
    own: tuple[LogitProcessor, ...],
) -> LogitProcessors:
    place = pool.tokens.device
    num_rows = geometry.num_slots + 1 + geometry.placed_slots
    return LogitProcessors(vocab_size, pool, neutral_rules(num_rows, vocab_size, place), own)


def attention_choices(
    settings: AttentionSettings, kernel: GroupedKernel | None = None
) -> tuple[AttentionChoice, AttentionChoice]:
    """What runs the attention of the target, and of the draft. `kernel`: that of a CPU."""
    of_rows = None if kernel is None else kernel.attention
    target = AttentionChoice(settings.target_torch, settings.prefill_kernel, None, settings.target_in_order, of_rows)
    draft = AttentionChoice(settings.draft_torch, settings.prefill_kernel, settings.draft_window, of_rows=of_rows)
    return (
        replace(target, of_rows=None) if settings.target_torch else target,
        replace(draft, of_rows=None) if settings.draft_torch else draft,
    )


def build(
    settings: Settings, progress: Progress, measured: bool = False, ranks: Ranks = ONE
) -> tuple[Executor, Geometry, LoadedModels]:
    """Everything, from settings to an executor that is not warm yet. `measured`: linears are as is fastest here."""
    own = () if settings.logit_processor is None else (load_processor(settings.logit_processor),)
    place = prepare_place(settings)
    models = load_models(settings, place, progress, ranks.rank)
    if measured:
        models = choose_linears(settings, models, ranks.agreement)
    geometry = agreed_geometry(settle_geometry(settings, models, place), ranks.agreement)
    spec = settings.spec
    executor = build_executor(
        models,
        geometry,
        place,
        spec.accept,
        spec.simulated_accept_lens,
        settings.attention,
        own,
        settings=settings,
        rank=ranks.rank.rank,
    )
    return executor, geometry, models


def _device(place: torch.device) -> Device:
    return CpuDevice() if place.type == "cpu" else CudaDevice(ring=UPLOADS * (MAX_DEPTH + 1))
