"""Our reading of a .gguf file against gguf's own: every tensor, every type, and files that are none."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from overlap_spec.models.loading.gguf_file import read_tensors

KIND = gguf.GGMLQuantizationType
KINDS = (KIND.F32, KIND.F16, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1, KIND.Q8_0)


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
    for index, kind in enumerate(KINDS):
        values = random.normal(size=(3 + index, 64)).astype(np.float32)
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
