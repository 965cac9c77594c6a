"""The bounds of the flags are those of the kernels, which the configuration cannot import."""

from overlap_spec_kernels import limits
from overlap_spec_kernels.ngram.ngram_log import PAGE

from overlap_spec import messages
from overlap_spec.config import speculation
from overlap_spec.config.resolve import numbers


def test_windows_are_as_wide_as_attention_takes_them() -> None:
    assert numbers.MAX_CHAIN_TOKENS == limits.MAX_CHAIN_WIDTH
    assert numbers.MAX_TREE_TOKENS == limits.MAX_TREE_WIDTH == limits.MASK_BITS


def test_what_cannot_be_drawn_has_one_mark() -> None:
    assert messages.NO_TOKEN == limits.NO_TOKEN


def test_a_node_has_as_many_children_as_can_be_ranked() -> None:
    assert numbers.MAX_TOPK == limits.MAX_TOPK


def test_matches_of_n_grams_are_as_long_as_the_log_compares() -> None:
    """A match and what follows it are in one row of the log, which repeats as many tokens of the row before."""
    assert speculation.MAX_MATCH == limits.MAX_MATCH
    assert 2 * (speculation.MAX_MATCH + speculation.MAX_BRANCH) <= PAGE
