"""What requests share travels once, and both ends agree on what each of them is."""

import msgspec

from overlap_spec.client.calls import with_shared_parts
from overlap_spec.client.link import pack_ids
from overlap_spec.frontend.client_messages import SharedParts
from overlap_spec.messages import Generate, GenerateShared, SamplingParams, Shared, Terms, TextPrompt, TokenPrompt
from overlap_spec.messages.client import ToFrontendFromClient

HEAVY = SamplingParams(
    stop=("z" * 1000,) * 16, allowed_ids=pack_ids(range(49152)), logit_bias=dict.fromkeys(range(1024), 0.5)
)


def received(messages: list[ToFrontendFromClient]) -> list[Generate]:
    """The requests as the frontend has them."""
    parts, requests = SharedParts(), []
    for message in messages:
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToFrontendFromClient)
        match arrived:
            case Shared():
                parts.put(1, arrived)
            case GenerateShared():
                request = parts.request(1, arrived)
                assert isinstance(request, Generate)
                requests.append(request)
            case Generate():
                requests.append(arrived)
    return requests


def test_a_group_arrives_as_it_was_sent_whatever_its_requests_share() -> None:
    prompts = [TextPrompt("x"), TokenPrompt(pack_ids((1, 2))), TextPrompt("x")]
    plain, other = SamplingParams(max_new_tokens=3), SamplingParams(seed=5)
    groups = {
        "nothing": [(prompts[0], plain), (prompts[1], other)],
        "the sampling": [(prompts[0], plain), (prompts[1], plain), (prompts[2], other)],
        "the prompt alone": [(prompts[0], plain), (prompts[0], other)],
        "both": [
            (prompts[0], HEAVY),
            (prompts[0], HEAVY),
            (prompts[1], HEAVY),
            (prompts[1], HEAVY),
            (prompts[0], other),
        ],
    }
    for name, group in groups.items():
        sent = [
            Generate(f"r{i}", prompt, sampling, Terms(age_s=i), i or None) for i, (prompt, sampling) in enumerate(group)
        ]
        assert received(with_shared_parts(sent)) == sent, name


def test_a_group_of_choices_takes_little_more_than_one_request() -> None:
    prompt = TextPrompt("p" * 1_000_000)
    one = len(msgspec.msgpack.encode(Generate("r", prompt, HEAVY)))
    messages = with_shared_parts([Generate(f"r_{i}", prompt, HEAVY, seed=i) for i in range(128)])
    assert sum(len(msgspec.msgpack.encode(message)) for message in messages) < one + 128 * 120


def test_two_requests_are_enough_to_share() -> None:
    two = [Generate(name, TextPrompt("x"), HEAVY) for name in "ab"]
    assert [type(message) for message in with_shared_parts(two)] == [Shared, GenerateShared, GenerateShared]
    assert with_shared_parts(two[:1]) == two[:1]


def test_requests_that_share_a_sampling_have_one_object_at_the_other_end() -> None:
    first = received(with_shared_parts([Generate(f"a{i}", TextPrompt("x"), HEAVY) for i in range(3)]))
    assert len({id(request.sampling) for request in first}) == 1
    assert first[0].sampling.packed_allowed is first[2].sampling.packed_allowed
