"""Which kernels run a model on a device, in words: by capability, so that no GPU is needed to ask.

The bounds are those of the ops (`kernels/overlap_spec_kernels`); a test compares them with what the ops ask the device.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from overlap_spec.models.layers.linear import AnyLinear, DenseLinear
from overlap_spec.worker.sizing.geometry import LoadedModels

HOPPER = (9, 0)
SIXTEEN_BITS = ("bfloat16", "float16")


def depends(capability: tuple[int, int]) -> bool:
    """Whether launches may begin before the one ahead has ended, and kernels in Gluon run."""
    return capability >= HOPPER


def has_warpgroups(capability: tuple[int, int]) -> bool:
    """Whether the kernel in CUDA C++ runs, which is compiled for sm_90a."""
    return capability == HOPPER


def kernels_of(models: LoadedModels, dtype: str, capability: tuple[int, int] | None) -> dict[str, str]:
    """By what they compute. `capability`: of the GPU; None on a CPU."""
    rows = {f"linears in {name}": text for name, text in _linears(models, dtype, capability)}
    return rows | (_on_cpu() if capability is None else _on_gpu(dtype, capability))


def _linears(models: LoadedModels, dtype: str, capability: tuple[int, int] | None) -> Iterator[tuple[str, str]]:
    formats = Counter(type(linear) for linear in linears_in((models.target, models.proposer)))
    for kind, count in formats.items():
        if not issubclass(kind, DenseLinear):
            yield f"{kind.__name__} ({count})", (kind.__doc__ or "").split("\n")[0].rstrip(".")
        elif capability is None:
            yield f"{dtype} ({count})", "oneDNN or BLAS, the form that is fastest when timed at start"
        else:
            yield f"{dtype} ({count})", _dense(dtype, capability)


def _dense(dtype: str, capability: tuple[int, int]) -> str:
    few = "streamed_linear (Gluon)" if depends(capability) else "whole_rows_linear (Triton), else a BLAS"
    if dtype not in SIXTEEN_BITS or not depends(capability):
        return f"few rows {few}; more rows a BLAS"
    more = "17 to 128 rows warpgroup_linear (Gluon); " if has_warpgroups(capability) else ""
    wide = "; gates and argmax of many rows wide_linear (CUDA C++)" if has_warpgroups(capability) else ""
    return f"few rows whole_rows_linear (Triton) and {few}; {more}more rows a BLAS{wide}"


def _on_cpu() -> dict[str, str]:
    return {"attention": "torch, over gathered pages", "drawing": "torch"}


def _on_gpu(dtype: str, capability: tuple[int, int]) -> dict[str, str]:
    ring = depends(capability) and dtype in SIXTEEN_BITS
    long_chunks = "; chunks of 1,536 rows or more cuDNN (chunk_attention)" if ring else ""
    return {
        "attention, decode": f"decode_attention ({'Gluon' if ring else 'Triton'}), trees tree_attention",
        "attention, prompts": f"paged_attention (Triton){long_chunks}",
        "launches": "dependent, in CUDA graphs" if depends(capability) else "in CUDA graphs",
    }


def linears_in(node: object) -> Iterator[AnyLinear]:
    """Every linear below a tree of dataclasses and tuples, shared ones as often as they are there."""
    if isinstance(node, AnyLinear):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from linears_in(child)
    elif is_dataclass(node) and not isinstance(node, type):
        for field in fields(node):
            yield from linears_in(getattr(node, field.name))
