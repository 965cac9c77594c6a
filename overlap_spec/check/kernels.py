"""Which kernels run a model on a device, in words.

Ops are asked on the device `meta`, which is taken for the GPU that `assuming` names, or for a CPU.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from overlap_spec_kernels.launch import capability_of, runs_gluon
from overlap_spec_kernels.linear.packing import Order
from overlap_spec_kernels.nvrtc import runs_hopper

from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.quantization.grouped import GroupedLinear
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.worker.startup.geometry import LoadedModels

META = torch.device("meta")
QUANTISED = {
    Order.ROWS: "up to 64 rows quantized_stream, 17 to 128 of 8 bits quantized_tiles (Gluon), dequantised in registers;"
    " more rows dequantize, then a BLAS",
    Order.FRAGMENTS: "up to 16 rows packed_stream, 9 to 128 packed_products (CUDA C++), dequantised in registers; more"
    " rows dequantize, then a BLAS",
}
GROUPED = "grouped_linear (C++, compiled at the first start; float32 where there is no compiler)"
SIXTEEN_BITS = ("bfloat16", "float16")


def kernels_of(models: LoadedModels, dtype: str) -> dict[str, str]:
    """By what they compute."""
    rows = {f"linears in {name}": text for name, text in _linears(models, dtype)}
    return rows | (_on_cpu() if capability_of(META) is None else _on_gpu(dtype))


def _linears(models: LoadedModels, dtype: str) -> Iterator[tuple[str, str]]:
    formats = Counter((_format(each), _order(each)) for each in linears_in((models.target, models.proposer)))
    for (packing, order), count in formats.items():
        if packing is not None:
            yield f"{packing} ({count})", GROUPED if capability_of(META) is None else QUANTISED[order]
        elif capability_of(META) is None:
            yield f"{dtype} ({count})", "oneDNN or BLAS, the form that is fastest when timed at start"
        else:
            yield f"{dtype} ({count})", _dense(dtype)


def _format(linear: AnyLinear) -> str | None:
    """None for a matrix of the model's type."""
    if isinstance(linear, GroupedLinear):
        return f"{', '.join(sorted({str(part.bits) for part in linear.operand.parts}))} bits of a .gguf file"
    if not isinstance(linear, QuantizedLinear):
        return None
    packing = linear.operand.packing
    return f"{packing.bits} bits, " + (f"groups of {packing.group}" if packing.group else "a scale for each row")


def _order(linear: AnyLinear) -> Order:
    return linear.operand.packing.order if isinstance(linear, QuantizedLinear) else Order.ROWS


def _dense(dtype: str) -> str:
    few = "streamed_linear (Gluon)" if runs_gluon(META) else "whole_rows_linear (Triton), else a BLAS"
    if dtype not in SIXTEEN_BITS or not runs_gluon(META):
        return f"few rows {few}; more rows a BLAS"
    more = "17 to 128 rows warpgroup_linear (Gluon); " if runs_hopper(META) else ""
    wide = "; gates and argmax of many rows wide_linear (CUDA C++)" if runs_hopper(META) else ""
    return f"few rows whole_rows_linear (Triton) and {few}; {more}more rows a BLAS{wide}"


def _on_cpu() -> dict[str, str]:
    return {"attention": "torch, over gathered pages", "drawing": "torch"}


def _on_gpu(dtype: str) -> dict[str, str]:
    ring = runs_gluon(META) and dtype in SIXTEEN_BITS
    in_tiles = ring and runs_hopper(META)
    chunks = "; from 64 rows on, with heads of 64 or 128 in 16 bits, paged_chunks (CUDA C++)" if in_tiles else ""
    long_chunks = f"; {'others' if in_tiles else 'chunks'} from 1,536 rows on cuDNN (chunk_attention)" if ring else ""
    short = "; few requests of at most 2,048 tokens in bfloat16 short_decode (CUDA C++)" if in_tiles else ""
    return {
        "attention, decode": f"decode_attention ({'Gluon' if ring else 'Triton'}){short}, trees tree_attention",
        "attention, prompts": f"paged_attention (Triton){chunks}{long_chunks}",
        "launches": "dependent, in CUDA graphs" if runs_gluon(META) else "in CUDA graphs",
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
