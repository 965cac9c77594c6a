"""The fields of a request body: read from JSON, in time that is linear in the text and only so deep, and refused.

**Lengths** of strings and lists are checked before anything is made of them. Names mean the same in every API. What is
not here is bounded otherwise: prompts and messages by the context, grammars when they are read, the rest by the body.

**Log-probs** in the answers to one body are bounded before any of its requests is started. The frontend checks each
request by itself, with its prompt's exact length. Here they are counted together, by what their prompts can have at the
most; only where that is too much are the prompts' tokens counted.

**Unsupported** parameters of OpenAI's, SGLang's and vLLM's APIs, which are known and not built, have a reason each. One
is refused with a 400 that names it, unless its value has no effect: none is ignored silently.

**Terms** of every API: time limits, and the salt of the prefix cache.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.errors import RequestError
from overlap_spec.messages import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_ID_CHARS,
    MAX_LOG_PROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOLS,
    MAX_WORD_CHARS,
    TOKEN_BYTES,
    ChatPrompt,
    LogProbCount,
    LogProbParams,
    Prompt,
    SamplingParams,
    Terms,
    TextPrompt,
    TokenPrompt,
    check_log_prob_count,
    check_salt,
)

Json = dict[str, Any]

SMALL_BODY_BYTES = 64 << 10  # larger bodies get no second, slower parse of what msgspec refuses
MOST_DIGITS = 4300  # of a number that msgspec does not take; Python reads integers of so many
MOST_DEPTH = 128  # lists and objects in one another
# Possessive, and it takes a string without an end as well: otherwise each quote of one is looked at from every other.
STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def parse_fields(body: bytes) -> Json:
    """The fields of a body; none if it is empty. Raises: Problem (400)."""
    value = parse(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_json")
    if num_brackets(body) > MOST_DEPTH:
        for name, field in value.items():
            check_depth(field, name)
    return value


def num_brackets(text: bytes) -> int:
    """How many lists and objects there are at most."""
    return text.count(b"[") + text.count(b"{")


def without_strings(text: bytes) -> bytes:
    """What of a JSON text is in no string."""
    return STRINGS.sub(b"", text)


def check_depth(value: Any, field: str) -> None:
    """Raises: Problem for a value that is nested too deep."""
    level = [[value]]
    for _ in range(MOST_DEPTH + 1):
        level = [child for each in level for child in _children(each) if type(child) in (dict, list)]
        if not level:
            return
    raise _too_deep(field)


def _children(value: Any) -> Any:
    return value.values() if type(value) is dict else value


def _too_deep(field: str | None) -> Problem:
    text = f"{field or 'the body'}: lists and objects may be nested {MOST_DEPTH} deep, got more"
    return Problem(400, text, field, "invalid_value" if field else "invalid_json")


def parse(body: bytes) -> Any:
    """A value of any depth that can be parsed. Raises: Problem (400)."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(None) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = str(error)
    if len(body) <= SMALL_BODY_BYTES:
        try:
            return _parse_leniently(body)
        except RecursionError:
            raise _too_deep(None) from None
        except ValueError as error:  # it names the place, and what is wrong with a lone surrogate
            why = str(error)
    raise Problem(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _parse_leniently(body: bytes) -> Any:
    """Accept the NaN, Infinity and 1e400 that Python's clients can send, so that the check of the field names it."""
    value = json.loads(body, parse_float=_short_number)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
    return value


def _short_number(text: str) -> float:
    """Raises: ValueError as Python does for integers of so many digits."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number may have {MOST_DIGITS} characters, got {len(text)}")
    return float(text)


MAX_PROMPTS = 2048  # in one HTTP request; the engine has no room for more
MAX_DOCUMENTS = 1024
MAX_CHOICES_OF_GRAMMAR = 1 << 14


class Length(NamedTuple):
    """Most items of a list or an object, and most characters of a string, of each in a list and of each name."""

    items: int = 0
    chars: int = 0


PATTERNS = Length(MAX_STOP_STRINGS, MAX_STOP_CHARS)
OF_PROMPTS = Length(MAX_PROMPTS)  # one value for each
NAME = Length(chars=256)
RECORDS = Length(64, 512)  # for the client itself; OpenAI takes 16 names of 64 characters

LENGTHS = {
    **dict.fromkeys(("stop", "stop_sequences", "stop_regex"), PATTERNS),
    "bad_words": Length(MAX_BAD_WORDS, MAX_WORD_CHARS),
    "allowed_token_ids": Length(MAX_ALLOWED_IDS),
    "logit_bias": Length(MAX_BIASES, MAX_ID_CHARS),
    "stop_token_ids": Length(MAX_STOP_IDS // 2),
    "guided_choice": Length(MAX_CHOICES_OF_GRAMMAR),
    "guided_whitespace_pattern": Length(chars=MAX_STOP_CHARS),
    "tools": Length(MAX_TOOLS),
    "documents": Length(MAX_DOCUMENTS),
    "chat_template": Length(chars=MAX_TEMPLATE_CHARS),
    "chat_template_kwargs": Length(MAX_TEMPLATE_ARGUMENTS, MAX_ID_CHARS),
    **dict.fromkeys(("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"), OF_PROMPTS),
    "sampling_params": OF_PROMPTS,
    "rid": Length(MAX_PROMPTS, MAX_ID_CHARS),
    "request_id": Length(chars=MAX_ID_CHARS),
    **dict.fromkeys(("metadata", "prompt_cache_options", "cache_control"), RECORDS),
    "include": Length(16, 256),
    **dict.fromkeys(("model", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), NAME),
    **dict.fromkeys(("service_tier", "reasoning_effort", "tool_choice"), NAME),
}


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Raises: Problem naming the field that is too long, its limit and what was sent."""
    for name, value in fields.items():
        length = LENGTHS.get(name) if isinstance(value, str | list | dict) else None
        if length is not None:
            _check(name, value, length)


def _check(name: str, value: str | list[Any] | dict[str, Any], length: Length) -> None:
    if not isinstance(value, str) and len(value) > length.items > 0:
        _refuse(f"{name}: at most {length.items} items are taken, got {len(value)}", name)
    strings = (value,) if isinstance(value, str) else value
    longest = max((len(each) for each in strings if isinstance(each, str)), default=0)
    if longest > length.chars > 0:
        what = "" if isinstance(value, str) else " in each item"
        _refuse(f"{name}: at most {length.chars} characters are taken{what}, got {longest}", name)


def _refuse(text: str, name: str) -> None:
    raise Problem(400, text, name, "invalid_value")


Neutral = tuple[Any, ...]  # the values without an effect; null never has one, and neither has a list of such values

REFUSED: dict[str, dict[str, Neutral]] = {  # why -> field -> neutral values
    "beam search is not built": {"use_beam_search": (False,), "beam_width": (1,), "length_penalty": (1,)},
    "text is continued at its end, not filled in": {"suffix": ("",)},
    "models read and write text alone": {
        "image_data": ([], ""),
        "audio_data": ([], ""),
        "video_data": ([], ""),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "modalities": (["text"], []),
        "audio": ({},),
        "images_config": ({},),
        "video_config": ({},),
        "use_audio_in_video": (False,),
    },
    "adapters are not built": {"lora_path": ("",)},
    "a prompt is text or token ids": {"input_embeds": (), "prompt_embeds": ()},
    "a request brings no code into the server": {
        "custom_logit_processor": ("",),
        "custom_params": ({},),
        "logits_processors": ([],),
        "vllm_xargs": ({},),
    },
    "answers are neither marked nor judged": {
        "watermark": ({},),
        "watermarking": (False,),
        "repetition_detection": ({},),
        "moderation": ({},),
    },
    "only tokens and their log-probs leave the device": {
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "return_entropy": (False,),
        "return_sampling_mask": (False,),
        "return_indexer_topk": (False,),
    },
    "usage has how many tokens were cached, return_token_ids the prompt": {
        "return_cached_tokens_details": (False,),
        "return_prompt_token_ids": (False,),
        "return_prompt_text": (False,),
        "return_meta_info": (False,),
    },
    "it is in its field or, without separate_reasoning, in the text": {"include_reasoning": (True,)},
    "log-probs of chosen tokens are /generate's token_ids_logprob": {"logprob_token_ids": ([],)},
    "tools and tool_choice have replaced it": {"functions": ([],), "function_call": ("none", "auto")},
    "guesses are made by the method that is loaded": {"prediction": ({},), "ngram_corpus_id": ("",)},
    "nothing is stored or looked up for a request": {
        "store": (False,),
        "web_search_options": (),
        "session_params": ({},),
    },
    "clients take turns, whatever their requests say": {"priority": (0,), "service_tier": ("auto", "default")},
    "the KV cache stays on one node": {
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "disagg_prefill_dp_rank": (0,),
    },
    "one engine has all requests": {"routed_dp_rank": (0,), "data_parallel_rank": (0,)},
    "tokens are sent as soon as they are known": {"stream_interval": (1,)},
    "the end of a long prompt is what is kept": {"truncation_side": ("left",)},
    "no model here has such a setting": {"verbosity": ("medium",)},
}
UNSUPPORTED = {name: neutral for fields in REFUSED.values() for name, neutral in fields.items()}
REASONS = {name: reason for reason, fields in REFUSED.items() for name in fields}


def refuse_unsupported(fields: Json, table: Mapping[str, Neutral] = UNSUPPORTED) -> None:
    """Raise a Problem for the first parameter whose value asks for something that is not built, or not here."""
    for name, value in fields.items():
        neutral = table.get(name)
        if neutral is None or _asks_for_nothing(value, neutral):
            continue
        why = f": {REASONS[name]}" if table is UNSUPPORTED else " at this endpoint"
        hint = f" or send {json.dumps(_suggested(value, neutral))}" if neutral else ""
        raise Problem(400, f"{name} is not supported{why}. Leave it out{hint}", name, "unsupported_parameter")


def _suggested(value: Any, neutral: Neutral) -> Any:
    """What to send instead; null where a switch's `false` would not be of the type that the API has."""
    return None if neutral[0] is False and not isinstance(value, bool) else neutral[0]


def _asks_for_nothing(value: Any, neutral: Neutral) -> bool:
    if value is None or any(_same(value, candidate) for candidate in neutral):
        return True
    return isinstance(value, list) and bool(value) and all(_asks_for_nothing(item, neutral) for item in value)


def _same(value: Any, other: Any) -> bool:
    """Equality without Python's `True == 1`."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class WithTerms(Protocol):
    """A body that tells how its requests are served."""

    @property
    def timeout(self) -> float | None:
        """Seconds until the end of the answer."""

    @property
    def first_token_timeout(self) -> float | None:
        """Seconds until its first token."""

    @property
    def cache_salt(self) -> str:
        """Requests of other salts share nothing of the prefix cache with it."""

    @property
    def adapt(self) -> bool:
        """Whether a draft may learn from it."""

    @property
    def extra_key(self) -> str | list[str]:
        """SGLang's name for the salt; a list has one for each prompt."""


def terms_of(body: WithTerms) -> Terms:
    """How the body's requests are served. Raises: RequestError naming the field that is out of range."""
    key = body.extra_key if isinstance(body.extra_key, str) else ""
    return Terms(
        timeout_s=body.timeout,
        first_token_timeout_s=body.first_token_timeout,
        cache_salt=salt_of(body.cache_salt, key) if body.cache_salt or key else "",
        adapt=body.adapt,
    )


def salt_of(cache_salt: str, extra_key: str) -> str:
    """The salt that either name gives. Raises: RequestError naming the field, also if they disagree."""
    check_salt("cache_salt", cache_salt)
    check_salt("extra_key", extra_key)
    if cache_salt and extra_key and cache_salt != extra_key:
        raise RequestError("extra_key", "extra_key and cache_salt differ: give one")
    return cache_salt or extra_key


ADDED = 16  # tokens that a tokenizer adds to a text, at the most
PromptIds = Callable[[Prompt], Awaitable[Sequence[int]]]


class _Asked(NamedTuple):
    """A request with log-probs."""

    prompt: Prompt
    sampling: SamplingParams
    log_probs: LogProbParams

    def at_most(self, prompt_len: int, max_len: int, is_exact: bool) -> LogProbCount:
        """What its answer may have."""
        keep = self.sampling.truncate_prompt_tokens
        prompt_len = min(prompt_len, max_len, keep if keep is not None and keep > 0 else max_len)
        most = self.sampling.max_new_tokens
        if most is None:
            most = max_len - (prompt_len if is_exact or self.log_probs.prompt_from is not None else 0)
        return LogProbCount(self.log_probs, prompt_len, min(most, max_len))


async def check_log_probs(
    requests: Sequence[tuple[Prompt, SamplingParams]], max_len: int, prompt_ids: PromptIds
) -> None:
    """Raises: RequestError if the answers together may have too many; what `prompt_ids` raises. A single one passes.

    Cancellation: safe.
    """
    asked = [_Asked(prompt, sampling, sampling.log_probs) for prompt, sampling in requests if sampling.log_probs]
    if len(requests) == 1 or not asked:
        return
    known = {id(each.prompt): _longest(each.prompt, max_len) for each in asked}
    counts = [each.at_most(known[id(each.prompt)], max_len, is_exact=False) for each in asked]
    if sum(count.total for count in counts) > MAX_LOG_PROBS:
        for prompt in {id(each.prompt): each.prompt for each in asked}.values():
            if not isinstance(prompt, TokenPrompt):
                known[id(prompt)] = len(await prompt_ids(prompt))
        counts = [each.at_most(known[id(each.prompt)], max_len, is_exact=True) for each in asked]
    check_log_prob_count(counts)


def _longest(prompt: Prompt, max_len: int) -> int:
    """Tokens that it can have: each covers a byte of its text."""
    match prompt:
        case TokenPrompt():
            return len(prompt.ids) // TOKEN_BYTES
        case TextPrompt():
            return len(prompt.text.encode("utf-8", "surrogatepass")) + ADDED
        case ChatPrompt():
            return max_len
