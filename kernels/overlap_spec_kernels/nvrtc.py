"""Compiles and launches kernels in CUDA C++, for operations that Triton and Gluon cannot express.

NVRTC compiles the kernels, and NVIDIA's `cuda-bindings` launches them. PyTorch for CUDA (2.10 and later) installs both,
so neither nvcc nor a host compiler is needed. Where they are missing, `runs_hopper` is false and callers use other
kernels. Machine code is kept in Triton's cache, beside that of the other kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import capability_of, only_compiles

_OPTIONS = ("-std=c++17", "--gpu-architecture=sm_90a", "-default-device")
_ABOUT_PRODUCTS = b"(C75"  # messages of the assembler: products that follow one another, waits that it put in
_MAP_TYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.int64: "INT64",
    torch.uint8: "UINT8",
}
_MANY = 1 << 16  # clusters, where nothing is launched
SHARED_SOURCES = Path(__file__).parent / "cuda"  # headers that any source may include


def runs_hopper(device: torch.device) -> bool:
    """Whether kernels for sm_90a can be compiled and run on `device`; only Hopper has these warpgroup products."""
    return capability_of(device) == (9, 0) and (device.type == "meta" or _has_bindings())


@functools.cache
def _has_bindings() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


class TensorMap(ctypes.Structure):
    """The copy engine's description of a matrix, opaque."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(matrix: Tensor, rows: int, columns: int, swizzle: int = 128) -> TensorMap:
    """The map for tiles of `rows` x `columns` of a matrix. Outside it, reads give zero.

    Shapes: matrix [R, C], rows of C contiguous, 16-byte aligned and spaced. Units: `swizzle` in bytes, 128 or 0 (none).
    """
    return box_map(matrix, (rows, columns), swizzle)


def box_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128) -> TensorMap:
    """The map for boxes of a tensor of two dimensions or more, whose last is contiguous; as `tensor_map`."""
    from cuda.bindings import driver

    mode, item = driver.CUtensorMapSwizzle, tensor.element_size()
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[tensor.dtype]}"),
            tensor.dim(),
            tensor.data_ptr(),
            [driver.cuuint64_t(size) for size in reversed(tensor.shape)],
            [driver.cuuint64_t(stride * item) for stride in reversed(tensor.stride()[:-1])],
            [driver.cuuint32_t(size) for size in reversed(box)],
            [driver.cuuint32_t(1)] * tensor.dim(),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            mode.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else mode.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(made.getPtr(), ctypes.sizeof(TensorMap)))


class CudaCode(NamedTuple):
    """What machine code is made from: a source file, which may include files beside it, names and other headers."""

    source: Path
    defines: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()  # names and texts

    def compiled(self) -> bytes:
        """Machine code, which is kept for the next process.

        Warns if the assembler made a kernel wait for products where its source does not.

        Raises: RuntimeError with the compiler's messages.
        """
        place = self._place()
        if place is not None and place.exists():
            return place.read_bytes()
        code = self._compile()
        if place is not None:
            _keep(place, code)
        return code

    def _place(self) -> Path | None:
        """Where it is kept: the name tells of all that it is made from. None without Triton."""
        folder = _cache_of_triton()
        if folder is None:
            return None
        texts = list(source_texts(self.source).values())
        made_from = (_compiler_version(), _OPTIONS, self.defines, self.headers, texts)
        key = hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]
        return folder / f"{self.source.stem}-{key}.cubin"

    def _compile(self) -> bytes:
        from cuda.bindings import nvrtc

        source, defines = self.source, (f"-D{define}" for define in self.defines)
        options = [option.encode() for option in (*_OPTIONS, f"-I{source.parent}", f"-I{SHARED_SOURCES}", *defines)]
        names, texts = ([pair[i].encode() for pair in self.headers] for i in range(2))
        given = source.read_bytes(), source.name.encode(), len(names), texts, names
        program = _checked(nvrtc.nvrtcCreateProgram(*given))
        status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))  # written in place: `b" " * 1` is shared
        nvrtc.nvrtcGetProgramLog(program, log)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source.name}: {log.decode()}")
        if _ABOUT_PRODUCTS in log:
            warnings.warn(f"{source.name}: {log.decode()}", RuntimeWarning, stacklevel=3)
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        _checked(nvrtc.nvrtcDestroyProgram(program))
        return bytes(code)


def source_texts(source: Path) -> dict[str, str]:
    """The texts of a source and of all headers that it may include, by name."""
    headers = (path for folder in (source.parent, SHARED_SOURCES) for path in sorted(folder.glob("*.cuh")))
    return {path.name: path.read_text() for path in (source, *headers)}


_COMPILER: ContextVar[Callable[[CudaCode], Any]] = ContextVar("compiler", default=CudaCode.compiled)


@contextlib.contextmanager
def compiling_with(compiler: Callable[[CudaCode], Any]) -> Iterator[None]:
    """In this block `compiler` gives the machine code of kernels that are loaded.

    In a block that only compiles, it is called with the code of each kernel that would be launched.
    """
    token = _COMPILER.set(compiler)
    try:
        yield
    finally:
        _COMPILER.reset(token)


def _compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    version: tuple[int, int] = _checked(nvrtc.nvrtcVersion())
    return version


def _cache_of_triton() -> Path | None:
    try:
        import triton
    except ImportError:
        return None
    return Path(triton.knobs.cache.dir) / "overlap-spec-cuda"


def _keep(place: Path, code: bytes) -> None:
    """Whole or not at all, since others may read it; where nothing can be written, nothing is kept."""
    written = place.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(code)
        written.replace(place)


class CudaKernel:
    """A kernel of the current device: `kernel.launch(programs, arguments)` on its current stream.

    It is compiled when it is first needed.
    """

    def __init__(self, code: CudaCode, name: str, threads: int, shared: int) -> None:
        """`threads` per program; `shared`: bytes of shared memory beside those that the code itself declares."""
        self._code, self._name, self._threads, self._shared = code, name, threads, shared
        self._clusters: dict[int, int] = {}  # that run at once, by their size

    @functools.cached_property
    def _function(self) -> Any:
        from cuda.bindings import driver

        module = _checked(driver.cuModuleLoadData(_COMPILER.get()(self._code)))
        function = _checked(driver.cuModuleGetFunction(module, self._name.encode()))
        names = driver.CUfunction_attribute
        # Memory of a multiprocessor is divided into shared memory and L1 cache anew only while it runs nothing. So a
        # kernel that needs much of it begins beside one that needs little only if that asks for the same division.
        for name, value in (
            (names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared),
            (names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),  # per cent
        ):
            _checked(driver.cuFuncSetAttribute(function, name, value))
        return function

    def load(self) -> Any:
        """The function, compiled and loaded: no launch waits then. Where nothing is launched, it is only compiled."""
        return _COMPILER.get()(self._code) if only_compiles() else self._function

    def launch(self, programs: int, arguments: tuple[ctypes.Structure, ...]) -> None:
        """Launch as a dependent kernel: it begins while the previous one runs, and waits for it itself. Sync: never."""
        function = self.load()
        if only_compiles():
            return
        from cuda.bindings import driver

        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _checked(driver.cuLaunchKernelEx(self._config(programs), function, ctypes.addressof(pointers), 0))

    def clusters_at_once(self, size: int) -> int:
        """Number of clusters of so many programs that the device has room for."""
        if only_compiles():
            return _MANY
        from cuda.bindings import driver

        if size not in self._clusters:
            config = self._config(size)
            shape = driver.CUlaunchAttribute()
            shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = size, 1, 1
            config.attrs, config.numAttrs = [shape], 1
            self._clusters[size] = _checked(driver.cuOccupancyMaxActiveClusters(self._function, config))
        return self._clusters[size]

    def _config(self, programs: int) -> Any:
        from cuda.bindings import driver

        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [early], 1
        return config


def _checked(answer: tuple[Any, ...]) -> Any:
    """The result of a driver or compiler call without its status. Raises: RuntimeError if the call failed."""
    status, *values = answer
    if status != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
