"""From files to loaded models: which loader reads which checkpoint.

A worker reads configs, loads weights, sizes its KV pool from the memory that is left, then calls `attach`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overlap_spec.config import DUMMY, ModelFiles
from overlap_spec.config.draft_kind import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.json_file import read_json
from overlap_spec.models.drafts.eagle3_config import Eagle3Config
from overlap_spec.models.drafts.eagle_config import EagleConfig
from overlap_spec.models.drafts.mtp_layers import MtpLayersWeights
from overlap_spec.models.drafts.mtp_layouts import MIMO_V2, canonical_names, has_layer, layout_of, layout_of_layers
from overlap_spec.models.drafts.token_map import read_token_map
from overlap_spec.models.interfaces import DraftHead, LoadedDraft, LoadedTarget, Progress
from overlap_spec.models.loading import eagle3_loader, eagle_loader, llama_loader, mtp_loader
from overlap_spec.models.loading.checkpoint import Checkpoint, TensorSource, Weights
from overlap_spec.models.loading.dummy import DummyWeights, spread_target_ids
from overlap_spec.models.loading.gguf_source import GgufSource
from overlap_spec.models.loading.sources import open_directory
from overlap_spec.models.targets.families import refuse_sparse
from overlap_spec.models.targets.llama_config import ARCHITECTURES, LlamaConfig


def ignore_progress(done: int, total: int) -> None:
    """Show nothing."""


def read_target_config(files: ModelFiles) -> LlamaConfig:
    """The target's numbers, before any weight is read.

    Raises: CheckpointError naming file and key, or the architecture that is not supported.
    """
    path = Path(files.weights)
    return _known_config(files.config, str(path / "config.json" if path.is_dir() else path))


def _known_config(config: Mapping[str, Any], origin: str) -> LlamaConfig:
    refuse_sparse(config, origin)
    found = config.get("architectures") or []
    if not any(name in ARCHITECTURES for name in found):
        raise CheckpointError(
            f"{origin}: architecture {', '.join(map(str, found)) or 'missing'} is not supported;"
            f" supported: {', '.join(ARCHITECTURES)}"
        )
    return LlamaConfig.from_hf(config, origin)


def load_target(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, progress: Progress = ignore_progress
) -> LoadedTarget:
    """Load a target's weights, converted once.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    config, path = read_target_config(files), Path(files.weights)
    if files.load_format == DUMMY:
        return llama_loader.load_llama(config, DummyWeights(files.weights, dtype, device, progress))
    source: TensorSource = open_directory(path, files.load_format) if path.is_dir() else GgufSource(path, config)
    return llama_loader.load_llama(config, Checkpoint(source, llama_loader.canonical_name, dtype, device, progress))


def load_eagle3(
    directory: str,
    target: LoadedTarget,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = ignore_progress,
    load_format: str = "auto",
) -> LoadedDraft[DraftHead]:
    """Load the EAGLE-3 head of a target.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if not that.
    """
    path = Path(directory)
    if load_format == DUMMY:
        config = _eagle3_config(path, target)
        target_ids = spread_target_ids(config.draft_vocab_size, target.vocab_size)
        return eagle3_loader.load_eagle3(config, DummyWeights(directory, dtype, device, progress, target_ids), target)
    checkpoint = _open_head(path, DraftKind.EAGLE_3, dtype, device, progress, load_format)
    return eagle3_loader.load_eagle3(_eagle3_config(path, target), checkpoint, target)


def load_eagle(
    directory: str,
    target: LoadedTarget,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = ignore_progress,
    load_format: str = "auto",
    token_map: str | None = None,
) -> LoadedDraft[DraftHead]:
    """Load the EAGLE or EAGLE-2 head of a target. `token_map`: file of the target tokens that it may guess.

    A checkpoint with an MTP layer is run by the same method, as SGLang's documentation has it.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if not that.
    """
    path = Path(directory)
    found = read_json(path / "config.json")
    if has_layer(found) and any(name in ARCHITECTURES for name in found.get("architectures") or ()):
        return load_mtp(directory, target, dtype, device, progress, load_format, token_map)
    target_ids = None if token_map is None else read_token_map(token_map, target.vocab_size)
    checkpoint: Weights
    if load_format == DUMMY:
        checkpoint = DummyWeights(directory, dtype, device, progress)
    else:
        checkpoint = _open_head(path, DraftKind.EAGLE_2, dtype, device, progress, load_format)
    config = EagleConfig.from_hf(found, str(path / "config.json"))
    return eagle_loader.load_eagle(config, checkpoint, target, target_ids)


def load_mtp(
    directory: str,
    target: LoadedTarget,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = ignore_progress,
    load_format: str = "auto",
    token_map: str | None = None,
) -> LoadedDraft[DraftHead]:
    """Load the MTP layer of a checkpoint, which may hold the target too. `token_map`: as for `load_eagle`.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if it has no such layer.
    """
    path = Path(directory)
    target_ids = None if token_map is None else read_token_map(token_map, target.vocab_size)
    if load_format != DUMMY:
        _open_head(path, DraftKind.MTP, dtype, device, ignore_progress, load_format)
    found = read_json(path / "config.json")
    config, layout = _known_config(found, str(path / "config.json")), layout_of(found)
    checkpoint: Weights
    if load_format == DUMMY:
        checkpoint = DummyWeights(directory, dtype, device, progress)
    else:
        source = open_directory(path, load_format)
        checkpoint = Checkpoint(source, canonical_names(config.num_layers), dtype, device, progress)
    return mtp_loader.load_mtp(config, layout, checkpoint, target, target_ids)


def load_mtp_layers(
    directory: str,
    target: LoadedTarget,
    num_layers: int,
    progress: Progress = ignore_progress,
    load_format: str = "auto",
) -> MtpLayersWeights:
    """Load the first `num_layers` of a checkpoint's MTP layers, one for each guess, in the target's dtype.

    Raises: CheckpointError as `load_mtp` does; ConfigError if it has fewer.
    """
    path, like = Path(directory), target.embedding
    config = _known_config(read_json(path / "config.json"), str(path / "config.json"))
    if load_format == DUMMY:
        made_up = DummyWeights(directory, like.dtype, like.device, progress)
        return mtp_loader.load_mtp_layers(config, MIMO_V2, made_up, target, num_layers)
    _open_head(path, DraftKind.MTP, like.dtype, like.device, ignore_progress, load_format)
    source = open_directory(path, load_format)
    checkpoint = Checkpoint(source, canonical_names(config.num_layers), like.dtype, like.device, progress)
    return mtp_loader.load_mtp_layers(config, layout_of_layers(source.shapes()), checkpoint, target, num_layers)


def _open_head(
    path: Path, wanted: DraftKind, dtype: torch.dtype, device: torch.device, progress: Progress, load_format: str
) -> Checkpoint:
    """The weights of a head, which its tensors must show to be of the kind that is wanted."""
    checkpoint = Checkpoint(open_directory(path, load_format), eagle3_loader.canonical_name, dtype, device, progress)
    kind = draft_kind({name: checkpoint.shape(name) for name in checkpoint.names()})
    if kind is not wanted:
        raise CheckpointError(f"{path}: expected {wanted.value}, but this looks like {kind.value}")
    return checkpoint


def _eagle3_config(path: Path, target: LoadedTarget) -> Eagle3Config:
    return Eagle3Config.from_hf(read_json(path / "config.json"), target.num_layers, str(path / "config.json"))
