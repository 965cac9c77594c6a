"""The requests of a soak. Request number i of a seed is always the same, whoever sends it and when."""

import copy
import enum
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from overlap_spec.messages import GrammarKind
from support.tiny.grammars import TINY_GRAMMARS

CONTEXT = 256  # of the model: no answer is longer than what the prompt leaves of it
PREFIXES = 6  # prompts share one of so many beginnings
GRAMMARS = [
    {"json_schema": TINY_GRAMMARS["compact schema"].text},
    {"json_schema": TINY_GRAMMARS["schema"].text},
    {"regex": TINY_GRAMMARS["regex"].text},
    {"ebnf": TINY_GRAMMARS["ebnf"].text},
]
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 5, "min_p": 0.05},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"40": 3.0, "41": -100.0}},
    {"bad_words": ["a", "he"]},
    {"min_new_tokens": 3},
    {"stop": ["e", "xy"]},
    {"stop_regex": "[0-9]{2}"},
    {"speculative": {"num_steps": 1}},
    {"speculative": {"method": "NONE"}},
    {"allowed_token_ids": list(range(2, 60))},
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a", "sampling_params": {"top_p": 7}}),
    ("/generate", {"input_ids": [5, 10**6]}),
    ("/generate", {"input_ids": list(range(5, 100)) * 4}),
    ("/generate", {"text": 5}),
    ("/v1/completions", {"prompt": "a", "n": 0}),
    ("/v1/completions", {"prompt": ["a"] * 3, "stream": "x"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "x"}}),
    ("/generate", {"text": "a", "sampling_params": {"regex": "(a"}}),
    ("/generate", {"text": "a", "sampling_params": {"json_schema": '{"type": "objekt"}'}}),
]


class Manner(enum.Enum):
    """What the client does with its request."""

    READ = "read"
    SLOW = "slow"  # waits between events
    VANISH = "vanish"  # closes its connection in the middle
    ABORT = "abort"  # asks for the end
    BAD = "bad"  # the body cannot be answered


MANNERS = [Manner.READ] * 74 + [Manner.SLOW] * 4 + [Manner.VANISH] * 9 + [Manner.ABORT] * 6 + [Manner.BAD] * 7


@dataclass(frozen=True)
class Asked:
    """One request. `path` "zmq": its `body` is a prompt and the fields of `SamplingParams`."""

    number: int
    path: str
    body: dict[str, Any]
    manner: Manner
    delay_s: float = 0.0  # before the client vanishes or aborts, or between events

    @property
    def rid(self) -> str:
        return f"soak-{self.number}"


def request(seed: int, number: int) -> Asked:
    """Request `number` of a seed."""
    random = Random(f"{seed} {number}")
    manner = random.choice(MANNERS)
    delay_s = random.uniform(0.005, 0.05)
    if manner is Manner.BAD:
        return Asked(number, *random.choice(BAD), manner)
    kind = random.choices(["/generate", "zmq", "/v1/completions", "/v1/chat/completions"], [5, 4, 2, 1])[0]
    makers = {"/generate": _generate, "zmq": zmq_request, "/v1/completions": _completion, "/v1/chat/completions": _chat}
    body = makers[kind](random)
    if manner is not Manner.READ and kind != "zmq":
        body["stream"] = True
    asked = Asked(number, kind, body, manner, delay_s)
    if kind == "/generate":
        body["rid"] = asked.rid
    return asked


def prompt(random: Random) -> list[int]:
    """Token ids: a shared beginning, then a part of its own."""
    shared = Random(random.randrange(PREFIXES))
    start = [shared.randrange(6, 100) for _ in range(random.choice([0, 8, 40, 90]))]
    return start + [random.randrange(6, 100) for _ in range(random.randint(1, 24))]


def _sampling(random: Random) -> dict[str, Any]:
    most = random.choice([1, 2, 4, 6, 8, 12, 32])
    drawn = {"temperature": random.choice([0.0, 0.7, 1.0]), "seed": random.randrange(1 << 30), "max_new_tokens": most}
    return drawn | (random.choice(GRAMMARS) if random.random() < 0.1 else _parameters(random, most))


def _parameters(random: Random, most: int) -> dict[str, Any]:
    chosen = dict(random.choice(PARAMETERS))
    if "min_new_tokens" in chosen:
        chosen["min_new_tokens"] = min(chosen["min_new_tokens"], most)
    return chosen | ({"ignore_eos": True} if random.random() < 0.3 else {})


def _generate(random: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": prompt(random), "sampling_params": _sampling(random)}
    if random.random() < 0.05:
        body["sampling_params"]["n"] = 2
    if random.random() < 0.1:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    return body | {"stream": random.random() < 0.4}


def _completion(random: Random) -> dict[str, Any]:
    body = {"prompt": prompt(random), "max_tokens": random.choice([1, 4, 16]), "stream": random.random() < 0.6}
    return body | {"temperature": random.choice([0.0, 1.0]), "seed": random.randrange(1 << 30)}


def _chat(random: Random) -> dict[str, Any]:
    text = "".join(chr(random.randrange(97, 123)) for _ in range(random.randint(1, 30)))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": random.choice([4, 10]), "stream": True}
    return body | {"temperature": random.choice([0.0, 1.0]), "seed": random.randrange(1 << 30)}


def zmq_request(random: Random) -> dict[str, Any]:
    """A prompt, and the fields of its `SamplingParams`."""
    sampling = _sampling(random)
    for lone in ("stop", "stop_regex", "bad_words", "allowed_token_ids"):
        if lone in sampling:
            given = sampling[lone]
            sampling[lone] = (given,) if isinstance(given, str) else tuple(given)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): value for token, value in sampling["logit_bias"].items()}
    for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF):
        if kind.value in sampling:
            sampling["grammar"] = [kind.value, sampling.pop(kind.value)]
    return {"prompt": prompt(random), "sampling": sampling}


def alone(asked: Asked) -> Asked:
    """The same request without speculation and without a stream."""
    body = copy.deepcopy(asked.body)
    fields = body["sampling"] if asked.path == "zmq" else body["sampling_params"]
    fields["speculative"] = {"method": "NONE"}
    body.pop("rid", None)
    body.pop("stream", None)
    return replace(asked, body=body)
