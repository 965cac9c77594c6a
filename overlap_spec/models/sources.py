"""Checkpoint files of a Hugging Face directory: safetensors or .bin, whole or in shards. Not here: what is in them.

Files are mapped, not read: a tensor costs memory when it is taken. A .bin is loaded with `weights_only`.
"""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.checkpoint import Shape, TensorSource

SAFETENSORS, BIN = ("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")
FORMATS = {"auto": (SAFETENSORS, BIN), "safetensors": (SAFETENSORS,), "pt": (BIN,)}  # by --load-format, in order


def open_directory(directory: Path, load_format: str = "auto") -> TensorSource:
    """The weights of a directory in that format; safetensors where both are there and either will do.

    Raises: CheckpointError if there are none, or an index names a shard that is not there.
    """
    for name, suffix in FORMATS[load_format]:
        if files := _weight_files(directory, name, suffix):
            return SafetensorsSource(directory, files) if suffix == ".safetensors" else BinSource(directory, files)
    expected = "shards with an index, or .bin" if load_format == "auto" else "or shards with an index"
    first = FORMATS[load_format][0][0]
    raise CheckpointError(f"{directory}: no weights found; expected {first}, {expected}")


def _weight_files(directory: Path, name: str, suffix: str) -> list[Path]:
    index = directory / f"{name}.index.json"
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        for shard in shards:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{index}: shard {shard} is missing from {directory}")
        return [directory / shard for shard in shards]
    if (directory / name).is_file():
        return [directory / name]
    return sorted(directory.glob(f"{Path(name).stem}*{suffix}"))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r})") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map names no tensor")
    return weight_map


class SafetensorsSource:
    """Tensors of .safetensors files."""

    def __init__(self, directory: Path, files: list[Path]) -> None:
        self.origin = str(directory)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        self._readers: dict[Path, Callable[[str], Tensor]] = {}
        for file in files:
            self._open(file)

    def shapes(self) -> Mapping[str, Shape]:
        """See `TensorSource`."""
        return self._shapes

    def file_of(self, name: str) -> str:
        """See `TensorSource`."""
        return str(self._files[name])

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._readers[self._files[name]](name)

    def _open(self, file: Path) -> None:
        try:
            handle: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from None
        self._readers[file] = handle.get_tensor
        for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
            self._files[name] = file
            self._shapes[name] = tuple(handle.get_slice(name).get_shape())


class BinSource:
    """Tensors of torch-saved .bin files, without running any code that they may hold."""

    def __init__(self, directory: Path, files: list[Path]) -> None:
        self.origin = str(directory)
        self._files: dict[str, Path] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            tensors = _load_bin(file)
            self._tensors.update(tensors)
            self._files.update(dict.fromkeys(tensors, file))

    def shapes(self) -> Mapping[str, Shape]:
        """See `TensorSource`."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> str:
        """See `TensorSource`."""
        return str(self._files[name])

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
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
