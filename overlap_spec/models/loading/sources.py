"""Where weights come from: the checkpoint files of a Hugging Face directory, and the origin of a draft's weights.

Files are safetensors or .bin, whole or in shards. They are mapped, not read: a tensor costs memory when it is taken. A
.bin is loaded with `weights_only`: no code in it runs.

A draft's origin is what every loader of drafts takes as its argument. A token map names the target tokens that a draft
may guess (FR-Spec). Its file is a list of token ids saved by torch, usually the most frequent ones (Zhao et al. 2025,
arXiv:2502.14856), and is loaded with `weights_only` too.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec.config import DUMMY
from overlap_spec.config.speculation import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.config_values import check_values, read_config
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.hub.weight_files import FORMATS, check_index, headers_in, open_safetensors, weight_files
from overlap_spec.models.interfaces import LoadedTarget, Progress
from overlap_spec.models.loading.checkpoint import Checkpoint, Shape, TensorSource, Weights
from overlap_spec.models.loading.dummy import DummyWeights

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}  # as safetensors names them


def open_directory(directory: Path, load_format: str = "auto") -> TensorSource:
    """The weights of a directory in the given format; `auto` prefers safetensors to .bin.

    Raises: CheckpointError if there are none, or an index names a missing shard.
    """
    if files := weight_files(directory, load_format):
        is_bin = files[0].suffix == ".bin"
        return BinSource(directory, files) if is_bin else SafetensorsSource(directory, files)
    expected = "shards with an index, or .bin" if load_format == "auto" else "or shards with an index"
    first = FORMATS[load_format][0][0]
    raise CheckpointError(f"{directory}: no weights found; expected {first}, {expected}")


class SafetensorsSource:
    """Tensors of .safetensors files."""

    def __init__(self, directory: Path, files: list[Path]) -> None:
        self.origin = str(directory)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        self._readers: dict[Path, Callable[[str], Tensor]] = {}
        self._slicers: dict[Path, Callable[[str], Any]] = {}
        for file in files:
            self._open(file)
        check_index(directory, self._files)

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def file_of(self, name: str) -> str:
        return str(self._files[name])

    def dtype(self, name: str) -> torch.dtype:
        found = self._dtypes[name]
        if found not in DTYPES:
            raise CheckpointError(f"{self._files[name]}: tensor {name}: found type {found}, which is not known here")
        return DTYPES[found]

    def read(self, name: str) -> Tensor:
        return self._readers[self._files[name]](name)

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        found: Tensor = self._slicers[self._files[name]](name)[part]
        return found

    def _open(self, file: Path) -> None:
        handle = open_safetensors(file, "pt")
        self._readers[file] = handle.get_tensor
        self._slicers[file] = handle.get_slice
        for name, shape, dtype in headers_in(handle):
            if (other := self._files.setdefault(name, file)) is not file:
                raise CheckpointError(f"{file}: tensor {name}: found in {other.name} too, expected in one file")
            self._shapes[name] = shape
            self._dtypes[name] = dtype


class BinSource:
    """Tensors of torch-saved .bin files, read without running code from them."""

    def __init__(self, directory: Path, files: list[Path]) -> None:
        self.origin = str(directory)
        self._files: dict[str, Path] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            tensors = _load_bin(file)
            for name in tensors.keys() & self._files.keys():
                other = self._files[name].name
                raise CheckpointError(f"{file}: tensor {name}: found in {other} too, expected in one file")
            self._tensors.update(tensors)
            self._files.update(dict.fromkeys(tensors, file))
        check_index(directory, self._files)

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> str:
        return str(self._files[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def load_plain(path: str | Path, what: str, maps: bool = False) -> object:
    """What torch has saved, without running code from it. Raises: CheckpointError naming the file, which has no `what`.

    `maps`: it is mapped, not read, if it has the format of torch 1.6 or later.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        if maps:
            return load_plain(path, what)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a torch file of plain {what}: {first}") from None


def _load_bin(file: Path) -> dict[str, Tensor]:
    loaded = load_plain(file, "tensors", maps=True)
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CheckpointError(f"{file}: expected a dict of tensors by name, found {type(loaded).__name__}")
    return loaded


def read_token_map(path: str, vocab_size: int) -> Tensor:
    """Distinct ids below `vocab_size`, in the file's order. Shapes: -> [N] i64 on the CPU.

    Raises: CheckpointError naming the file, found and expected.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: the token map is missing")
    ids = _as_tensor(load_plain(path, "token ids"), path)
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
    its own config.json names; a draft never has its target's format. `divides`: its layers among the target's ranks,
    where its kind can be.
    """

    path: str
    dtype: torch.dtype
    device: torch.device
    load_format: str = "auto"
    token_map: str | None = None
    progress: Progress = ignore_progress
    quantization: str | None = None
    divides: bool = True

    @classmethod
    def for_target(
        cls,
        path: str,
        target: LoadedTarget,
        progress: Progress = ignore_progress,
        load_format: str = "auto",
        token_map: str | None = None,
        quantization: str | None = None,
        divides: bool = True,
    ) -> "DraftSource":
        """The source for a draft with the target's dtype and device."""
        like = target.embedding
        return cls(path, like.dtype, like.device, load_format, token_map, progress, quantization, divides)

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
        config = read_config(Path(self.path) / "config.json")
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
