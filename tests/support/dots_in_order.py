"""Products of Triton's interpreter that add up as tensor cores do: a column of K after the other, onto what is there.

NumPy's BLAS chooses its order by the shapes of a tile, so that under the interpreter as it is a row's bits depend on
the rows beside it whatever a kernel does. With this a row has the same bits in all tiles, unless K or the keys are
divided by the number of rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime import interpreter


def _in_order(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    total = d.data.copy()
    left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
    for k in range(left.shape[-1]):
        total += left[..., :, k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


@contextmanager
def dots_in_order() -> Iterator[None]:
    """In this block, for kernels under the interpreter."""
    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", _in_order):
        yield
