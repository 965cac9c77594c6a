"""Our reading of a .gguf file against gguf's own: every tensor, every type, and files that are none."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from support.gguf_files import K_QUANTS, KIND, random_blocks

from overlap_spec.models.loading.gguf_source import read_tensors

FLOATS = (KIND.F32, KIND.F16, KIND.BF16)
GROUPS = (KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1, KIND.Q8_0)


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.integer", 7)
    writer.add_float64("a.number", 0.5)
    writer.add_bool("a.truth", True)
    writer.add_array("some.words", ["one", "", "three"])
    writer.add_array("some.numbers", [1, 2, 3])
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    random = np.random.default_rng(0)
    for index, kind in enumerate((*FLOATS, *GROUPS, *K_QUANTS)):
        values = random.normal(size=(3 + index, 512)).astype(np.float32)
        if kind in K_QUANTS:
            data = random_blocks(values, kind, index)
        else:
            data = values if kind is KIND.F32 else quantize(values, kind)
        writer.add_tensor(f"tensor.{kind.name}", data, raw_dtype=kind)
    writer.add_tensor("last", random.normal(size=5).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_values_are_those_of_gguf_to_the_bit(alignment: int | None, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", alignment)
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = read_tensors(path)
    assert [tensor.name for tensor in found] == list(wanted)
    for tensor in found:
        theirs = wanted[tensor.name]
        assert tensor.shape == tuple(reversed(theirs.shape.tolist()))
        assert np.array_equal(tensor.values().numpy(), dequantize(theirs.data, theirs.tensor_type))


@pytest.mark.parametrize("kept", [0, 3, 8, 20, 60, 200, -40])
def test_a_cut_file_is_said(kept: int, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError):
        read_tensors(path)


def test_another_version_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    content[4] = 9
    path.write_bytes(content)
    with pytest.raises(ValueError, match="version"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 999, r"tensor tensor\.Q6_K: found type 999, expected one that gguf knows"),
        (-8, 500, r"tensor tensor\.Q6_K: found rows of 500, expected a multiple of 256 for Q6_K"),
        (4, 1 << 40, r"tensor tensor\.Q6_K: found \d+ bytes in the file, expected at least \d{13}"),
    ],
)
def test_a_damaged_tensor_is_named(at: int, value: int, message: str, tmp_path: Path) -> None:
    """The header has name, number of sizes, sizes, type and place in the file."""
    path = write(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    kind = content.index(b"tensor.Q6_K") + len(b"tensor.Q6_K") + 4 + 16
    size = 4 if at == 0 else 8
    place = kind - 16 if at < 0 else kind + at
    content[place : place + size] = value.to_bytes(size, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tensors(path)
