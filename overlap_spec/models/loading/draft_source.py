"""The origin of a draft's weights, which every loader of drafts takes as its argument.

A token map names the target tokens that a draft may guess (FR-Spec). Its file is a list of token ids saved by torch,
usually the most frequent ones (Zhao et al. 2025, arXiv:2502.14856). It is loaded with `weights_only`: no code in it
runs.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec.config import DUMMY
from overlap_spec.config.methods import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.config_values import check_values, read_json
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.models.interfaces import LoadedTarget, Progress
from overlap_spec.models.loading.checkpoint import Checkpoint, TensorSource, Weights
from overlap_spec.models.loading.dummy import DummyWeights
from overlap_spec.models.loading.sources import open_directory


def read_token_map(path: str, vocab_size: int) -> Tensor:
    """Distinct ids below `vocab_size`, in the file's order. Shapes: -> [N] i64 on the CPU.

    Raises: CheckpointError naming the file, found and expected.
    """
    ids = _as_tensor(_load(path), path)
    if ids.numel() == 0:
        raise CheckpointError(f"{path}: the token map is empty")
    if (low := int(ids.min())) < 0 or (high := int(ids.max())) >= vocab_size:
        wrong = low if low < 0 else high
        raise CheckpointError(
            f"{path}: found token id {wrong}, expected 0 to {vocab_size - 1}, the target's vocabulary:"
            " the map was made for another target"
        )
    distinct, counts = ids.unique(return_counts=True)
    if len(distinct) != len(ids):
        twice = int(distinct[counts > 1][0])
        raise CheckpointError(f"{path}: found token id {twice} more than once, expected distinct ids")
    return ids


def _load(path: str) -> object:
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: the token map is missing")
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a torch file of plain token ids ({first})") from None
    return content


def _as_tensor(content: object, path: str) -> Tensor:
    if isinstance(content, list) and all(type(token) is int for token in content):
        if any(abs(token) >= 1 << 63 for token in content):
            raise CheckpointError(f"{path}: found token ids that no vocabulary holds")
        return torch.tensor(content, dtype=torch.int64)
    if isinstance(content, Tensor) and content.dim() == 1 and content.dtype in (torch.int32, torch.int64):
        return content.to(torch.int64)
    found = f"{content.dtype} {list(content.shape)}" if isinstance(content, Tensor) else type(content).__name__
    raise CheckpointError(f"{path}: expected a list of token ids (or a 1-D tensor of them), found {found}")


DRAFT_FLAG = "--speculative-draft-model-quantization"


def ignore_progress(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class DraftSource:
    """A draft's directory and load format.

    `token_map`: file of the target tokens that it may guess (FR-Spec). `quantization`: fp8, unquant, or None for what
    its own config.json names; a draft never has its target's format.
    """

    path: str
    dtype: torch.dtype
    device: torch.device
    load_format: str = "auto"
    token_map: str | None = None
    progress: Progress = ignore_progress
    quantization: str | None = None

    @classmethod
    def for_target(
        cls,
        path: str,
        target: LoadedTarget,
        progress: Progress = ignore_progress,
        load_format: str = "auto",
        token_map: str | None = None,
        quantization: str | None = None,
    ) -> "DraftSource":
        """The source for a draft with the target's dtype and device."""
        like = target.embedding
        return cls(path, like.dtype, like.device, load_format, token_map, progress, quantization)

    @property
    def is_dummy(self) -> bool:
        """Whether weights are random."""
        return self.load_format == DUMMY

    @property
    def origin(self) -> str:
        """The config's file, for messages."""
        return str(Path(self.path) / "config.json")

    def config(self) -> dict[str, Any]:
        """config.json, its values checked. Raises: CheckpointError."""
        config = read_json(Path(self.path) / "config.json")
        check_values(config, self.origin)
        return config

    def target_ids(self, target: LoadedTarget) -> Tensor | None:
        """The token map, if there is one. Shapes: [N] i64. Raises: CheckpointError."""
        return None if self.token_map is None else read_token_map(self.token_map, target.vocab_size)

    def refuse_unless(self, wanted: DraftKind) -> None:
        """Raises: CheckpointError if the tensors are of another kind of draft. Random weights are not checked."""
        if not self.is_dummy:
            kind = draft_kind(self._open().shapes())
            if kind is not wanted:
                raise CheckpointError(f"{self.path}: expected {wanted.value}, but this looks like {kind.value}")

    def weights(self, canonical: Callable[[str], str], made_up_ids: Tensor | None = None) -> Weights:
        """The tensors by canonical name. `made_up_ids`: the tokens that a random head guesses."""
        scheme = quantization_scheme(self.config(), self.origin, self.quantization, DRAFT_FLAG)
        if self.is_dummy:
            return DummyWeights(self.path, self.dtype, self.device, self.progress, made_up_ids).in_format(scheme)
        return Checkpoint(self._open(), canonical, self.dtype, self.device, self.progress).in_format(scheme)

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, as in the file."""
        return tuple(self._open().shapes())

    def _open(self) -> TensorSource:
        return open_directory(Path(self.path), self.load_format)
