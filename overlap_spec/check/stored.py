"""In which formats the files of a model hold their tensors, from headers alone."""

import math
from collections import Counter
from pathlib import Path

from overlap_spec.config import DUMMY
from overlap_spec.hub.weight_files import headers_in, open_safetensors, weight_files

BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # of safetensors' types; others: 1
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored_formats(path: Path, load_format: str) -> dict[str, int]:
    """Bytes by format. Empty for random weights, and for .bin files, which tell no sizes without being opened."""
    if load_format == DUMMY or not path.exists():
        return {}
    sizes = _of_gguf(path) if path.is_file() else _of_safetensors(weight_files(path, load_format))
    return dict(sizes.most_common())


def _of_safetensors(files: list[Path]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for file in files:
        for _, shape, dtype in headers_in(open_safetensors(file, "np")) if file.suffix == ".safetensors" else ():
            sizes[NAMES.get(dtype, dtype)] += math.prod(shape) * BYTES.get(dtype, 1)
    return sizes


def _of_gguf(path: Path) -> Counter[str]:
    from overlap_spec.models.loading.gguf_file import read_tensors  # imports numpy and torch

    sizes: Counter[str] = Counter()
    for tensor in read_tensors(path):
        sizes[tensor.kind.name] += tensor.data.nbytes
    return sizes
