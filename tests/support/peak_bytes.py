"""How much memory a piece of tensor code holds at most, on any device, as seen from the operations that it calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """While it is active, counts the storages that operations have made and that are still alive.

    What an operation takes for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in storages_of(result):
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def storages_of(values: Any) -> list[UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


def peak_bytes(run: Callable[[], object]) -> int:
    """Of a function without arguments, its result included."""
    with torch.inference_mode(), PeakBytes() as counted:
        run()
    return counted.peak
