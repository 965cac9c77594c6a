"""Losses and accepted guesses are those of loops written out: one chain or one block after another."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.reference.dflash import ReferenceDFlash
from support.reference.dspark import ReferenceDSpark
from support.reference.eagle3 import ReferenceHead
from support.tiny.models import VOCAB, load_tiny_target, tiny_target
from support.train_batches import loss_of
from torch import Tensor

from overlap_spec.train_draft.dflash import DFlash, DSpark
from overlap_spec.train_draft.eagle3 import DECAY, STEPS, Eagle3
from overlap_spec.train_draft.head import Batch, Frozen, accept_length
from overlap_spec.train_draft.state import draft_numbers
from overlap_spec.train_draft.steps import Steps

TARGET = tiny_target(7, layers=4)
LOADED = load_tiny_target(TARGET)
EMBED, HEAD = (TARGET.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
FROZEN = Frozen(LOADED, *draft_numbers(TARGET.config, "config.json"), 64)
HIDDEN = LOADED.hidden_size
LENGTHS, STARTS = (14, 9), (4, 1)
AUX = (0, 2, 3)


def batch(seed: int = 1) -> Batch:
    """Two samples of random tokens and states; what is behind the shorter one counts nowhere."""
    random = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS) + 2
    aux, hidden = (torch.randn(*shape, n * HIDDEN, generator=random, dtype=torch.float64) for n in (len(AUX), 1))
    tokens = torch.randint(VOCAB, shape, generator=random)
    return Batch(tokens, aux, hidden, torch.tensor(LENGTHS), torch.tensor(STARTS))


def randomised(head: Any, seed: int = 2) -> Any:
    """The head with every parameter at random: norms around one."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in head.tensors.values():
            drawn = torch.randn(tensor.shape, generator=random)
            tensor.copy_(1 + 0.3 * drawn if tensor.dim() == 1 else drawn * tensor.shape[1] ** -0.5)
    return head


def in_float64(head: Any) -> dict[str, Tensor]:
    """With the way back to the parameters."""
    return {name: tensor.double() for name, tensor in head.tensors.items()}


def check_loss(head: DFlash, given: Batch, expected: Tensor) -> None:
    """The loss, and the gradient of every parameter; `expected`: the loss of loops."""
    gradients = torch.autograd.grad(expected, list(head.tensors.values()))
    loss = loss_of(head, given, 4)
    torch.testing.assert_close(float(loss.detach()), float(expected.detach()), rtol=1e-5, atol=0)
    loss.backward()
    for (name, tensor), gradient in zip(head.tensors.items(), gradients, strict=True):
        assert tensor.grad is not None and gradient.abs().sum() > 0, name
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


class Chains:
    """EAGLE-3's logits of every step of every chain, by its first row: a head that is called token by token."""

    def __init__(self, head: Eagle3, given: Batch) -> None:
        self.ids = head.ids
        config = TARGET.config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX)}}
        tensors = in_float64(head) | head.buffers
        self.reference = ReferenceHead(tensors, config, EMBED)
        self.features = given.aux @ tensors["fc.weight"].T
        self.given = given

    def logits(self, sample: int, first: int) -> list[Tensor]:
        tokens, length = self.given.tokens[sample].tolist(), LENGTHS[sample]
        outputs = self.reference.forward(tokens[1 : first + 2], self.features[sample, : first + 1], 0)
        found = [outputs[-1]]
        for row in range(first + 1, min(first + STEPS, length - 2)):
            found.append(self.reference.forward(tokens[row + 1 : row + 2], found[-1][None], row)[0])
        return [self.reference.logits(output) for output in found]


@pytest.fixture(scope="module")
def eagle3() -> Eagle3:
    ids = torch.arange(VOCAB)[torch.arange(VOCAB) % 8 != 3]
    return randomised(Eagle3(FROZEN, AUX, ids))  # type: ignore[no-any-return]  # the head itself


def test_eagle3s_loss_is_that_of_its_chains(eagle3: Eagle3) -> None:
    given, known = batch(), set(eagle3.ids.tolist())
    chains, errors = Chains(eagle3, given), [[] for _ in range(STEPS)]  # type: ignore[var-annotated]  # of tensors
    for sample, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        for first in range(length - 2):
            for step, logits in enumerate(chains.logits(sample, first)):
                place = first + step + 2
                if start <= place < length and int(given.tokens[sample, place]) in known:
                    probs = (given.hidden[sample, place - 1] @ HEAD[eagle3.ids].T).softmax(0)
                    errors[step].append(-float((probs * logits.detach().log_softmax(0)).sum()))
    expected = sum(DECAY**step * sum(each) / len(each) for step, each in enumerate(errors))
    loss = loss_of(eagle3, given)
    torch.testing.assert_close(float(loss.detach()), expected, rtol=1e-5, atol=0)
    loss.backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in eagle3.tensors.values())


def test_eagle3s_accepted_guesses_are_those_of_its_chains(eagle3: Eagle3) -> None:
    given = batch(3)
    chains = Chains(eagle3, given)
    with torch.no_grad():  # the answers are what the head would guess: a third of them is wrong
        for sample, length in enumerate(LENGTHS):
            for place in range(2, length):
                if place % 3:
                    guess = chains.logits(sample, place - 2)[0].argmax()
                    given.tokens[sample, place] = eagle3.ids[guess]
    accepted = eagle3.accepted(given)
    counts = []
    for sample, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        for root in range(max(start, 1), length - 1):
            guesses = [int(eagle3.ids[logits.argmax()]) for logits in chains.logits(sample, root - 1)]
            right = given.tokens[sample, root + 1 : length].tolist()
            expected = next((n for n, pair in enumerate(zip(guesses, right, strict=False)) if pair[0] != pair[1]), None)
            counts.append(min(len(guesses), len(right)) if expected is None else expected)
            assert int(accepted[sample, root]) == counts[-1], (sample, root)
    assert len(set(counts)) > 2, "guesses that are right, and others that are not"


MASK, BLOCK, LAYERS = 5, 4, len(AUX)


@pytest.fixture(scope="module")
def dflash() -> DFlash:
    return randomised(DFlash(FROZEN, AUX, BLOCK, MASK))  # type: ignore[no-any-return]  # the head itself


def _block(head: DFlash, given: Batch, sample: int, root: int) -> Tensor:
    """After the final norm. Shapes: -> [R, H]."""
    token = given.tokens[sample, root]
    return reference_of(head).hidden(given.aux[sample, None], torch.tensor([root]), token[None], BLOCK)[0]


def reference_of(head: DFlash) -> ReferenceDFlash:
    config = TARGET.config | {
        "num_hidden_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(AUX)},
    }
    return ReferenceDFlash(in_float64(head), config, EMBED, HEAD)


def block_logits(head: DFlash, given: Batch, sample: int, root: int) -> Tensor:
    """Shapes: -> [R, V]."""
    return _block(head, given, sample, root) @ HEAD.T


def drawn_roots(head: DFlash, given: Batch, seed: int) -> Tensor:
    """Shapes: -> [B, N]."""
    count, length = given.tokens.shape
    places = head.places(given, torch.Generator().manual_seed(seed)).view(count, -1)
    assert torch.equal(places // length, torch.arange(count)[:, None].expand_as(places))
    return places % length


def test_dflashs_loss_is_that_of_its_blocks(dflash: DFlash) -> None:
    given = batch()
    roots = drawn_roots(dflash, given, 4)
    drawn = torch.cat([drawn_roots(dflash, given, seed) for seed in range(9)], 1)
    for sample, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        assert set(drawn[sample].tolist()) == set(range(start, length - 1)), "any root, and none without a guess"
    errors, weights = torch.tensor(0.0), 0.0
    for sample, length in enumerate(LENGTHS):
        for root in roots[sample].tolist():
            logits = block_logits(dflash, given, sample, root)
            for ahead in range(1, min(BLOCK, length - root)):
                weight = math.exp(-(ahead - 1) / (BLOCK / 2))
                errors = errors + weight * F.cross_entropy(logits[ahead], given.tokens[sample, root + ahead])
                weights += weight
    check_loss(dflash, given, errors / weights)


def test_dflashs_accepted_guesses_are_those_of_its_blocks(dflash: DFlash) -> None:
    given = batch(3)
    with torch.no_grad():
        for sample, length in enumerate(LENGTHS):
            for place in range(2, length):
                if place % 4:  # what the block of the root before would guess
                    given.tokens[sample, place] = block_logits(dflash, given, sample, place - 1)[1].argmax()
    accepted, seen = dflash.accepted(given), set()
    for sample, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        for root in range(start, length - 1):
            guesses = block_logits(dflash, given, sample, root)[1:].argmax(1).tolist()
            right = given.tokens[sample, root + 1 : length].tolist()
            pairs = list(zip(guesses, right, strict=False))
            expected = next((n for n, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
            seen.add(expected)
            assert int(accepted[sample, root]) == expected, (sample, root)
    assert len(seen) > 1


@pytest.fixture(scope="module")
def dspark() -> DSpark:
    return randomised(DSpark(FROZEN, AUX, BLOCK, MASK))  # type: ignore[no-any-return]  # the head itself


def test_dsparks_loss_is_that_of_its_blocks(dspark: DSpark) -> None:
    """Of each guess by the answer's token before it: a tenth of cross-entropy, nine of distance, and the confidence."""
    given, errors, weights = batch(), torch.tensor(0.0), 0.0
    tensors, reference = in_float64(dspark), ReferenceDSpark(reference_of(dspark), "vanilla")
    roots = drawn_roots(dspark, given, 4)
    for sample, length in enumerate(LENGTHS):
        for root in roots[sample].tolist():
            rows = _block(dspark, given, sample, root)
            for row, place in enumerate(range(root + 1, min(root + 1 + BLOCK, length))):
                before = int(given.tokens[sample, place - 1])
                logits = rows[row] @ HEAD.T + reference._bias(before, rows[row], rows[row])[0]
                probs = (given.hidden[sample, place - 1] @ HEAD.T).softmax(0)
                distance = (logits.softmax(0) - probs).abs().sum()
                read = torch.cat((rows[row], tensors["markov_head.markov_w1.weight"][before]))
                sure = tensors["confidence_head.proj.weight"] @ read + tensors["confidence_head.proj.bias"]
                accepted = sure.sigmoid(), 1 - distance.detach() / 2
                doubt = -(accepted[1] * accepted[0].log() + (1 - accepted[1]) * (1 - accepted[0]).log())
                error = 0.1 * F.cross_entropy(logits, given.tokens[sample, place]) + 0.9 * distance + doubt
                weight = math.exp(-row / ((BLOCK + 1) / 2))
                errors, weights = errors + weight * error, weights + weight
    check_loss(dspark, given, errors / weights)


def test_dsparks_accepted_guesses_are_those_of_its_blocks(dspark: DSpark) -> None:
    given, reference = batch(5), ReferenceDSpark(reference_of(dspark), "vanilla")
    with torch.no_grad():
        for sample, length in enumerate(LENGTHS):
            for place in range(2, length):
                if place % 4:
                    guesses, _ = reference.guess(
                        _block(dspark, given, sample, place - 1), int(given.tokens[sample, place - 1])
                    )
                    given.tokens[sample, place] = guesses[0]
    accepted, seen = dspark.accepted(given), set()
    for sample, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        for root in range(start, length - 1):
            guesses, _ = reference.guess(_block(dspark, given, sample, root), int(given.tokens[sample, root]))
            pairs = list(zip(guesses, given.tokens[sample, root + 1 : length].tolist(), strict=False))
            expected = next((n for n, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
            seen.add(expected)
            assert int(accepted[sample, root]) == expected, (sample, root)
    assert len(seen) > 1


@pytest.mark.slow
def test_dsparks_loss_falls_and_its_bias_learns() -> None:
    given, head = batch(), DSpark(FROZEN, AUX, BLOCK, MASK)
    steps = Steps(head.tensors)
    steps.set_rate(3e-3)
    losses = [float(steps.take(lambda: loss_of(head, given, 4))) for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]
    assert all(
        head.tensors[f"{name}.weight"].abs().sum() > 0 for name in ("markov_head.markov_w2", "confidence_head.proj")
    )


def test_an_accept_length_is_what_the_engine_would_commit() -> None:
    """Root 2 commits 1 + 1, root 4 the two tokens that are left; the other answer one by one."""
    rows = [[0, 0, 1, 9, 7, 9, 9], [9, 0, 0, 0, 9, 9, 9]]
    assert accept_length(rows, [2, 1], [7, 5]) == (2 + 2 + 1 + 1 + 1) / 5
    assert accept_length([[3]], [0], [1]) == 0.0, "an answer of one token has no step"
