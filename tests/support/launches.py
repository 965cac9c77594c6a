"""How many kernels tensor code would launch on a GPU, by the function that launches them: no GPU is needed.

Tensors are on the `meta` device, which computes nothing, and ops take the path of a GPU. A Triton kernel counts as one
launch, and so does an operation of torch that makes or changes elements. Views and memory that is not filled are none.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import overlap_spec_kernels
import torch
from overlap_spec_kernels.launch import TritonKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overlap_spec

META = torch.device("meta")
ROOTS = tuple(str(Path(package.__file__ or "").parent) for package in (overlap_spec, overlap_spec_kernels))
UNFILLED = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "device")


class Launches(TorchDispatchMode):
    """While it is active, counts launches by the innermost function of the project."""

    def __init__(self) -> None:
        super().__init__()
        self.by_origin: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        made = any(isinstance(each, Tensor) and each.numel() for each in tree_leaves(result))
        if made and not func.is_view and not name.startswith(UNFILLED):
            self.by_origin[origin()] += 1
        return result

    def kernel(self, *arguments: Any, **options: Any) -> None:
        """In place of a Triton kernel's launch."""
        self.by_origin[origin()] += 1


def origin() -> str:
    """The innermost function of the project that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(ROOTS):
            return f"{Path(code.co_filename).stem}.{code.co_qualname}"
        frame = frame.f_back
    return "test"


def launches(run: Callable[[], object]) -> Counter[str]:
    """Of a function without arguments, whose tensors are on `META`."""
    counted = Launches()
    with _as_on_a_gpu(counted), torch.inference_mode(), counted:
        run()
    return counted.by_origin


@contextmanager
def _as_on_a_gpu(counted: Launches) -> Iterator[None]:
    with patch.object(TritonKernel, "__getitem__", lambda self, grid: counted.kernel):
        patches = [patch.object(module, "runs_triton", lambda tensor: True) for module in _modules_of_ops()]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def _modules_of_ops() -> list[ModuleType]:
    loaded = (module for name, module in sys.modules.items() if name.startswith("overlap_spec_kernels."))
    return [module for module in loaded if hasattr(module, "runs_triton")]


def table(parts: dict[str, Counter[str]]) -> str:
    """Launches of each part, by origin."""
    lines = []
    for part, found in parts.items():
        lines.append(f"{part}: {found.total()}")
        lines += [f"    {count:4d}  {where}" for where, count in found.most_common()]
    return "\n".join(lines)
