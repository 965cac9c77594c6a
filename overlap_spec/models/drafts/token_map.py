"""Reads a token map: the target tokens that a draft may guess (FR-Spec).

The file is a list of token ids saved by torch, usually the most frequent ones (Zhao et al. 2025, arXiv:2502.14856). It
is loaded with `weights_only`: no code in it runs.
"""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError


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
