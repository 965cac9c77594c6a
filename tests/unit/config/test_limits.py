"""The configuration, which imports no torch, repeats limits of the kernels, which import nothing of the project."""

from overlap_spec_kernels import limits
from overlap_spec_kernels.ngram.ngram_log import PAGE

from overlap_spec.config import speculation
from overlap_spec.config.resolve import ngram, numbers


def test_the_configuration_has_the_limits_of_the_kernels() -> None:
    assert numbers.MAX_TREE_TOKENS == limits.MAX_TREE_WIDTH
    assert numbers.MAX_TOPK == limits.MAX_TOPK
    assert ngram.MAX_CHAIN_TOKENS == limits.MAX_CHAIN_WIDTH
    assert speculation.MAX_MATCH == limits.MAX_MATCH


def test_the_longest_match_and_what_follows_it_fit_into_half_a_page_of_the_log() -> None:
    assert 2 * (speculation.MAX_MATCH + speculation.MAX_BRANCH) <= PAGE
