"""The operations that a piece of tensor code launches, told apart as a compiler of kernels would."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Operation = tuple[object, ...]


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[Operation] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add((func, *map(_described, tree_leaves((args, kwargs or {})))))
        return func(*args, **(kwargs or {}))


def _described(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride()
    return type(argument) if isinstance(argument, float) else argument


def operations(run: Callable[[], object]) -> set[Operation]:
    """Of a function without arguments: each with sizes and types of its tensors, and its other arguments."""
    counted = _Operations()
    with torch.inference_mode(), counted:
        run()
    return counted.found
