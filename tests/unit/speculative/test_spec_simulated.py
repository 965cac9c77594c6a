"""Synthetic acceptance: the mean that was asked for, valid tokens, and refused where it would be taken for real."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import Verdict
from support.given_logits import GivenLogits, commit, window_of
from torch import Tensor

from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.speculative.interfaces import Drawn, SlotBatch, Window
from overlap_spec.speculative.verifiers import ChainVerifier, SimulatedVerifier, SyntheticAcceptance

DRAWN = 77
FILES = ModelFiles(
    weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
    preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip


class ConstantVerifier:
    """Draws one known token everywhere, which no guess equals."""

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        return Drawn(torch.full_like(window.tokens, DRAWN))


def judge(mean: float, window: Tensor, batch: SlotBatch) -> Verdict:
    verifier = SimulatedVerifier(ConstantVerifier(), SyntheticAcceptance([mean], batch.sampling.seed))
    return commit(window, verifier.verify(window_of(window), GivenLogits(torch.empty(0, 1)), batch))


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("mean", [1.3, 1.0, 2.5, 3.9, 4.0])
def test_the_mean_of_walks_is_the_one_asked_for(make_batch, mean: float) -> None:
    """16 requests of 200 steps, each from where the step before left it, as decoding walks."""
    batch = make_batch([100] * 16)
    seeds = torch.randint(0, 1 << 62, (16,), generator=torch.Generator().manual_seed(5))
    batch = replace(batch, sampling=replace(batch.sampling, seed=seeds))
    window = torch.arange(4).expand(16, 4)
    committed = 0
    for _ in range(200):
        advance = judge(mean, window, batch).accept_len + 1
        assert set(advance.tolist()) <= {int(mean), -int(-mean // 1)}
        committed += int(advance.sum())
        batch = replace(batch, lengths=batch.lengths + advance)
    assert committed / (16 * 200) == pytest.approx(mean, rel=0.02)


def test_guesses_that_stand_then_a_drawn_token(make_batch) -> None:
    verdict = judge(3.0, torch.tensor([[9, 1, 2, 3], [9, 4, 5, 6]]), make_batch([10, 11]))
    assert verdict.accept_len.tolist() == [2, 2]
    assert verdict.tokens.tolist() == [[1, 2, DRAWN, -1], [4, 5, DRAWN, -1]]


def test_no_more_than_was_guessed(make_batch) -> None:
    verdict = judge(4.0, torch.tensor([[9, 1, -1, -1], [9, -1, -1, -1], [9, 1, 2, 3]]), make_batch([10, 11, 12]))
    assert verdict.accept_len.tolist() == [1, 0, 3]
    assert verdict.tokens.tolist() == [[1, DRAWN, -1, -1], [DRAWN, -1, -1, -1], [1, 2, 3, DRAWN]]


def test_a_narrower_window_clips(make_batch) -> None:
    assert judge(4.0, torch.tensor([[9, 1]]), make_batch([10])).tokens.tolist() == [[1, DRAWN]]
    assert judge(4.0, torch.tensor([[9]]), make_batch([10])).tokens.tolist() == [[DRAWN]]


def test_the_same_request_is_judged_the_same_way_in_any_batch(make_batch) -> None:
    batch = make_batch(list(range(50, 82)))
    window = torch.arange(4).expand(32, 4)
    together = judge(2.5, window, batch).accept_len
    acceptance = SyntheticAcceptance([2.5], batch.sampling.seed)
    alone = [
        acceptance.accept_len(replace(batch, slots=batch.slots[i : i + 1], lengths=batch.lengths[i : i + 1]))
        for i in range(32)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
    assert set(together.tolist()) == {1, 2}


def test_of_two_means_the_seed_chooses(make_batch) -> None:
    batch = make_batch(list(range(100, 108)))
    batch = replace(batch, sampling=replace(batch.sampling, seed=torch.tensor([0, 65536] * 4)))
    accepted = [
        SyntheticAcceptance((4.0, 1.0), batch.sampling.seed).accept_len(replace(batch, lengths=batch.lengths + i))
        for i in range(300)
    ]
    assert {tuple(lengths.tolist()) for lengths in accepted} == {(3, 0) * 4}


def test_the_drawn_token_is_the_targets(make_batch) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[5, 6, 7, 8]]), 16).double()
    batch = make_batch([3])
    verifier = SimulatedVerifier(ChainVerifier(torch.arange(16)), SyntheticAcceptance([2.0], batch.sampling.seed))
    window = torch.tensor([[0, 1, 2, 3]])
    drawn = verifier.verify(window_of(window), GivenLogits(logits), batch)
    assert commit(window, drawn).tokens.tolist() == [[1, 6, -1, -1]]


def settle(**asked: object):
    return resolve(EngineConfig(**asked), FILES, Machine(num_cores=2, has_cuda=False))


def test_settings_and_notes_say_synthetic() -> None:
    settings, notes = settle(speculative_simulate_acc_len=(2.5,))
    assert settings.spec.simulated_accept_lens == (2.5,) and settings.spec.num_steps == 3
    assert settings.scheduler.synthetic_acceptance
    assert any(note.startswith("synthetic acceptance: 2.5 ") for note in notes)


def test_without_it_nothing_is_synthetic() -> None:
    settings, notes = settle()
    assert not settings.spec.simulated_accept_lens and not settings.scheduler.synthetic_acceptance
    assert not any("synthetic" in note for note in notes)


def test_more_than_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="--speculative-simulate-acc-len: a step commits at most 4 tokens"):
        settle(speculative_simulate_acc_len=[4.5])


def test_plain_decoding_accepts_nothing() -> None:
    with pytest.raises(ConfigError, match="--speculative-simulate-acc-len: has no effect"):
        settle(speculative_simulate_acc_len=[2.0], speculative_algorithm="NONE")


def test_the_drafts_format_is_the_targets_unless_named() -> None:
    assert settle(load_format="dummy")[0].spec.draft_load_format == "dummy"
    assert settle(load_format="gguf")[0].spec.draft_load_format == "auto"
    assert settle(speculative_draft_load_format="dummy")[0].spec.draft_load_format == "dummy"
