"""Runs the kernels in CUDA C++ on a CPU, to test what they compute and whether their threads wait where they must.

    def test_it(cuda_emulator: CudaEmulator) -> None:  # the fixture of tests/kernels; skips without a C++ compiler
        kernel = cuda_emulator.kernel(SOURCE, "name", ("COLUMNS=64",), {"generated.h": text})
        kernel.launch(programs, threads, shared_bytes, (tensor_map(x, 64, 64), work), seed=3, written_before=[x])

or, to run a module that launches through nvrtc.py as it is: `cuda_emulator.install(monkeypatch, module)`.

    translate   CUDA C++ to C++; inline PTX becomes calls, so a kernel's own wrappers of PTX are what runs
    build       the machine's C++ compiler, with a cache
    launch      launches, tensor maps
    guarded     tensors beyond whose end is no memory
    cpp/        the machine: machine.h first, scheduler, memory, warps, copies, launch; cuda.h, ptx*.h: the language

A kernel that needs another instruction gets a C++ error that names it: add it to `cpp/ptx*.h` under that name.

**Modelled.** Each CUDA thread is a fiber. It runs until it waits, and now and then gives way after an arrival or the
start of a copy. A seed decides which thread goes on, and makes some warps and programs much slower than others.

- Shared memory begins as NaN (bytes of ones). Addresses that instructions use are checked for bounds and alignment.
- Lanes meet at shuffles, votes, `__syncwarp`, ldmatrix, stmatrix, mma.sync; different instructions of one mask fail.
- `__syncthreads`, named barriers, the cluster's barrier, memory of other programs. mbarriers with arrivals, bytes and
  parity; a write over one is noticed.
- Bulk copies, boxes of tensor maps of two or four dimensions (swizzled, zeros outside), multicast, cp.async: the target
  is NaN from the start of a copy, and its parts arrive at any later point. They may read their source then, or at the
  start.
- wgmma with A described, along K or M, or in registers, B along K or N: the sums are NaN until the wait, operands in
  shared memory are read at any point before it, and a product begins when all four warps have issued it.
- `griddepcontrol.wait`: tensors of `written_before` are NaN until then.
- Global memory: what is beyond the end of a tensor that was made by `guarded` is not there.
- A deadlock, or an end with copies or products under way, is an error that names where each warp waits.

**Not modelled.** The order of plain loads and stores (a missing fence, a missing fence.proxy.async): a thread's plain
accesses between two waits happen at once, and an instruction of a whole warp, as ldmatrix, orders those of its lanes
(a missing `__syncwarp` before it). Whether a warp is converged at `.aligned` instructions. Registers of A that
are overwritten during a product. Banks, caches, speed, numbers of registers. Sums are rounded in another order than a
GPU's; __expf and __fdividef are exact.
"""

from emulators.cuda.guarded import guarded
from emulators.cuda.launch import CudaEmulator, EmulatorError, Kernel, tensor_map

__all__ = ["CudaEmulator", "EmulatorError", "Kernel", "guarded", "tensor_map"]
