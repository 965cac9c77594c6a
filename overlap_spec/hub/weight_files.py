"""Finds the weight files of a Hugging Face directory, and reads the headers of safetensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlap_spec.errors import CheckpointError

SAFETENSORS, BIN = ("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")
FORMATS = {"auto": (SAFETENSORS, BIN), "safetensors": (SAFETENSORS,), "pt": (BIN,)}  # by --load-format, in order


def weight_files(directory: Path, load_format: str = "auto") -> list[Path]:
    """The files of the first format that is present; with `auto`, safetensors come before .bin.

    Raises: CheckpointError if an index names a missing shard.
    """
    found = (_of_format(directory, name, suffix) for name, suffix in FORMATS[load_format])
    return next((files for files in found if files), [])


def open_safetensors(file: Path, framework: str) -> Any:
    """A handle to a mapped file. `framework`: the type of its tensors. Raises: CheckpointError naming the file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from None


def shapes_in(handle: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of an open file, without reading any."""
    for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
        yield name, tuple(handle.get_slice(name).get_shape())


def _of_format(directory: Path, name: str, suffix: str) -> list[Path]:
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
