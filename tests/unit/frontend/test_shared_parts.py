"""The frontend's end of what requests share: kept for those that follow, once for all that have it, and given back."""

import gc
import weakref

import msgspec
import pytest

from overlap_spec.client.link import Malformed
from overlap_spec.errors import Overloaded
from overlap_spec.frontend.client_messages import SharedParts
from overlap_spec.messages import Generate, GenerateShared, SamplingParams, Shared, TextPrompt


def shared(*samplings: object, prompt: str = "x") -> Shared:
    return Shared([TextPrompt(prompt)], [msgspec.Raw(msgspec.msgpack.encode(each)) for each in samplings])


def asked(parts: SharedParts, client: int = 1, prompt: int = 0, sampling: int = 0) -> Generate:
    request = parts.request(client, GenerateShared("r", prompt, sampling))
    assert isinstance(request, Generate)
    return request


def test_a_request_has_the_last_parts_of_its_own_client() -> None:
    parts = SharedParts()
    parts.put(1, shared(SamplingParams(seed=1), prompt="one"))
    parts.put(2, shared(SamplingParams(seed=2), prompt="two"))
    assert [asked(parts, client).sampling.seed for client in (1, 2)] == [1, 2]
    parts.put(1, shared(SamplingParams(seed=3), prompt="three"))
    assert asked(parts).prompt == TextPrompt("three") and asked(parts, 2).prompt == TextPrompt("two")


def test_a_request_whose_parts_are_not_there_is_told_that_there_was_no_room() -> None:
    parts = SharedParts()
    parts.put(1, shared(SamplingParams()))
    for client, prompt, sampling in ((2, 0, 0), (1, 1, 0), (1, -1, 0), (1, 0, 1), (1, 0, -1)):
        with pytest.raises(Overloaded, match="no room"):
            asked(parts, client, prompt, sampling)
    parts.drop(1)
    with pytest.raises(Overloaded):
        asked(parts)


def test_an_error_in_what_is_shared_is_the_error_of_every_request_that_follows() -> None:
    parts = SharedParts()
    for bad, field in (({"top_p": 7.0}, "top_p"), ({"stop": ["z" * 3000]}, "stop"), ({"seed": "x"}, "sampling")):
        parts.put(1, shared(bad))
        word = parts.request(1, GenerateShared("r", 0, 0))
        assert isinstance(word, Malformed) and (word.request_id, word.field) == ("r", field), word
        assert len(word.error) < 300


def test_a_sampling_is_decoded_for_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 samplings of 1,024 biases in one message took 436 MiB decoded."""
    decoded: list[SamplingParams] = []

    def note(sampling: SamplingParams) -> SamplingParams:
        decoded.append(sampling)
        return sampling

    monkeypatch.setattr("overlap_spec.frontend.client_messages.with_packed_ids", note)
    parts = SharedParts()
    parts.put(1, shared(*({"seed": seed} for seed in range(100)), {"top_p": 7.0}))
    assert not decoded
    held = [asked(parts, sampling=5) for _ in range(3)]
    assert len(decoded) == 1 and {id(each.sampling) for each in held} == {id(decoded[0])}
    assert isinstance(parts.request(1, GenerateShared("r", 0, 100)), Malformed)  # that one alone


def test_a_sampling_is_one_object_while_some_request_has_it() -> None:
    parts = SharedParts()
    parts.put(1, shared(SamplingParams(allowed_token_ids=(7, 8, 9))))
    kept = asked(parts).sampling
    assert kept.allowed_token_ids is None and kept.packed_allowed == b"\7\0\0\0\x08\0\0\0\x09\0\0\0"
    parts.put(2, shared(SamplingParams(allowed_token_ids=(7, 8, 9))))
    assert asked(parts, 2).sampling is kept
    gone = weakref.ref(kept)
    parts.drop(1)
    parts.drop(2)
    del kept
    gc.collect()
    assert gone() is None and not parts._known
