"""Compiles and launches kernels in CUDA C++, for operations that Triton and Gluon cannot express.

NVRTC compiles the kernels, and NVIDIA's `cuda-bindings` launches them. PyTorch for CUDA (2.10 and later) installs both,
so neither nvcc nor a host compiler is needed. Where they are missing, `runs_hopper` is false and callers use other
kernels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec_kernels.launch import capability_of

_OPTIONS = ("-std=c++17", "--gpu-architecture=sm_90a", "-default-device")
_ABOUT_PRODUCTS = b"(C75"  # messages of the assembler: products that follow one another, waits that it put in
_MAP_TYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.int64: "INT64",
}


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
    from cuda.bindings import driver

    mode = driver.CUtensorMapSwizzle
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[matrix.dtype]}"),
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(size) for size in (matrix.shape[1], matrix.shape[0])],
            [driver.cuuint64_t(matrix.stride(0) * matrix.element_size())],
            [driver.cuuint32_t(size) for size in (columns, rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            mode.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else mode.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(made.getPtr(), ctypes.sizeof(TensorMap)))


class CudaKernel:
    """A kernel of the current device: `kernel.launch(programs, arguments)` on its current stream."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        """`threads` per program; `shared`: bytes of shared memory beside those that the code itself declares."""
        from cuda.bindings import driver

        self._threads, self._shared = threads, shared
        self._module = _checked(driver.cuModuleLoadData(code))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, limit, shared))
        self._clusters: dict[int, int] = {}  # that run at once, by their size

    def launch(self, programs: int, arguments: tuple[ctypes.Structure, ...]) -> None:
        """Launch as a dependent kernel: it begins while the previous one runs, and waits for it itself. Sync: never."""
        from cuda.bindings import driver

        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _checked(driver.cuLaunchKernelEx(self._config(programs), self._function, ctypes.addressof(pointers), 0))

    def clusters_at_once(self, size: int) -> int:
        """Number of clusters of so many programs that the device has room for."""
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


def compiled(source: Path, defines: tuple[str, ...], headers: dict[str, str]) -> bytes:
    """Machine code of a source file, which may include files beside it, and `headers` by name.

    Warns if the assembler made a kernel wait for products where its source does not.

    Raises: RuntimeError with the compiler's messages.
    """
    from cuda.bindings import nvrtc

    options = [*_OPTIONS, f"-I{source.parent}", *(f"-D{define}" for define in defines)]
    names, texts = [name.encode() for name in headers], [text.encode() for text in headers.values()]
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(names), texts, names))
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, log)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{source.name}: {log.decode()}")
    if _ABOUT_PRODUCTS in log:
        warnings.warn(f"{source.name}: {log.decode()}", RuntimeWarning, stacklevel=2)
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def _checked(answer: tuple[Any, ...]) -> Any:
    """The result of a driver or compiler call without its status. Raises: RuntimeError if the call failed."""
    status, *values = answer
    if status != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
