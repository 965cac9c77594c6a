"""Checks before a request is admitted: each names its field; what is left open is settled."""

import pytest

from overlap_spec.errors import RequestError
from overlap_spec.frontend.request_checks import Refusal, RequestChecks
from overlap_spec.messages import MAX_STOP_IDS, EngineLimits, ErrorCode, SamplingParams, Thinking

LIMITS = EngineLimits(max_len=100, max_total_tokens=80, max_running_requests=4, vocab_size=50)
ROOMY = EngineLimits(max_len=100, max_total_tokens=1000, max_running_requests=4, vocab_size=50)


def checks(eos: tuple[int, ...] = (2,), most: int = 3, seed: int | None = 1) -> RequestChecks:
    rules = RequestChecks(eos, most, seed)
    rules.limits = LIMITS
    return rules


@pytest.mark.parametrize(
    ("sampling", "prompt", "limits", "field", "words"),
    [
        ({}, [], LIMITS, "prompt", "at least one token"),
        ({}, [1, 50], LIMITS, "prompt", "token id 50 is outside the vocabulary"),
        ({}, [-1], LIMITS, "prompt", "token id -1"),
        ({"max_new_tokens": 95}, [1] * 6, ROOMY, "max_new_tokens", "maximum context length of 100 tokens"),
        ({"max_new_tokens": 1}, [1] * 100, ROOMY, "prompt", "100 prompt tokens.*maximum context length of 100"),
        ({"max_new_tokens": None}, [1] * 100, ROOMY, "prompt", "maximum context length of 100 tokens"),
        ({"max_new_tokens": 0}, [1] * 100, ROOMY, "prompt", r"100 prompt tokens \+ 1 new tokens = 101: more than"),
        ({"max_new_tokens": 80}, [1], LIMITS, "max_new_tokens", r"80 tokens; --max-total-tokens"),
        ({"max_new_tokens": 1}, [1] * 80, LIMITS, "prompt", "--max-total-tokens"),
        ({"max_new_tokens": None, "min_new_tokens": 31}, [1] * 50, LIMITS, "min_new_tokens", "exceeds the 30"),
    ],
)
def test_what_does_not_fit_names_its_field(
    sampling: dict[str, object], prompt: list[int], limits: EngineLimits, field: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        checks().settle(SamplingParams(**sampling), prompt, limits)
    assert caught.value.field == field


def test_the_exact_limit_fits() -> None:
    assert checks().settle(SamplingParams(max_new_tokens=79), [1], LIMITS).max_new_tokens == 79
    assert checks().settle(SamplingParams(max_new_tokens=1), [1] * 99, ROOMY).max_new_tokens == 1


@pytest.mark.parametrize(("limits", "room"), [(LIMITS, 70), (ROOMY, 90)])
def test_without_a_length_the_request_may_run_to_the_end(limits: EngineLimits, room: int) -> None:
    assert checks().settle(SamplingParams(max_new_tokens=None), [1] * 10, limits).max_new_tokens == room


def test_seeds_are_drawn_from_the_engines_seed_and_given_ones_kept() -> None:
    def drawn(rules: RequestChecks) -> list[int | None]:
        return [rules.settle(SamplingParams(max_new_tokens=1), [1], LIMITS).seed for _ in range(3)]

    assert drawn(checks(seed=7)) == drawn(checks(seed=7))
    assert len({*drawn(checks(seed=7)), *drawn(checks(seed=8)), *drawn(checks(seed=None))}) == 9
    assert checks().settle(SamplingParams(max_new_tokens=1, seed=-5), [1], LIMITS).seed == -5


def test_stop_ids_are_eos_and_the_requests_own() -> None:
    rules = checks(eos=(2, 3))
    assert rules.stop_ids(SamplingParams(stop_token_ids=(9, 3))) == (2, 3, 9)
    assert rules.stop_ids(SamplingParams(stop_token_ids=(9,), ignore_eos=True)) == (9,)
    assert rules.stop_ids(SamplingParams(stop_token_ids=(9, LIMITS.vocab_size))) == (2, 3, 9)  # it is never drawn
    many = checks(eos=tuple(range(100, 100 + MAX_STOP_IDS)))
    with pytest.raises(RequestError) as caught:
        many.stop_ids(SamplingParams(stop_token_ids=(1,)))
    assert caught.value.field == "stop_token_ids"


def test_when_no_request_is_taken() -> None:
    rules = RequestChecks((2,), 3, None)

    def code() -> ErrorCode:
        with pytest.raises(Refusal) as caught:
            rules.check_open()
        return caught.value.code

    assert code() is ErrorCode.STARTING
    rules.limits = LIMITS
    assert rules.check_open() is LIMITS
    rules.draining = True
    assert code() is ErrorCode.SHUTTING_DOWN


@pytest.mark.parametrize("token", [-1, 1 << 31, (1 << 63) + 5])
def test_markers_are_token_ids(token: int) -> None:
    """The fuzz has sent 2^63 and more, which ended the worker."""
    for opening, closing in (((token,), (1,)), ((), (1, token))):
        with pytest.raises(RequestError, match="token ids must be from 0 on"):
            Thinking(3, False, opening, closing)
