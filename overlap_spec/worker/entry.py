"""Where the worker's process begins: what can go on while torch is imported, which takes seconds, does.

The driver opens the GPU, Triton reads its own files, and processes that will compile kernels start. Then torch opens
its BLAS while the worker's modules are imported.
"""

import contextlib
import ctypes
import gc
import threading

from overlap_spec.config.ranks import rank_of
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker.compilers import started_compilers


async def main(context: ActorContext) -> None:
    """Import the worker and run it (`worker_actor.main`)."""
    rank, on_gpu = rank_of(context.role) or 0, context.settings.model.device == "cuda"
    if on_gpu:
        threading.Thread(target=open_gpu, args=(rank,), daemon=True).start()
        threading.Thread(target=open_compiler, daemon=True).start()
    compilers = started_compilers(context.settings)
    gc.disable()  # imports make many objects and hardly any garbage
    try:
        import torch  # noqa: F401  # before the thread needs it

        if on_gpu:
            threading.Thread(target=open_blas, args=(rank,), daemon=True).start()
        from overlap_spec.worker import worker_actor
    finally:
        gc.freeze()
        gc.enable()
    await worker_actor.main(context, compilers)


def open_gpu(rank: int) -> None:
    """Make the context of a rank's GPU, in which torch will work. What fails here fails there, and is reported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), rank) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def open_blas(rank: int) -> None:
    """Multiply once, as torch's first use of a GPU and its BLAS's take a fifth of a second. See `open_gpu`."""
    import torch

    with contextlib.suppress(Exception):
        matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=torch.device("cuda", rank))
        matrix @ matrix


def open_compiler() -> None:
    """Let Triton hash its own files, 400 MB, for which the first kernel would wait, compiled or not."""
    with contextlib.suppress(ImportError):  # without Triton, or with one that keeps its hash elsewhere
        from triton.runtime.cache import triton_key

        triton_key()
