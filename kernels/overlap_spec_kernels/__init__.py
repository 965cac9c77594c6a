"""The fused operations of a decoder layer and around a decode step, each with its plain-torch reference in one file.

An op validates its arguments, runs its kernel on CUDA tensors and its reference (`op_reference`) everywhere else, so a
machine without Triton serves on a CPU.
"""

from overlap_spec_kernels.all_reduce import (
    DTYPES as REDUCED_DTYPES,
    PROGRAMS,
    PeerBuffers,
    all_reduce_add_reference,
    all_reduce_reference,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_add,
    two_shot_all_reduce,
)
from overlap_spec_kernels.attention.chunk_attention import chunk_attention, takes_long_chunks
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention, divide_keys
from overlap_spec_kernels.attention.latent_attention import LatentScratch, latent_attention, latent_tree_attention
from overlap_spec_kernels.attention.move_cache_rows import move_cache_rows
from overlap_spec_kernels.attention.ordered_attention import ordered_attention
from overlap_spec_kernels.attention.ordered_windows import ordered_windows, takes_windows
from overlap_spec_kernels.attention.paged_attention import paged_attention
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write
from overlap_spec_kernels.attention.rope_latent_write import rope_latent_write
from overlap_spec_kernels.attention.rows_on_cpu import HeadsArgument, NearKeys, RowAttention, RowsArgument
from overlap_spec_kernels.attention.trained_chains import (
    attend_own_keys,
    attend_own_keys_back,
    split_rotated,
    split_rotated_back,
)
from overlap_spec_kernels.attention.tree_attention import tree_attention
from overlap_spec_kernels.compile_pool import begin_compiler, compiling_together
from overlap_spec_kernels.compiled_cpu import NoLibraryError
from overlap_spec_kernels.experts.best_of_groups import Grouping, best_of_groups
from overlap_spec_kernels.experts.experts_mlp import Biases, Gate, clamped_mul, experts_add, experts_mlp
from overlap_spec_kernels.experts.products import Clamp
from overlap_spec_kernels.experts.route import route
from overlap_spec_kernels.experts.stacks import ExpertWeight, QuantizedStack, takes_stack
from overlap_spec_kernels.experts.sum_of_experts import Routing, in_tiles, sum_of_experts
from overlap_spec_kernels.launch import NotMadeError, made_before, only_compiles, runs_gluon
from overlap_spec_kernels.limits import MASK_BITS, MAX_CHAIN_WIDTH, MAX_TOP_TOKENS, MAX_TREE_WIDTH, NO_TOKEN
from overlap_spec_kernels.linear.dense import DenseWeight
from overlap_spec_kernels.linear.float4 import Float4Matrices, Float4Weight, dequantised_float4
from overlap_spec_kernels.linear.fused_linear import fused_linear, linear_add, linear_beside, linear_logits
from overlap_spec_kernels.linear.grouped import GroupedKernel, GroupedPart, GroupedWeight
from overlap_spec_kernels.linear.layers_on_cpu import LayerOnCpu, LayersOnCpu
from overlap_spec_kernels.linear.linear_argmax import linear_argmax
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.ordered import OrderedWeight
from overlap_spec_kernels.linear.ordered_quantized import OrderedQuantizedWeight
from overlap_spec_kernels.linear.packing import BIASED, Packing, packed, part_of
from overlap_spec_kernels.linear.quantized import QuantizedWeight, Scratch
from overlap_spec_kernels.logits.columns import forbid_tokens, largest_columns
from overlap_spec_kernels.logits.count_tokens import IN_PROMPT, count_tokens
from overlap_spec_kernels.logits.filter_cutoff import Cutoff, Filters, filter_cutoff, kept_columns
from overlap_spec_kernels.logits.filtered_draw import filtered_draw
from overlap_spec_kernels.logits.guesses_before import RowHistory, guesses_before
from overlap_spec_kernels.logits.gumbel_argmax import Draws, gumbel_argmax
from overlap_spec_kernels.logits.noise import gumbel, mix64, stream, uniform
from overlap_spec_kernels.logits.noisy_logits import noisy_logits
from overlap_spec_kernels.logits.process_logits import LogitRules, neutral_rules, process_logits
from overlap_spec_kernels.logits.reasoning_end import BUDGET_WIDTH
from overlap_spec_kernels.logits.soft_cross_entropy import soft_cross_entropy, token_losses
from overlap_spec_kernels.ngram.ngram_absorb import ngram_absorb
from overlap_spec_kernels.ngram.ngram_log import (
    ALL_BANDS,
    BANDS,
    NgramLimits,
    NgramLog,
    allocate_log,
    clear_log,
    with_slots,
)
from overlap_spec_kernels.ngram.ngram_lookahead import ngram_lookahead
from overlap_spec_kernels.ngram.ngram_match import ngram_match
from overlap_spec_kernels.ngram.ngram_merge import ngram_merge
from overlap_spec_kernels.norm.add_rms_norm import add_normed, add_rms_norm
from overlap_spec_kernels.norm.draft_input import draft_input
from overlap_spec_kernels.norm.embed_norm import embed_norm
from overlap_spec_kernels.norm.norm_heads import norm_all_heads, norm_heads
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised
from overlap_spec_kernels.norm.rms_norm import rms_norm
from overlap_spec_kernels.norm.select_rows import select_rows
from overlap_spec_kernels.norm.silu_mul import gelu_mul, silu_mul
from overlap_spec_kernels.tree.add_children import Candidates, add_children
from overlap_spec_kernels.tree.expand_tree import expand_tree
from overlap_spec_kernels.tree.marginal_tree import marginal_tree
from overlap_spec_kernels.tree.select_tree import select_tree
from overlap_spec_kernels.tree.top_tokens import TopTokens, top_tokens
from overlap_spec_kernels.window.copy_out import copy_out
from overlap_spec_kernels.window.gather_tree import GatheredTree, gather_tree
from overlap_spec_kernels.window.gather_window import GatheredWindow, gather_window
from overlap_spec_kernels.window.judge_chain import judge_chain
from overlap_spec_kernels.window.judge_tree import judge_tree
from overlap_spec_kernels.window.keep_row import keep_row, keep_states
from overlap_spec_kernels.window.log_prob_rows import log_prob_rows
from overlap_spec_kernels.window.mask_logits import mask_logits
from overlap_spec_kernels.window.place_forced import place_forced
from overlap_spec_kernels.window.place_guesses import place_guesses
from overlap_spec_kernels.window.place_tree import place_tree
from overlap_spec_kernels.window.store_tokens import TokenRows, cache_rows, store_tokens
from overlap_spec_kernels.window.synthetic_accept import synthetic_accept
from overlap_spec_kernels.window.verdict import Published, PublishedColumns, Verdict
from overlap_spec_kernels.window.write_slots import CHANGE_FIELDS, SlotTables, write_slots

__all__ = [
    "BIASED",
    "Packing",
    "QuantizedStack",
    "QuantizedWeight",
    "Scratch",
    "keep_row",
    "keep_states",
    "packed",
    "part_of",
    "runs_gluon",
    "BUDGET_WIDTH",
    "CHANGE_FIELDS",
    "IN_PROMPT",
    "MASK_BITS",
    "MAX_CHAIN_WIDTH",
    "MAX_TOP_TOKENS",
    "MAX_TREE_WIDTH",
    "NO_TOKEN",
    "Biases",
    "Candidates",
    "Clamp",
    "Cutoff",
    "DecodeScratch",
    "DenseWeight",
    "Draws",
    "Filters",
    "Float4Matrices",
    "Float4Weight",
    "Gate",
    "GatheredTree",
    "GatheredWindow",
    "GroupedKernel",
    "GroupedPart",
    "GroupedWeight",
    "Grouping",
    "ExpertWeight",
    "HeadsArgument",
    "LatentScratch",
    "LayerOnCpu",
    "LayersOnCpu",
    "LinearOperand",
    "LogitRules",
    "ALL_BANDS",
    "BANDS",
    "NgramLimits",
    "NearKeys",
    "NgramLog",
    "NoLibraryError",
    "NotMadeError",
    "OrderedQuantizedWeight",
    "OrderedWeight",
    "Norm",
    "Normed",
    "PROGRAMS",
    "PeerBuffers",
    "REDUCED_DTYPES",
    "RowAttention",
    "RowHistory",
    "Routing",
    "RowsArgument",
    "SlotTables",
    "TokenRows",
    "TopTokens",
    "Published",
    "PublishedColumns",
    "Verdict",
    "add_children",
    "add_normed",
    "add_rms_norm",
    "all_reduce_add_reference",
    "all_reduce_reference",
    "allocate_log",
    "begin_compiler",
    "best_of_groups",
    "cache_rows",
    "chunk_attention",
    "clamped_mul",
    "clear_log",
    "compiling_together",
    "copy_out",
    "count_tokens",
    "decode_attention",
    "dequantised_float4",
    "divide_keys",
    "draft_input",
    "embed_norm",
    "expand_tree",
    "experts_add",
    "experts_mlp",
    "filter_cutoff",
    "filtered_draw",
    "forbid_tokens",
    "fused_linear",
    "gather_tree",
    "gather_window",
    "guesses_before",
    "gumbel",
    "gumbel_argmax",
    "in_tiles",
    "judge_chain",
    "judge_tree",
    "kept_columns",
    "largest_columns",
    "latent_attention",
    "latent_tree_attention",
    "linear_add",
    "linear_argmax",
    "linear_beside",
    "linear_logits",
    "log_prob_rows",
    "made_before",
    "marginal_tree",
    "move_cache_rows",
    "ngram_absorb",
    "ngram_match",
    "ngram_merge",
    "ngram_lookahead",
    "neutral_rules",
    "noisy_logits",
    "norm_all_heads",
    "norm_heads",
    "normalised",
    "one_shot_all_gather",
    "one_shot_all_reduce",
    "one_shot_all_reduce_add",
    "only_compiles",
    "ordered_attention",
    "ordered_windows",
    "paged_attention",
    "place_guesses",
    "mask_logits",
    "mix64",
    "place_forced",
    "place_tree",
    "process_logits",
    "rms_norm",
    "route",
    "rope_kv_write",
    "rope_latent_write",
    "select_rows",
    "select_tree",
    "gelu_mul",
    "attend_own_keys",
    "attend_own_keys_back",
    "split_rotated",
    "split_rotated_back",
    "soft_cross_entropy",
    "token_losses",
    "silu_mul",
    "store_tokens",
    "sum_of_experts",
    "stream",
    "synthetic_accept",
    "top_tokens",
    "takes_long_chunks",
    "takes_stack",
    "takes_windows",
    "tree_attention",
    "two_shot_all_reduce",
    "uniform",
    "with_slots",
    "write_slots",
]
