"""Loads targets and drafts from files, and chooses the loader for each checkpoint.

A worker reads configs, loads weights, sizes its KV pool from the remaining memory, then calls `attach`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from overlap_spec_kernels import GroupedKernel
from overlap_spec_kernels.launch import capability_of

from overlap_spec.config import DUMMY, ModelFiles
from overlap_spec.config.speculation import DraftKind, can_only_draft
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.config_values import check_values
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.models.drafts import eagle, eagle3, mtp
from overlap_spec.models.drafts.eagle import EagleConfig
from overlap_spec.models.drafts.eagle3 import Eagle3Config
from overlap_spec.models.drafts.mtp import LayerConfig, MtpLayersWeights
from overlap_spec.models.drafts.mtp_layouts import (
    canonical_names,
    dummy_layout_of_layers,
    has_layer,
    layout_of,
    layout_of_layers,
)
from overlap_spec.models.interfaces import DraftHead, LoadedDraft, LoadedTarget, Progress
from overlap_spec.models.layers.embedding import rank_of
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.loading.checkpoint import Checkpoint, TensorSource, Weights
from overlap_spec.models.loading.division import Division
from overlap_spec.models.loading.dummy import DummyWeights, spread_target_ids
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.loading.sources import DraftSource, ignore_progress, open_directory
from overlap_spec.models.quantization.grouped import KeptIntegers
from overlap_spec.models.registry import ARCHITECTURES, TargetConfig, architecture_of
from overlap_spec.models.targets.divided import divided, refuse_undivided
from overlap_spec.models.targets.hybrid import HybridConfig
from overlap_spec.models.targets.latent import LatentConfig


def read_target_config(files: ModelFiles) -> TargetConfig:
    """The target's config, read before any weight.

    Raises: CheckpointError naming file and key, or the architecture that is not supported.
    """
    origin = _origin(files)
    check_values(files.config, origin)
    return architecture_of(files.config, origin).read_config(files.config, origin)


def load_target(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = ignore_progress,
    kernel: GroupedKernel | None = None,
    keeps_integers: bool = False,
    rank: Rank = WHOLE,
) -> LoadedTarget:
    """Load a target's weights, converted to its dtype and device.

    `kernel`: linears of a .gguf file keep its integers and multiply with this kernel; None: all become floats, unless
    nothing is computed (`meta`), where `keeps_integers` tells. `rank`: of several, which part is loaded.
    Raises: CheckpointError naming file, tensor, found and expected.
    """
    config, path = read_target_config(files), Path(files.weights)
    architecture = architecture_of(files.config, _origin(files))
    if architecture.only_on_cpu and capability_of(device) is not None:
        raise CheckpointError(
            f"{_origin(files)}: {architecture.only_on_cpu} does not run on a GPU yet; use --device cpu"
        )
    if isinstance(config, LatentConfig | HybridConfig) and capability_of(device) is not None:
        config.refuse_on_gpu()
    scheme = quantization_scheme(files.config, _origin(files), files.quantization)
    division: Division | None = None
    if rank.ranks > 1:
        is_gguf = files.load_format != DUMMY and not path.is_dir()
        refuse_undivided(files.config, _origin(files), scheme, is_gguf, rank)
        config, division = divided(config, _origin(files), rank, scheme)
    weights: Weights
    if files.load_format == DUMMY:
        weights = DummyWeights(files.weights, dtype, device, progress).in_format(scheme)
    else:
        source, kept = (
            (open_directory(path, files.load_format), None)
            if path.is_dir()
            else _open_gguf(path, config, files.config, kernel, keeps_integers and device.type == "meta")
        )
        weights = Checkpoint(source, canonical_name, dtype, device, progress, kept).in_format(scheme)
    _refuse_draft_heads(weights)
    weights.division = division
    return architecture.load(config, weights)


def load_eagle3(source: DraftSource, target: LoadedTarget) -> eagle3.Eagle3Weights:
    """Load the EAGLE-3 head of a target.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if not that.
    """
    source.refuse_unless(DraftKind.EAGLE_3)
    config = Eagle3Config.from_hf(source.config(), target.num_layers, source.origin)
    made_up_ids = spread_target_ids(config.draft_vocab_size, target.vocab_size)
    rank = rank_of(target.embedding) if source.divides else WHOLE
    return eagle3.load_eagle3(config, source.weights(eagle.canonical_name, made_up_ids), target, rank)


def load_eagle(source: DraftSource, target: LoadedTarget) -> LoadedDraft[DraftHead]:
    """Load the EAGLE or EAGLE-2 head of a target.

    The same method also runs a checkpoint with an MTP layer, as SGLang documents.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if not that.
    """
    found = source.config()
    if has_layer(found) and any(name in ARCHITECTURES for name in found.get("architectures") or ()):
        return load_mtp(source, target)
    target_ids = source.target_ids(target)
    source.refuse_unless(DraftKind.EAGLE_2)
    config = EagleConfig.from_hf(found, source.origin)
    return eagle.load_eagle(config, source.weights(eagle.canonical_name), target, target_ids)


def load_mtp(source: DraftSource, target: LoadedTarget) -> LoadedDraft[DraftHead]:
    """Load the MTP layer of a checkpoint, which may hold the target too.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if it has no such layer.
    """
    target_ids = source.target_ids(target)
    source.refuse_unless(DraftKind.MTP)
    config, layout = _mtp_config(source), layout_of(source.config())
    return mtp.load_mtp(config, layout, source.weights(canonical_names(config.num_layers)), target, target_ids)


def load_mtp_layers(source: DraftSource, target: LoadedTarget, num_layers: int) -> MtpLayersWeights:
    """Load the first `num_layers` of a checkpoint's MTP layers, one for each guess.

    Raises: CheckpointError as `load_mtp` does; ConfigError if it has fewer.
    """
    config = _mtp_config(source)
    source.refuse_unless(DraftKind.MTP)
    layout = dummy_layout_of_layers(source.config()) if source.is_dummy else layout_of_layers(source.names())
    weights = source.weights(canonical_names(config.num_layers))
    return mtp.load_mtp_layers(config, layout, weights, target, num_layers)


def _mtp_config(source: DraftSource) -> LayerConfig:
    """Of the whole checkpoint, whose MTP layers are like its own. Raises: CheckpointError."""
    found = source.config()
    config = architecture_of(found, source.origin).read_config(found, source.origin)
    if not isinstance(config, LayerConfig):
        raise CheckpointError(f"{source.origin}: an MTP layer of {_names(found)} is not supported")
    return config


def _open_gguf(
    path: Path, config: TargetConfig, found: Mapping[str, Any], kernel: GroupedKernel | None, outlined: bool
) -> tuple[TensorSource, KeptIntegers | None]:
    """A .gguf file, and how linears keep its integers, if they do. `outlined`: they are to have no values."""
    from overlap_spec.models.loading.gguf_source import GgufSource, gguf_layout_of  # no other start imports gguf

    if (layout := gguf_layout_of(config, str(found.get("model_type")))) is None:
        raise CheckpointError(f"{path}: a GGUF file of {_names(found)} is not supported; give its safetensors")
    source = GgufSource(path, layout)
    if outlined:
        return source, KeptIntegers(source.outline, kernel)
    return source, None if kernel is None else KeptIntegers(source.groups, kernel)


def _names(config: Mapping[str, Any]) -> str:
    return ", ".join(map(str, config.get("architectures") or ()))


def _origin(files: ModelFiles) -> str:
    """The config's file, for messages."""
    path = Path(files.weights)
    return str(path / "config.json" if path.is_dir() else path)


def _refuse_draft_heads(weights: Weights) -> None:
    if can_only_draft({name: weights.shape(name) for name in weights.names()}):
        raise CheckpointError(
            f"{weights.origin}: this is a draft head, not a target; give it as --speculative-draft-model-path"
        )
