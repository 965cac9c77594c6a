"""Machine code of kernels in CUDA C++: what the compiler writes, and that it is kept in Triton's cache."""

import ctypes
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from overlap_spec_kernels import nvrtc
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, compiling_with
from support.shared_bytes import damaged

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


class Compiler(ModuleType):
    """NVRTC's functions as `cuda.bindings` has them: each writes where it is told, into bytes as well."""

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)
    results: ClassVar[dict[str, bytes]] = {"ProgramLog": b"\0", "CUBIN": b"\x7fELF"}  # nothing is said: its end alone

    def __getattr__(self, name: str) -> object:
        if name.startswith("nvrtcGet"):
            result = self.results[name.removeprefix("nvrtcGet").removesuffix("Size")]
            return (lambda _: (0, len(result))) if name.endswith("Size") else lambda _, place: write(result, place)
        return lambda *_: (0, "program")


def write(result: bytes, place: bytes | bytearray) -> tuple[int]:
    kind = "Bytes" if isinstance(place, bytes) else "ByteArray"
    address = getattr(ctypes.pythonapi, f"Py{kind}_AsString")
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object]
    ctypes.memmove(address(place), result, len(result))
    return (0,)


def test_the_compiler_writes_into_nothing_that_others_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has one object for all bytes of one character, and a code object has its constants for every call."""
    compiler = Compiler("cuda.bindings.nvrtc")
    bindings = ModuleType("cuda.bindings")
    monkeypatch.setattr(bindings, "nvrtc", compiler, raising=False)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), (compiler.__name__, compiler)):
        monkeypatch.setitem(sys.modules, name, module)
    constants = [constant for constant in CudaCode._compile.__code__.co_consts if isinstance(constant, bytes)]
    before = [bytes(bytearray(constant)) for constant in constants]
    codes = [CudaCode(source)._compile() for _ in range(2)]
    assert codes == 2 * [b"\x7fELF"] and [type(code) for code in codes] == [bytes, bytes]
    assert constants == before and damaged() == []


def test_a_kernel_compiles_without_a_word(source: Path, nvrtc: None) -> None:
    source.write_text('extern "C" __global__ void one(int* place) { *place = 1; }')
    assert CudaCode(source)._compile().startswith(b"\x7fELF")
    assert damaged() == []


def test_what_the_compiler_says_is_raised(source: Path, nvrtc: None) -> None:
    source.write_text("no kernel")
    with pytest.raises(RuntimeError, match=r"a\.cu: a\.cu\(1\): error"):
        CudaCode(source)._compile()


class Driver(ModuleType):
    """The driver's functions, which do nothing. Notes the machine code that it is given, and attributes."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="limit",
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="share",
    )
    given: ClassVar[list[bytes]] = []
    attributes: ClassVar[dict[str, int]] = {}

    def cuModuleLoadData(self, code: bytes) -> tuple[int, str]:
        self.given.append(code)
        return 0, "module"

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[int]:
        self.attributes[attribute] = value
        return (0,)

    def __getattr__(self, name: str) -> object:
        return lambda *_: (0, "function")


def test_a_kernel_is_loaded_as_the_block_has_it_compiled(
    source: Path, compiled: list[CudaCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, bindings = Driver("cuda.bindings.driver"), ModuleType("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", driver, raising=False)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), (driver.__name__, driver)):
        monkeypatch.setitem(sys.modules, name, module)
    with compiling_with(lambda code: b"compiled elsewhere"):
        assert CudaKernel(CudaCode(source), "a", 128, 0)._function == "function"
    assert CudaKernel(CudaCode(source), "a", 128, 1024)._function == "function"
    assert driver.attributes == {"limit": 1024, "share": 100}  # the same share for all: they begin beside each other
    assert driver.given == [b"compiled elsewhere", b"1"] and len(compiled) == 1
