"""Match verification on windows that can be checked by eye: one peaked logit per row."""

import torch
from support.given_logits import GivenLogits, commit, window_of
from torch import Tensor

from overlap_spec.speculative.interfaces import Drawn, Verdict, Window
from overlap_spec.speculative.verifiers import ChainVerifier, Thresholds


def match_chain(window: Tensor, drawn: Tensor) -> Verdict:
    return commit(window, Drawn(drawn))


def test_all_match_gives_every_guess_and_a_bonus() -> None:
    verdict = match_chain(torch.tensor([[9, 1, 2, 3]]), torch.tensor([[1, 2, 3, 4]]))
    assert verdict.accept_len.tolist() == [3]
    assert verdict.tokens.tolist() == [[1, 2, 3, 4]]


def test_first_mismatch_commits_the_targets_token_and_ends() -> None:
    verdict = match_chain(torch.tensor([[9, 1, 7, 3]]), torch.tensor([[1, 2, 3, 4]]))
    assert verdict.accept_len.tolist() == [1]
    assert verdict.tokens.tolist() == [[1, 2, -1, -1]]


def test_a_late_match_after_a_miss_does_not_count() -> None:
    verdict = match_chain(torch.tensor([[9, 5, 2, 3]]), torch.tensor([[1, 2, 3, 4]]))
    assert verdict.accept_len.tolist() == [0]
    assert verdict.tokens.tolist() == [[1, -1, -1, -1]]


def test_a_missing_guess_equals_no_token() -> None:
    window = torch.tensor([[9, -1, -1, -1], [9, 1, -1, -1]])
    verdict = match_chain(window, torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]))
    assert verdict.accept_len.tolist() == [0, 1]
    assert verdict.published.num_guesses.tolist() == [0, 1]


def test_a_window_of_one_is_plain_decoding() -> None:
    verdict = match_chain(torch.tensor([[9], [8]]), torch.tensor([[4], [5]]))
    assert verdict.accept_len.tolist() == [0, 0]
    assert verdict.tokens.tolist() == [[4], [5]]


def peaked(tokens: list[list[int]], vocab: int) -> Tensor:
    """Logits whose argmax is the given token."""
    logits = torch.zeros(len(tokens), len(tokens[0]), vocab, dtype=torch.float64)
    return logits.scatter(2, torch.tensor(tokens)[:, :, None], 50.0)


def test_verify_draws_at_the_position_after_each_column(make_batch) -> None:
    verifier = ChainVerifier(torch.arange(12))
    batch = make_batch([20, 30], temperature=1.0)
    positions = torch.tensor([[20, 21, 22], [30, 31, 32]])
    window = Window(torch.tensor([[0, 4, 5], [0, 7, 8]]), positions)
    drawn = verifier.verify(window, GivenLogits(peaked([[4, 5, 6], [7, 1, 2]], 12)), batch)
    assert commit(window.tokens, drawn).tokens.tolist() == [[4, 5, 6], [7, 1, -1]]


def test_greedy_draws_need_no_logits(make_batch) -> None:
    class Largest:
        def compute(self) -> Tensor:
            raise AssertionError("nobody needs them")

        def argmax(self, ids: Tensor | None = None) -> Tensor:
            return torch.tensor([3, 4, 5, 6])

    drawn = ChainVerifier(torch.arange(12)).verify(
        window_of(torch.tensor([[1, 3], [2, 7]])), Largest(), make_batch([20, 30], temperature=0.0)
    )
    assert drawn.tokens.tolist() == [[3, 4], [5, 6]] and drawn.accept_len is None


def test_a_guess_is_accepted_by_either_threshold() -> None:
    def accepts(single: float, acc: float, p_guess: float, coin: float) -> bool:
        p, coins, guesses = (torch.tensor([[value]], dtype=torch.float64) for value in (p_guess, coin, 0.0))
        return bool(Thresholds(single, acc).accepts(guesses.long(), p, coins, torch.zeros(1, dtype=torch.int64)))

    assert not accepts(1.0, 1.0, p_guess=0.3, coin=0.5) and accepts(1.0, 1.0, p_guess=0.6, coin=0.5)
    assert accepts(1.0, 0.5, p_guess=0.3, coin=0.5), "with probability p / 0.5"
    assert accepts(0.3, 1.0, p_guess=0.3, coin=0.5) and not accepts(0.31, 1.0, p_guess=0.3, coin=0.5)
