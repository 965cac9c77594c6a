"""Checkpoint files of a Hugging Face directory: safetensors or .bin, whole or in shards.

Files are mapped, not read: a tensor costs memory when it is taken. A .bin is loaded with `weights_only`.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.hub.weight_files import FORMATS, check_index, headers_in, open_safetensors, weight_files
from overlap_spec.models.loading.checkpoint import Shape, TensorSource

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

    def _open(self, file: Path) -> None:
        handle = open_safetensors(file, "pt")
        self._readers[file] = handle.get_tensor
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


def _load_bin(file: Path) -> dict[str, Tensor]:
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # the format before torch 1.6 cannot be mapped
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(f"{file}: not a torch file of plain tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CheckpointError(f"{file}: expected a dict of tensors by name, found {type(loaded).__name__}")
    return loaded
