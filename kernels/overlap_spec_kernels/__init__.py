"""The fused operations of a decoder layer and around a decode step, each with its plain-torch twin in one file.

Not here: models, page allocation, anything of `overlap_spec`. An op validates its arguments, runs its kernel on
CUDA tensors and its twin (`op_reference`) everywhere else, so a machine without Triton serves on a CPU.
"""

from overlap_spec_kernels.add_rms_norm import add_rms_norm
from overlap_spec_kernels.decode_attention import DecodeScratch, decode_attention
from overlap_spec_kernels.draft_input import draft_input
from overlap_spec_kernels.fused_linear import fused_linear, linear_add, linear_logits
from overlap_spec_kernels.gather_window import gather_window
from overlap_spec_kernels.judge_chain import judge_chain
from overlap_spec_kernels.linear_argmax import linear_argmax
from overlap_spec_kernels.norm_heads import norm_heads
from overlap_spec_kernels.normed import Norm, Normed, normalised
from overlap_spec_kernels.paged_attention import paged_attention
from overlap_spec_kernels.place_guesses import place_guesses
from overlap_spec_kernels.rms_norm import rms_norm
from overlap_spec_kernels.rope_kv_write import rope_kv_write
from overlap_spec_kernels.select_rows import select_rows
from overlap_spec_kernels.silu_mul import silu_mul

__all__ = [
    "DecodeScratch",
    "Norm",
    "Normed",
    "add_rms_norm",
    "decode_attention",
    "draft_input",
    "fused_linear",
    "gather_window",
    "judge_chain",
    "linear_add",
    "linear_argmax",
    "linear_logits",
    "norm_heads",
    "normalised",
    "paged_attention",
    "place_guesses",
    "rms_norm",
    "rope_kv_write",
    "select_rows",
    "silu_mul",
]
