"""`POST /generate`, SGLang's own endpoint: text or token ids, one or a batch, cumulative events. No OpenAI shapes.

Log-probs are in SGLang's shapes: lists of [log-prob, token id, text] in `meta_info`.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.client.log_probs import Candidate, TokenLogProb, alone
from overlap_spec.entrypoints.http.body_fields import Json, refuse_unsupported, salt_of, terms_of
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_body import convert, read_body, without_nulls
from overlap_spec.entrypoints.http.request_runner import (
    Collected,
    EngineRequest,
    Group,
    RequestId,
    Runner,
    renamed,
    sent_by,
)
from overlap_spec.entrypoints.http.speculation import asked_speculation
from overlap_spec.entrypoints.http.streams import DONE, EventStream, JsonParts, event, list_parts, unless_gone
from overlap_spec.entrypoints.openai.logprobs import blocks, finite, num_log_probs
from overlap_spec.entrypoints.openai.prompts import check_no_text, read_prompts
from overlap_spec.entrypoints.openai.requests import (
    OF_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    ListFields,
    check_choices,
    fields_of,
    numbered,
    spread,
    stop_strings,
)
from overlap_spec.entrypoints.openai.response_format import READERS
from overlap_spec.errors import RequestError
from overlap_spec.messages import FinishKind, LogProbParams, Prompt, SamplingParams, Speculative

NAMES = {
    "log_probs": "return_logprob",
    "log_probs.top": "top_logprobs_num",
    "log_probs.prompt_from": "logprob_start_len",
    "log_probs.token_ids": "token_ids_logprob",
}
Triple = tuple[float | None, int, str | None]


class NativeLogProbFields(msgspec.Struct, kw_only=True):
    """Fields of a body: one value for all prompts, or one for each. `logprob_start_len` -1: none of the prompt."""

    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False

    def log_probs(self, count: int) -> list[LogProbParams | None]:
        """What each prompt asks for. Raises: RequestError, Problem naming the field."""
        asked = _each("return_logprob", self.return_logprob, count)
        starts = _each("logprob_start_len", self.logprob_start_len, count)
        tops = _each("top_logprobs_num", self.top_logprobs_num, count)
        columns = zip(asked, starts, tops, self._token_ids(count), strict=True)
        return [_params(*parts) if is_asked else None for is_asked, *parts in columns]

    def _token_ids(self, count: int) -> list[list[int]]:
        given = self.token_ids_logprob or []
        flat = [item for item in given if isinstance(item, int)]
        if len(flat) == len(given):
            return [flat] * count
        if flat or len(given) != count:
            text = f"token_ids_logprob: expected a list of token ids, or one for each of {count} prompts"
            raise Problem(400, text, "token_ids_logprob", "invalid_value")
        return [item or [] for item in given if not isinstance(item, int)]


def _each(field: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise Problem(400, f"{field}: {len(given)} for {count} prompts", field, "invalid_value")
    return given


def _params(start: int, top: int, token_ids: list[int]) -> LogProbParams:
    try:
        return LogProbParams(top=top, token_ids=tuple(token_ids), prompt_from=None if start == -1 else start)
    except RequestError as error:
        raise renamed(error, NAMES) from None


def meta_log_probs(asked: LogProbParams, answer: Collected, with_text: bool, parts: JsonParts) -> dict[str, Any]:
    """The fields of `meta_info`. The first prompt token that is returned has null for its log-prob, as in SGLang."""
    sides = {"input": answer.prompt_log_probs, "output": answer.log_probs}
    meta: dict[str, Any] = {}

    def listed(entries: Sequence[TokenLogProb], write: Callable[[TokenLogProb], Any]) -> list[Any] | msgspec.Raw:
        if parts.is_large:
            return parts.later(list_parts(list(map(write, block)) for block in blocks(entries)))
        return list(map(write, entries))

    for side, entries in sides.items():
        meta[f"{side}_token_logprobs"] = listed(alone(entries), lambda entry: _own(entry, with_text))
        if asked.top:
            meta[f"{side}_top_logprobs"] = listed(entries, lambda entry: _triples(entry, entry.top, with_text))
        if asked.token_ids:
            others = listed(entries, lambda entry: _triples(entry, entry.listed, with_text))
            meta[f"{side}_token_ids_logprobs"] = others
    meta["output_token_logprobs_length"] = len(answer.log_probs)
    return meta


def _own(entry: TokenLogProb, with_text: bool) -> Triple:
    log_prob = None if entry.log_prob is None else finite(entry.log_prob)
    return log_prob, entry.token_id, entry.text if with_text else None


def _triples(entry: TokenLogProb, others: Sequence[Candidate], with_text: bool) -> list[Triple] | None:
    if entry.log_prob is None:
        return None
    texts = [each.token.decode(errors="replace") if with_text else None for each in others]
    return [(finite(each.log_prob), each.token_id, text) for each, text in zip(others, texts, strict=True)]


class GenerateRequest(NativeLogProbFields, kw_only=True):
    """Body of `/generate`. `text`: str | [str]; `input_ids`: [int] | [[int]]; one of the two.

    `speculative` is for those of `sampling_params` that have none.
    """

    text: str | list[str] | None = None
    input_ids: Any = None
    sampling_params: Json | list[Json | None] = {}
    rid: RequestId | list[RequestId] = ""
    stream: bool = False
    speculative: Json = {}
    return_spec_tokens_details: bool = False
    timeout: float | None = None  # seconds
    first_token_timeout: float | None = None
    adapt: bool = True  # false: no draft learns from it
    cache_salt: str = ""  # vLLM's name for the next one
    extra_key: str | list[str] = ""


class NativeSampling(ListFields, kw_only=True):
    """`sampling_params`. Names and defaults are SGLang's; the seed has two names."""

    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    sampling_seed: int | None = None
    stop: str | list[str] = ""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False
    stop_regex: str | list[str] = ""
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    speculative: Speculative = Speculative()
    return_spec_tokens_details: bool = False


EITHER = frozenset({"speculative", "return_spec_tokens_details"})  # in the body, for all, or in `sampling_params`
SALTS = "cache_salt", "extra_key"
BODY_ALONE = frozenset((*NativeLogProbFields.__struct_fields__, "timeout", "first_token_timeout", "adapt", *SALTS))
SEEDS, MOST_SEED = ("seed", "sampling_seed"), 1 << 63
SAMPLING = frozenset(NativeSampling.__struct_fields__) - EITHER
DRAWING = frozenset(SamplingParams.__struct_fields__) - {"allowed_token_ids"}  # `lists` has them packed
OTHER_NAMES = {  # in OpenAI's and vLLM's API
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
CACHING = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
GRANTED = ("model", "user", "metadata", "safety_identifier", "stream_options", *CACHING)  # usage is in every event
OF_OPENAI = {
    name: OF_COMPLETIONS.get(name, neutral)
    for shape in (ChatRequest, CompletionRequest)
    for name, neutral in fields_of(shape, GenerateRequest, NativeSampling).items()
    if name not in OTHER_NAMES and name not in GRANTED
}


class NativeGenerate:
    """The endpoint."""

    def __init__(self, runner: Runner, info: ServerInfo) -> None:
        self._runner = runner
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, with one reply or a list, or with a stream of events."""
        arrived_at = time.perf_counter()
        body, group, batched = await read_body(request, self._info.max_body_bytes, self._read)
        group = sent_by(request, group)
        if body.stream:
            return EventStream(self._events(group, body, batched, arrived_at))
        answers = await unless_gone(request.receive, self._runner.collect(group))
        pairs = list(zip(group.requests, answers, strict=True))
        num = sum(num_log_probs(asked.sampling.log_probs, [answer]) for asked, answer in pairs)
        parts = JsonParts(num, self._runner.writing(group))
        replies = [self._reply(asked, answer, (body, parts), arrived_at) for asked, answer in pairs]
        return parts.response(replies if batched else replies[0])

    def _read(self, fields: Json) -> tuple[GenerateRequest, Group, bool]:
        refuse_unsupported(fields)
        refuse_unsupported(fields, OF_OPENAI)
        _refuse_misplaced(fields)
        body = convert(fields, GenerateRequest)
        return body, *self._group(body)

    def _group(self, body: GenerateRequest) -> tuple[Group, bool]:
        field, prompts, batched = self._prompts(body)
        read = self._sampling(body, len(prompts))
        n = read[0].n
        if any(other.n != n for other in read):
            raise Problem(400, "n must be the same for all prompts of a request", "n", "invalid_value")
        check_choices(n, len(prompts))
        batched = batched or n > 1
        name, ids = _ids(body.rid, len(prompts) * n, batched)
        names = {"prompt": field, "grammar": _grammar_field(body.sampling_params), **NAMES}
        sampling = with_log_probs([each.sampling for each in read], body.log_probs(len(prompts)))
        seeds = [each.seed for each in read]
        requests = _with_salts(spread(ids, prompts, sampling, names, n, seeds), body, n)
        return Group(name, requests, terms_of(body)), batched

    def _prompts(self, body: GenerateRequest) -> tuple[str, list[Prompt], bool]:
        if (body.text is None) == (body.input_ids is None):
            text = "give either text or input_ids" + (", not both" if body.text is not None else "")
            raise Problem(400, text, "text", "missing_required_parameter")
        if body.text is not None:
            return "text", *read_prompts(body.text, "text", self._info)
        given = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params]
        cut = any(each is not None and each.get("truncate_prompt_tokens") is not None for each in given)
        check_no_text(body.input_ids, "input_ids")
        return "input_ids", *read_prompts(body.input_ids, "input_ids", self._info, cut=cut)

    def _sampling(self, body: GenerateRequest, count: int) -> list["ReadSampling"]:
        """For each prompt, how many choices it has and how they are drawn."""
        given, shared = body.sampling_params, {name: getattr(body, name) for name in EITHER}
        if isinstance(given, dict):
            return [read_sampling(shared | given, self._info)] * count
        if len(given) != count:
            text = f"sampling_params: {len(given)} for {count} prompts"
            raise Problem(400, text, "sampling_params", "invalid_value")
        reader = SamplingReader(self._info)
        return [reader.read(shared | (each or {})) for each in given]

    def _reply(
        self, request: EngineRequest, answer: Collected, shown: tuple[GenerateRequest, JsonParts], arrived_at: float
    ) -> Json:
        meta, (body, parts) = _meta_info(request, answer, arrived_at), shown
        if request.sampling.log_probs is not None:
            meta |= meta_log_probs(request.sampling.log_probs, answer, body.return_text_in_logprobs, parts)
        if answer.report.has_metrics:
            meta |= answer.report.sglang_details(answer.usage, self._info.num_steps)
            meta["speculative_decoding"] = answer.report.vllm_metrics(self._info.num_steps)
        if answer.report.provenance is not UNSET:
            meta["provenance"] = answer.report.provenance
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}

    async def _events(
        self, group: Group, body: GenerateRequest, batched: bool, arrived_at: float
    ) -> AsyncGenerator[bytes, None]:
        answers = [Collected(request.sampling.speculative) for request in group.requests]
        async with aclosing(self._runner.run(group)) as steps:
            async for step in steps:
                events = []
                for index, delta in step:
                    answers[index].add(delta)
                grown = [(index, group.requests[index], answers[index]) for index, _ in step]
                num = sum(num_log_probs(asked.sampling.log_probs, [answer]) for _, asked, answer in grown)
                parts = JsonParts(num, self._runner.writing(group))
                for index, asked, answer in grown:
                    reply = self._reply(asked, answer, (body, parts), arrived_at)
                    events.append(event({**reply, "index": index} if batched else reply))
                async for chunk in parts.written(b"".join(events)):
                    yield chunk
        yield DONE


class ReadSampling(NamedTuple):
    """`sampling_params`, read: how many choices, how each is drawn, and the seed if it is not that of `sampling`."""

    n: int
    sampling: SamplingParams
    seed: int | None = None


class SamplingReader:
    """Reads the `sampling_params` of a request's prompts: those that differ in the seed alone are one object."""

    def __init__(self, info: ServerInfo) -> None:
        self._info = info
        self._known: dict[bytes, ReadSampling] = {}

    def read(self, given: Json) -> ReadSampling:
        """Raises: as `read_sampling`."""
        seed, rest = _parted(given)
        known = self._known.get(rest)
        if known is None:
            known = read_sampling(given, self._info)
            self._known[rest] = known
        return known._replace(seed=known.sampling.seed if seed is None else seed)


def with_log_probs(sampling: Sequence[SamplingParams], asked: Sequence[LogProbParams | None]) -> list[SamplingParams]:
    """The same with the log-probs that each prompt asks for; what was one object and asks for the same stays one."""
    made: dict[tuple[int, LogProbParams | None], SamplingParams] = {}
    for each, log_probs in zip(sampling, asked, strict=True):
        if (id(each), log_probs) not in made:
            changed = each if log_probs is None else msgspec.structs.replace(each, log_probs=log_probs)
            made[id(each), log_probs] = changed
    return [made[id(each), log_probs] for each, log_probs in zip(sampling, asked, strict=True)]


def _parted(given: Json) -> tuple[int | None, bytes]:
    """A sound seed that has one name, else None; and the rest, as bytes that no other value has."""
    names = [name for name in SEEDS if name in given]
    seed = given[names[0]] if len(names) == 1 else None
    if type(seed) is not int or not 0 <= seed < MOST_SEED:
        seed = None
    try:
        return seed, msgspec.msgpack.encode(given if seed is None else {**given, names[0]: 0})
    except (OverflowError, ValueError):  # `read_sampling` names the field, unless it is an unknown one
        return None, repr(given).encode("utf-8", "surrogatepass")


def read_sampling(given: Json, info: ServerInfo) -> ReadSampling:
    """Raises: Problem or RequestError naming the field of `sampling_params`."""
    fields = without_nulls(given)
    refuse_unsupported(fields)
    refuse_unsupported(fields, OF_OPENAI)
    _refuse_other_names(fields)
    if misplaced := BODY_ALONE & fields.keys():
        name = min(misplaced)
        raise Problem(400, f"{name} belongs beside sampling_params, not in it", name, "invalid_value")
    read = convert(fields, NativeSampling)
    if read.seed is not None and read.sampling_seed not in (None, read.seed):
        raise Problem(400, "seed and sampling_seed differ: give one", "sampling_seed", "invalid_value")
    seed_name = "sampling_seed" if read.seed is None else "seed"
    given_here = msgspec.structs.asdict(read)
    values = {name: given_here[name] for name in DRAWING if name in given_here}
    values |= {
        "seed": given_here[seed_name],
        "stop": stop_strings(read.stop, info),
        "stop_regex": stop_strings(read.stop_regex, info, "stop_regex"),
        "stop_token_ids": tuple(read.stop_token_ids),
        "no_stop_trim": read.no_stop_trim or read.include_stop_str_in_output,
        "grammar": read.grammar(info),
        **read.lists(info),
        "speculative": asked_speculation(read.speculative, read.return_spec_tokens_details),
    }
    try:
        return ReadSampling(read.n, SamplingParams(**values))
    except RequestError as error:
        raise renamed(error, {"seed": seed_name, "grammar": read.grammar_field}) from None


def _with_salts(requests: list[EngineRequest], body: GenerateRequest, n: int) -> list[EngineRequest]:
    """The requests of all choices with the salts of a list, which has one for each prompt. Raises: RequestError."""
    if isinstance(body.extra_key, str):
        return requests
    if len(body.extra_key) * n != len(requests):
        text = f"extra_key: {len(body.extra_key)} for {len(requests) // n} prompts"
        raise RequestError("extra_key", text)
    salts = [salt_of(body.cache_salt, key) for key in body.extra_key]
    return [msgspec.structs.replace(each, cache_salt=salts[i // n]) for i, each in enumerate(requests)]


def _refuse_misplaced(fields: Json) -> None:
    """Raises: Problem for a sampling parameter outside `sampling_params`, which would have no effect."""
    for name in fields:
        if name in SAMPLING:
            raise Problem(400, f"{name} belongs in sampling_params", name, "invalid_value")
    _refuse_other_names(fields)


def _refuse_other_names(fields: Json) -> None:
    for name in fields:
        if name in OTHER_NAMES and fields[name] is not False:
            where = "" if "logprob" in name else ", in sampling_params"
            raise Problem(400, f"{name} is {OTHER_NAMES[name]} here{where}", name, "invalid_value")


def _grammar_field(given: Json | list[Json | None]) -> str:
    """The field that asks for a grammar; for messages of the engine."""
    each = given if isinstance(given, list) else [given]
    return next(
        (name for fields in each for name, value in (fields or {}).items() if name in READERS and value),
        "grammar",
    )


def _ids(rid: str | list[str], count: int, batched: bool) -> tuple[str, list[str]]:
    """Returns the group's id and each request's own: those given, or numbered ones."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count or not all(rid):
            raise Problem(400, f"rid: expected {count} different ids, one for each answer", "rid", "invalid_value")
        return (uuid.uuid4().hex if batched else rid[0]), rid
    name = rid or uuid.uuid4().hex
    return name, numbered(name, count, batched)


def _meta_info(request: EngineRequest, answer: Collected, arrived_at: float) -> Json:
    """Latency in seconds. `spec_accept_length` is SGLang's: the prefill's token is counted, unlike everywhere else."""
    usage = answer.usage
    meta: Json = {
        "id": request.request_id,
        "finish_reason": _finish_reason(answer),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "e2e_latency": answer.last_at - arrived_at,
        "spec_verify_ct": usage.spec_verify_ct,
    }
    if usage.spec_verify_ct > 0:
        meta["spec_accept_length"] = usage.completion_tokens / usage.spec_verify_ct
    return meta


def _finish_reason(answer: Collected) -> Json | None:
    finish = answer.finish
    if finish is None:
        return None
    match finish.kind:
        case FinishKind.STOP:
            return {"type": "stop", "matched": finish.matched}
        case FinishKind.LENGTH:
            return {"type": "length", "length": answer.usage.completion_tokens}
        case FinishKind.ABORT:
            return {"type": "abort", "message": finish.message or "aborted"}
