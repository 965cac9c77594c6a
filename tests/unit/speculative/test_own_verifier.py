"""A verifier of one's own: typical acceptance as in examples/06_typical_acceptance.py, and flags that it refuses."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.given_logits import GivenLogits, window_of

from overlap_spec.config import AcceptSettings
from overlap_spec.errors import ConfigError
from overlap_spec.sampling.context import SamplingWork
from overlap_spec.speculative.interfaces import SlotBatch
from overlap_spec.speculative.methods import Method, method_named
from overlap_spec.speculative.verification import MATCH, VERIFICATIONS, Verification, VerifierInputs
from overlap_spec.speculative.verifiers import ChainVerifier

EXAMPLE = Path(__file__).parents[3] / "examples" / "06_typical_acceptance.py"
VOCAB, WIDTH, SLOTS = 12, 4, 64
TOKENS = torch.arange(VOCAB)
INPUTS = VerifierInputs(AcceptSettings(), TOKENS)
REFUSED = {
    "speculative_accept_threshold_single": AcceptSettings(threshold_single=0.5),
    "speculative_accept_threshold_acc": AcceptSettings(threshold_acc=0.5),
    "speculative_use_rejection_sampling": AcceptSettings(rejection=True),
}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("typical_acceptance", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some_windows() -> tuple[torch.Tensor, GivenLogits]:
    """Windows with a guess missing here and there; logits from flat to peaked."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(-1, VOCAB, (SLOTS, WIDTH), generator=random).clamp_(min=-1)
    tokens[:, 0] = 1
    sharpness = torch.linspace(0.1, 6, SLOTS, dtype=torch.float64)[:, None, None]
    return tokens, GivenLogits(torch.randn(SLOTS, WIDTH, VOCAB, generator=random, dtype=torch.float64) * sharpness)


def test_at_a_temperature_a_guess_is_accepted_if_it_is_typical_or_drawn(example: ModuleType, make_batch) -> None:
    tokens, logits = some_windows()
    batch = make_batch([7] * SLOTS, temperature=0.8)
    drawn = example.TypicalVerifier(INPUTS).verify(window_of(tokens, 7), logits, batch)
    plain = ChainVerifier(TOKENS).verify(window_of(tokens, 7), logits, batch).tokens
    assert drawn.accept_len is None
    seen = set()
    for slot in range(SLOTS):
        for column in range(WIDTH):
            guess = int(tokens[slot, column + 1]) if column + 1 < WIDTH else -1
            weights = [math.exp(float(logit) / 0.8) for logit in logits.given[slot, column]]
            p = [weight / sum(weights) for weight in weights]
            entropy = -sum(each * math.log(each) for each in p)
            typical = guess >= 0 and p[guess] > min(example.EPSILON, example.DELTA * math.exp(-entropy))
            assert drawn.tokens[slot, column] == (guess if typical else plain[slot, column])
            seen.add((guess >= 0, typical, guess == int(plain[slot, column])))
    assert seen >= {(True, True, False), (True, True, True), (True, False, False), (False, False, False)}


@pytest.mark.parametrize("mixed", [False, True], ids=["greedy steps", "beside sampled requests"])
def test_greedy_requests_are_given_the_argmax(example: ModuleType, make_batch, mixed: bool) -> None:
    tokens, logits = some_windows()
    batch: SlotBatch = make_batch([7] * SLOTS)
    batch = replace(batch, sampling=replace(batch.sampling, work=SamplingWork(mixed, False, False)))
    drawn = example.TypicalVerifier(INPUTS).verify(window_of(tokens, 7), logits, batch)
    assert torch.equal(drawn.tokens, logits.given.argmax(2))


def test_what_it_is_called_says_that_it_is_lossy(example: ModuleType) -> None:
    (verification,) = example.TYPICAL.verifications
    assert verification.describe(AcceptSettings()) == "typical acceptance: LOSSY at temperature > 0"
    assert replace(verification, is_lossy=False).describe(AcceptSettings()) == "typical acceptance (exact)"


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_ask_for_another_verifier_are_refused_by_name(example: ModuleType, flag: str) -> None:
    method: Method = example.TYPICAL
    assert method.verification(AcceptSettings()) is method.verifications[0]
    message = f"--{flag.replace('_', '-')}: TYPICAL judges its guesses by typical acceptance; leave it out"
    with pytest.raises(ConfigError, match=message):
        method.verification(REFUSED[flag])


@pytest.mark.parametrize("flag", REFUSED)
def test_methods_of_this_package_and_those_that_say_nothing_have_them_all(flag: str) -> None:
    own = Method("OWN", 0, lambda spec, target, progress: pytest.fail("nothing is loaded"))
    for method in (method_named("EAGLE3"), own):
        assert flag in method.verification(REFUSED[flag]).flags
    matching = replace(own, verifications=(MATCH,))
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: OWN judges its guesses by matching alone"):
        matching.verification(REFUSED[flag])


def test_a_method_may_offer_its_own_beside_the_others(example: ModuleType) -> None:
    (typical,) = example.TYPICAL.verifications
    method = replace(example.TYPICAL, verifications=(typical, *VERIFICATIONS))
    assert method.verification(AcceptSettings()) is typical
    assert method.verification(REFUSED["speculative_use_rejection_sampling"]) is VERIFICATIONS[-1]


def test_what_judges_chains_is_given_no_trees(example: ModuleType) -> None:
    (typical,) = example.TYPICAL.verifications
    trees = replace(INPUTS, has_trees=True)
    with pytest.raises(ConfigError, match="--speculative-eagle-topk: typical acceptance judges chains: use 1"):
        typical.verifier(trees)
    rejection = replace(trees, accept=AcceptSettings(rejection=True))
    with pytest.raises(
        ConfigError, match="--speculative-use-rejection-sampling: judges chains: use --speculative-eagle"
    ):
        VERIFICATIONS[-1].verifier(rejection)
    assert isinstance(
        Verification(lambda inputs: ChainVerifier(TOKENS), judges_trees=True).verifier(trees), ChainVerifier
    )
