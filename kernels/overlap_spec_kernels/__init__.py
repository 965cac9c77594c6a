"""The fused operations of a decoder layer, each with a Triton kernel and a plain-torch twin in one file.

Not here: models, page allocation, anything of `overlap_spec`. An op validates its arguments, runs its kernel on
CUDA tensors and its twin (`op_reference`) everywhere else, so a machine without Triton serves on a CPU.
"""

from overlap_spec_kernels.add_rms_norm import add_rms_norm
from overlap_spec_kernels.paged_attention import paged_attention
from overlap_spec_kernels.rms_norm import rms_norm
from overlap_spec_kernels.rope_kv_write import rope_kv_write
from overlap_spec_kernels.silu_mul import silu_mul

__all__ = ["add_rms_norm", "paged_attention", "rms_norm", "rope_kv_write", "silu_mul"]
