"""Finds the weight files of a Hugging Face directory, and reads the headers of safetensors."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlap_spec.errors import CheckpointError

SAFETENSORS, BIN = ("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")
SHARD = re.compile(r"-(\d+)-of-(\d+)$")  # of a shard's name, before its suffix
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


def headers_in(handle: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type (BF16, ..) of every tensor of an open file, without reading any."""
    for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
        header = handle.get_slice(name)
        yield name, tuple(header.get_shape()), header.get_dtype()


def check_index(directory: Path, files: Mapping[str, Path]) -> None:
    """Compare the index of shards with what is in them. `files`: where each tensor was found.

    Raises: CheckpointError naming index and tensor, if one is not in the shard that the index names.
    """
    for index in {file.parent / f"{_whole_name(file)}.index.json" for file in files.values()}:
        for name, shard in _weight_map(index).items() if index.is_file() else ():
            if (found := files.get(name)) is None or found.name != shard:
                where = "in none of its files" if found is None else f"in {found.name}"
                raise CheckpointError(f"{index}: tensor {name}: found {where}, expected in {shard}")


def _whole_name(file: Path) -> str:
    """The name that a shard's file would have without shards: model-00001-of-00002.safetensors -> model.safetensors."""
    return SHARD.sub("", file.stem) + file.suffix


def _of_format(directory: Path, name: str, suffix: str) -> list[Path]:
    index = directory / f"{name}.index.json"
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        for shard in shards:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{index}: shard {shard} is missing from {directory}")
        _check_numbers(index, shards)
        return [directory / shard for shard in shards]
    if (directory / name).is_file():
        return [directory / name]
    return sorted(directory.glob(f"{Path(name).stem}*{suffix}"))


def _check_numbers(index: Path, shards: list[str]) -> None:
    """Raises: CheckpointError if shards count themselves, and the index leaves one out."""
    counts = {int(found[1]): int(found[2]) for shard in shards if (found := SHARD.search(Path(shard).stem))}
    of = max(counts.values(), default=0)
    if missing := set(range(1, of + 1)) - counts.keys():
        raise CheckpointError(
            f"{index}: weight_map names {len(shards)} shards of {of}; number {min(missing)} is missing"
        )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r})") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map names no tensor")
    return weight_map
