"""The ways to judge guesses that a method may have, and how the verifier of each is made.

Which one runs is for the flags to say (`AcceptSettings`); what a method does not list, it refuses by the flag's name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from overlap_spec.config import FORCE_GREEDY_NGRAM, LOSSY, AcceptSettings
from overlap_spec.errors import ConfigError
from overlap_spec.sampling.sampler import Draw, draw_columns
from overlap_spec.speculative.interfaces import Verifier
from overlap_spec.speculative.verifiers import (
    ChainVerifier,
    DraftProbs,
    GreedyVerifier,
    Rejection,
    ResidualVerifier,
    Thresholds,
    TreeThresholdVerifier,
)


@dataclass(frozen=True)
class VerifierInputs:
    """What a verifier is made from."""

    accept: AcceptSettings
    token_ids: Tensor  # [V] i64: 0..V - 1, on the device
    has_trees: bool = False  # guesses are trees
    draw: Draw = draw_columns  # draws tokens from logits; compiled with --enable-torch-compile
    probs: DraftProbs | None = None  # what each guess was drawn from, where rejection sampling is asked for


@dataclass(frozen=True)
class Verification:
    """A way to judge guesses.

    `flags`: those that ask for it; none: it runs where no flag asks for another. `name`: what start table, log and
    `/server_info` call it; none: the text of `AcceptSettings`. `is_lossy`: it changes the output's distribution, which
    the name is then followed by. `draws_plainly`: it commits the very tokens that plain decoding draws, so that audits
    can compare them.
    """

    make: Callable[[VerifierInputs], Verifier]
    flags: tuple[str, ...] = ()
    name: str | None = None
    is_lossy: bool = False
    judges_trees: bool = False
    draws_plainly: bool = False

    def describe(self, accept: AcceptSettings) -> str:
        """How log, start table and `/server_info` name it."""
        if self.name is None:
            return str(accept)
        return f"{self.name}: {LOSSY}" if self.is_lossy else f"{self.name} (exact)"

    def verifier(self, inputs: VerifierInputs) -> Verifier:
        """Make it. Raises: ConfigError naming the flag if it cannot judge these guesses."""
        if inputs.has_trees and not self.judges_trees:
            flag = inputs.accept.asked_by
            if flag is not None:
                raise ConfigError(flag, "judges chains: use --speculative-eagle-topk 1")
            raise ConfigError("speculative_eagle_topk", f"{self.name} judges chains: use 1")
        return self.make(inputs)


def _matching(inputs: VerifierInputs) -> Verifier:
    """Matching looks at one column at a time, so that it judges trees as it does chains."""
    return ChainVerifier(inputs.token_ids, inputs.draw)


def _greedy_matching(inputs: VerifierInputs) -> Verifier:
    return GreedyVerifier(_matching(inputs))


def _by_thresholds(inputs: VerifierInputs) -> Verifier:
    rule = Thresholds(inputs.accept.threshold_single, inputs.accept.threshold_acc)
    kind = TreeThresholdVerifier if inputs.has_trees else ResidualVerifier
    return kind(rule, inputs.token_ids)


def _by_rejection(inputs: VerifierInputs) -> Verifier:
    assert inputs.probs is not None and inputs.accept.asked_by is not None
    if not inputs.probs.allocated:
        raise ConfigError(inputs.accept.asked_by, "this method's guesses are not drawn at random")
    return ResidualVerifier(Rejection(inputs.probs), inputs.token_ids)


MATCH = Verification(_matching, judges_trees=True, draws_plainly=True)
GREEDY_MATCH = Verification(_greedy_matching, (FORCE_GREEDY_NGRAM,), judges_trees=True)
THRESHOLDS = Verification(
    _by_thresholds,
    ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
    judges_trees=True,
)
REJECTION = Verification(_by_rejection, ("speculative_use_rejection_sampling",))
VERIFICATIONS = (MATCH, GREEDY_MATCH, THRESHOLDS, REJECTION)


def verification_of(name: str, allowed: tuple[Verification, ...], accept: AcceptSettings) -> Verification:
    """The one of `allowed` that the flags ask for, if they ask. `name`: of the method.

    Raises: ConfigError naming the flag that asks for another one.
    """
    flag = accept.asked_by
    for each in allowed:
        if flag in each.flags or (flag is None and not each.flags):
            return each
    if flag is None:
        raise ConfigError("speculative_algorithm", f"{name} has no verification that runs without a flag")
    own = ", ".join(each.name for each in allowed if each.name is not None) or "matching alone"
    raise ConfigError(flag, f"{name} judges its guesses by {own}; leave it out")
