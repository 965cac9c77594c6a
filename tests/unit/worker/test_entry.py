"""The worker's process opens the GPU and Triton, and starts compilers, before it imports torch, and needs neither."""

import asyncio
import ctypes
import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from overlap_spec.worker import entry, worker_actor


class Driver:
    """Notes what is asked of it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.called: list[str] = []

    def cuInit(self, flags: int) -> int:
        self.called.append("init")
        return self.status

    def cuDeviceGet(self, device: object, ordinal: int) -> int:
        self.called.append(f"device {ordinal}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: object) -> int:
        self.called.append("context")
        return 0


@pytest.mark.parametrize(("status", "called"), [(0, ["init", "device 1", "context"]), (100, ["init"])])
def test_the_context_of_a_ranks_gpu(status: int, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(status)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    entry.open_gpu(1)
    assert driver.called == called


@pytest.mark.parametrize(("device", "opened"), [("cpu", 0), ("cuda", 1)])
def test_collections_go_on_when_the_worker_is_imported(
    device: str, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    async def main(context: object, compilers: object) -> None:
        seen.extend((gc.isenabled(), compilers))

    monkeypatch.setattr(worker_actor, "main", main)
    monkeypatch.setattr(entry, "started_compilers", lambda settings: f"compilers for {settings.model.device}")
    monkeypatch.setattr(
        entry.threading,
        "Thread",
        lambda target, daemon, args=(): SimpleNamespace(start=lambda: seen.append((target, *args))),
    )
    context = SimpleNamespace(role="worker-1", settings=SimpleNamespace(model=SimpleNamespace(device=device)))
    try:
        asyncio.run(entry.main(context))
    finally:
        gc.unfreeze()
    threads = [(entry.open_gpu, 1), (entry.open_compiler,), (entry.open_blas, 1)]
    assert seen == threads * opened + [True, f"compilers for {device}"]


@pytest.mark.parametrize("there", [True, False])
def test_a_product_on_a_ranks_gpu(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Ones:
        def __init__(self, *_: int, device: object, **__: object) -> None:
            asked.append(device)
            if not there:
                raise RuntimeError("no GPU")

        def __matmul__(self, other: object) -> None:
            asked.append(other is self)

    monkeypatch.setattr(torch, "ones", Ones)
    entry.open_blas(1)
    assert asked == [torch.device("cuda", 1), True][: 1 + there]


def test_triton_has_read_its_files_without_torch() -> None:
    pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")
    program = (
        "import sys; from overlap_spec.worker.entry import open_compiler; open_compiler();"
        "from triton.runtime.cache import triton_key; print(triton_key.cache_info().currsize, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "False"]
