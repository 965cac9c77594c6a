"""Bodies of OpenAI's endpoints, with the extensions of SGLang and vLLM that are built: lists of tokens and words among
them.

A field that is missing here is unknown (accepted) or in `body_fields.py` (refused).

**Several answers to each prompt**: `n` choices, numbered prompt by prompt, or the best n of `best_of` candidates.

    prompts p, q   n = 2   ->   index 0: p    1: p after 0    2: q    3: q after 2

A prompt's first choice computes it; the others start when its first token has come, and find the prompt in the prefix
cache. Choice 0 draws with the request's seed, so it is the answer that a request for one choice would get. Candidates
are choices as well: those that a request for n = `best_of` would get.
"""

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from overlap_spec.client.link import pack_ids
from overlap_spec.config import MIB, SamplingDefaults
from overlap_spec.entrypoints.http.body_fields import MAX_PROMPTS, Json, Neutral, refuse_unsupported
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_body import convert, read_body, without_nulls
from overlap_spec.entrypoints.http.request_runner import EngineRequest, RequestId, renamed
from overlap_spec.entrypoints.http.speculation import asked_speculation
from overlap_spec.entrypoints.openai.prompts import need_tokenizer
from overlap_spec.entrypoints.openai.response_format import GrammarFields
from overlap_spec.errors import RequestError
from overlap_spec.messages import Prompt, SamplingParams, Speculative, shown

MOST_CHOICES = 128  # OpenAI's
MOST_OF_ANSWERS = 64 * MIB  # of the lists and grammars of all answers to a request
BIAS_BYTES, WORD_BYTES = 40, 80  # about what a bias takes in a process, and a bad word of 2 x 8 tokens in a message


class ListFields(GrammarFields, kw_only=True):
    """Fields of every endpoint, beside those of grammars. `logit_bias`: JSON has no other names than strings."""

    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []

    def lists(self, info: ServerInfo) -> dict[str, Any]:
        """The same as fields of SamplingParams. Raises: Problem naming the field."""
        if self.bad_words:
            need_tokenizer("bad_words", info)
        bias = {_token_id(name): value for name, value in self.logit_bias.items()}
        lists = {"logit_bias": bias, "bad_words": tuple(self.bad_words)}
        return lists if self.allowed_token_ids is None else lists | {"allowed_ids": _packed(self.allowed_token_ids)}


def _packed(allowed: list[int]) -> bytes:
    """As messages carry them. The engine knows the vocabulary; here an id needs to fit 31 bits."""
    if not allowed or min(allowed) < 0:
        got = shown(allowed if not allowed else min(allowed))
        text = f"allowed_token_ids must be at least one token id, each >= 0, got {got}"
        raise Problem(400, text, "allowed_token_ids", "invalid_value")
    return pack_ids(allowed, "allowed_token_ids")


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal()) or len(name) > 18:
        raise Problem(400, f"logit_bias: names must be token ids, got {shown(name)}", "logit_bias", "invalid_value")
    return int(name)


THINKING_BUDGETS = ("thinking_budget", "max_thinking_tokens", "thinking_token_budget")
MOST_THINKING = 1 << 31
COMPLETION_TOKENS = 16  # OpenAI's default; a chat's is the model's, or the context
NAMES_HERE = {  # of what `/generate` and others call otherwise
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs in chats, logprobs in completions",
    "token_ids_logprob": "not there: use /generate",
    "logprob_start_len": "prompt_logprobs",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "sampling_params": "not there: its parameters are the body's",
    "text": "messages in chats, prompt in completions",
    "input_ids": "prompt in completions",
    "reasoning": "reasoning_effort, or chat_template_kwargs",
}
DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fields with a default that a model may set


class StreamOptions(msgspec.Struct, frozen=True):
    """Which chunks carry usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None  # true is refused: chunks are not padded


class CommonRequest(ListFields, kw_only=True):
    """Fields of both endpoints."""

    model: str = "default"
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    rid: RequestId = ""
    request_id: RequestId = ""  # vLLM's name for it
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # OpenAI's later name for it
    min_tokens: int = 0
    temperature: float | None = None  # None, here and below: the model's or the API's default
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] = ""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False  # vLLM's name for it
    stop_regex: str | list[str] = ""
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    thinking_budget: int | None = None
    max_thinking_tokens: int | None = None
    thinking_token_budget: int | None = None  # vLLM's name for it
    timeout: float | None = None  # seconds
    first_token_timeout: float | None = None
    cache_salt: str = ""
    adapt: bool = True  # false: no draft learns from it
    extra_key: str = ""  # SGLang's name for it
    user: str = ""  # this and the next five are for the client's own records, and change nothing
    metadata: Json = {}
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    prompt_cache_options: Json = {}
    speculative: Speculative = Speculative()
    return_spec_tokens_details: bool = False
    prompt_logprobs: int | bool | None = None  # vLLM's; false asks for nothing
    return_tokens_as_token_ids: bool = False

    def id(self, prefix: str) -> str:
        """The user's id for this request, or a new one."""
        return self.rid or self.request_id or prefix + uuid.uuid4().hex

    def max_new_tokens(self, default: int | None) -> tuple[str, int | None]:
        """The name and the value of the limit. Raises: Problem if its two names have values that differ."""
        limits = {name: getattr(self, name) for name in ("max_tokens", "max_completion_tokens")}
        given = {name: value for name, value in limits.items() if value is not None}
        if len(set(given.values())) > 1:
            raise Problem(400, "max_tokens and max_completion_tokens differ: give one", "max_tokens", "invalid_value")
        name = next(reversed(given), "max_tokens")
        return name, given.get(name, default)

    @property
    def thinking_tokens(self) -> int | None:
        """The thinking budget by any of its names. Raises: Problem if they differ, or are no number of tokens."""
        given = {name: each for name in THINKING_BUDGETS if (each := getattr(self, name)) is not None}
        for name, tokens in given.items():
            if not 0 <= tokens < MOST_THINKING:
                raise Problem(400, f"{name} must be a number of tokens from 0 on, got {tokens}", name, "invalid_value")
        if len(set(given.values())) > 1:
            names = " and ".join(given)
            raise Problem(400, f"{names} differ: give one", next(reversed(given)), "invalid_value")
        return next(iter(given.values()), None)

    @property
    def thinking_field(self) -> str:
        """The name by which a thinking budget is given. Raises: StopIteration if none is."""
        return next(name for name in THINKING_BUDGETS if getattr(self, name) is not None)


class ChatRequest(CommonRequest, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Json]
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Json] = []
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    chat_template_kwargs: Json = {}
    documents: list[Json] = []  # what the template makes of them is the template's own
    reasoning_effort: str = ""
    add_generation_prompt: bool | None = None  # true, unless the final message is continued
    continue_final_message: bool = False
    chat_template: str = ""
    add_special_tokens: bool = False


class CompletionRequest(CommonRequest, kw_only=True):
    """Body of `/v1/completions`. `prompt`: str | [str] | [int] | [[int]]."""

    prompt: Any
    best_of: int | None = None
    add_special_tokens: bool = True
    logprobs: int | bool | None = None  # false asks for nothing
    echo: bool = False

    @property
    def num_candidates(self) -> int:
        """Answers to each prompt that are made; the best `n` are returned."""
        return self.n if self.best_of is None else self.best_of


def fields_of(shape: type[msgspec.Struct], *others: type[msgspec.Struct]) -> dict[str, Neutral]:
    """Fields that the other shapes do not have, each with the value that asks for nothing: its default, if it has one.

    So a parameter of another endpoint is refused where it would have no effect.
    """
    known = {name for other in others for name in other.__struct_fields__}
    own = [field for field in msgspec.structs.fields(shape) if field.name not in known]
    made = {field.name: field.default_factory() for field in own if field.default_factory is not msgspec.NODEFAULT}
    return {field.name: () if field.required else (made.get(field.name, field.default),) for field in own}


OF_CHATS = fields_of(ChatRequest, CompletionRequest)
OF_COMPLETIONS = {**fields_of(CompletionRequest, ChatRequest), "best_of": (1,)}

R = TypeVar("R", bound=CommonRequest)
T = TypeVar("T")


async def read_openai(request: Request, shape: type[R], info: ServerInfo, prepare: Callable[[R], T]) -> tuple[R, T]:
    """Read and check a body; `prepare` checks its prompt and ranges. Raises: Problem naming the field."""

    def check(fields: Json) -> tuple[R, T]:
        body = check_openai(fields, shape, info)
        return body, prepare(body)

    return await read_body(request, info.max_body_bytes, check)


def check_openai(fields: Json, shape: type[R], info: ServerInfo) -> R:
    """Check a body that has been read, except its prompt and ranges. Raises: Problem naming the field."""
    refuse_unsupported(fields)
    refuse_other_names(fields)
    refuse_unsupported(fields, OF_COMPLETIONS if shape is ChatRequest else OF_CHATS)
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = without_nulls(options)
    body = convert(fields, shape)
    check_model(body.model, info)
    return body


def refuse_other_names(fields: Json, names: Mapping[str, str] = {}) -> None:
    """Raises: Problem for a field of another API, which would have no effect here. `names`: of chats' fields here."""
    for name, here in NAMES_HERE.items():
        if fields.get(name):
            here = names.get(here, here)
            raise Problem(400, f"{name} is of another API; here it is {here}", name, "invalid_value")


def length_names(limit: str) -> dict[str, str]:
    """The API's names of what bounds a length. `limit`: that of the largest."""
    return {"max_new_tokens": limit, "min_new_tokens": "min_tokens"}


def sampling_params(
    request: CommonRequest, max_new_tokens: int | None, names: dict[str, str], info: ServerInfo
) -> SamplingParams:
    """Check the ranges. Raises: RequestError with the API's name of the field."""
    stop = stop_strings(request.stop, info)
    stop_regex = stop_strings(request.stop_regex, info, "stop_regex")
    try:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_tokens,
            **_drawing(request, info.sampling_defaults),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed,
            stop=stop,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
            no_stop_trim=request.no_stop_trim or request.include_stop_str_in_output,
            stop_regex=stop_regex,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            grammar=request.grammar(info),
            **request.lists(info),
            speculative=asked_speculation(request.speculative, request.return_spec_tokens_details),
        )
    except RequestError as error:
        raise renamed(error, {**names, "grammar": request.grammar_field}) from None


def _drawing(request: CommonRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    """How tokens are drawn: as the request asks, else the default."""
    asked = {name: getattr(request, name) for name in DRAWING}
    return {name: getattr(defaults, name) if value is None else value for name, value in asked.items()}


def stop_strings(stop: str | list[str], info: ServerInfo, field: str = "stop") -> tuple[str, ...]:
    """One string or pattern, or many; "" alone is none."""
    strings = tuple(stop) if isinstance(stop, list) else (stop,) if stop else ()
    if strings:
        need_tokenizer(field, info)
    return strings


def check_model(model: str, info: ServerInfo) -> None:
    """Raises: Problem 404. "default" is what SGLang's clients send."""
    if model not in (info.model_name, *info.aliases, "default"):
        text = f"the model {shown(model)} does not exist here; this server has {info.model_name!r}"
        raise Problem(404, text, "model", "model_not_found")


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of a prompt's choice `index`. Without a seed the engine draws one for each choice."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def check_choices(n: int, num_prompts: int, field: str = "n") -> None:
    """Raises: Problem if so many answers cannot be asked for. `field`: the one that asks for them."""
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(400, f"{field} must be from 1 to {MOST_CHOICES}, got {n}", field, "invalid_value")
    if n * num_prompts > MAX_PROMPTS:
        text = f"{field}: at most {MAX_PROMPTS} answers in one request, got {num_prompts} prompts of {n} choices"
        raise Problem(400, text, field, "invalid_value")


def check_best_of(best_of: int, n: int, num_prompts: int, streams: bool) -> None:
    """Raises: Problem if the best n of so many answers cannot be asked for."""
    if best_of < n:
        raise Problem(400, f"best_of must be at least n, which is {n}, got {best_of}", "best_of", "invalid_value")
    if best_of > n and streams:
        text = "best_of: which answers are best is known at the end; leave out stream, or send a best_of that is n"
        raise Problem(400, text, "best_of", "invalid_value")
    check_choices(best_of, num_prompts, "best_of")


def spread(
    ids: Sequence[str],
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    names: Mapping[str, str],
    n: int,
    seeds: Sequence[int | None] = (),
) -> list[EngineRequest]:
    """The requests of all choices. `ids` are one for each choice, the others one for each prompt.

    `seeds`: instead of those of `sampling`, where they are not None; so requests that differ in nothing else share one
    object.
    """
    requests = []
    for number, request_id in enumerate(ids):
        prompt, index = divmod(number, n)
        seed = seeds[prompt] if seeds and seeds[prompt] is not None else sampling[prompt].seed
        seed = choice_seed(seed, index)
        first = ids[prompt * n] if index else ""
        requests.append(EngineRequest(request_id, prompts[prompt], sampling[prompt], names, first, seed))
    _check_product(sampling, names, n)
    return requests


def _check_product(sampling: Sequence[SamplingParams], names: Mapping[str, str], n: int) -> None:
    """Raises: Problem if what the engine keeps of all answers' lists and grammars is too much, naming the largest."""
    counts = Counter(map(id, sampling))
    distinct = {id(each): each for each in sampling}
    if len(sampling) * n == 1 or not any(each.has_lists or each.grammar for each in distinct.values()):
        return  # as of most
    sizes = {key: _sizes(each) for key, each in distinct.items()}
    total = n * sum(counts[key] * sum(fields.values()) for key, fields in sizes.items())
    if total > MOST_OF_ANSWERS:
        size, field = max((size, field) for fields in sizes.values() for field, size in fields.items())
        name, num_answers = names.get(field, field), n * len(sampling)
        each = f"{name}: {size} bytes for each of {num_answers} answers"
        text = f"{each}: {total} in all, at most {MOST_OF_ANSWERS} are taken"
        raise Problem(400, text, name, "invalid_value")


def _sizes(sampling: SamplingParams) -> dict[str, int]:
    """Bytes that each answer takes of the engine's links, by the field that they come from."""
    return {
        "grammar": 0 if sampling.grammar is None else sampling.grammar.num_bytes,
        "allowed_token_ids": len(sampling.allowed_ids),
        "logit_bias": BIAS_BYTES * len(sampling.logit_bias),
        "bad_words": WORD_BYTES * len(sampling.bad_words),
    }


def numbered(name: str, count: int, batched: bool) -> list[str]:
    """The ids of a group's requests: the group's own for the only one, else with a number."""
    return [f"{name}_{index}" for index in range(count)] if batched else [name]
