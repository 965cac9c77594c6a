"""Machine code of kernels in CUDA C++ is kept in Triton's cache."""

from pathlib import Path

import pytest
from overlap_spec_kernels import nvrtc
from overlap_spec_kernels.nvrtc import CudaCode

pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.cuh").write_text("// included")
    (folder / "a.cu").write_text("// a kernel")
    return folder / "a.cu"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CudaCode]:
    """What a compiler was asked for; its answers are the numbers of the questions."""
    asked: list[CudaCode] = []

    def compile_code(code: CudaCode) -> bytes:
        asked.append(code)
        return str(len(asked)).encode()

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CudaCode, "_compile", compile_code)
    monkeypatch.setattr(nvrtc, "_compiler_version", lambda: (13, 0))
    return asked


def test_it_is_compiled_once(source: Path, compiled: list[CudaCode], tmp_path: Path) -> None:
    code = CudaCode(source, ("ROWS=8",), (("made.h", "//"),))
    assert [code.compiled() for _ in range(3)] == [b"1"] * 3
    assert [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [b"1"]


def test_whatever_it_is_made_from_counts(
    source: Path, compiled: list[CudaCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = CudaCode(source, ("ROWS=8",))
    codes = [code, code._replace(defines=("ROWS=16",)), code._replace(headers=(("made.h", "//"),))]
    assert [each.compiled() for each in codes] == [b"1", b"2", b"3"]
    (source.parent / "a.cuh").write_text("// changed")
    assert code.compiled() == b"4"
    source.write_text("// changed too")
    assert code.compiled() == b"5"
    monkeypatch.setattr(nvrtc, "_compiler_version", lambda: (13, 1))
    assert code.compiled() == b"6"


def test_a_folder_that_cannot_be_written(
    source: Path, compiled: list[CudaCode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert [CudaCode(source).compiled() for _ in range(2)] == [b"1", b"2"]
