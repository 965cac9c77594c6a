"""The bounds of the flags are those of the kernels, which the configuration cannot import."""

from overlap_spec_kernels import MAX_TREE_ROWS, MAX_WIDTH
from overlap_spec_kernels.ngram import ngram_log
from overlap_spec_kernels.tree.top_tokens import MAX_TOP

from overlap_spec.config import speculation
from overlap_spec.config.resolve import numbers
from overlap_spec.models.interfaces import MASK_BITS


def test_windows_are_as_wide_as_attention_takes_them() -> None:
    assert numbers.MAX_CHAIN_TOKENS == MAX_WIDTH
    assert numbers.MAX_TREE_TOKENS == MAX_TREE_ROWS == MASK_BITS


def test_a_node_has_as_many_children_as_can_be_ranked() -> None:
    assert numbers.MAX_TOPK == MAX_TOP


def test_matches_of_n_grams_are_as_long_as_the_log_compares() -> None:
    assert (speculation.MAX_MATCH, speculation.MAX_BRANCH) == (ngram_log.MAX_MATCH, ngram_log.MAX_BRANCH)
