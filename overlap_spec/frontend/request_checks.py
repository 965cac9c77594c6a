"""Checks a request against the engine's limits and fills in the fields that it left out."""

import hmac
import random
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from overlap_spec.client.link import pack_ids
from overlap_spec.errors import RequestError
from overlap_spec.messages import MAX_STOP_IDS, EngineLimits, ErrorCode, SamplingParams, Speculative, Terms

ANY_ID = 1 << 31


class Refusal(Exception):
    """The engine takes no request now. `code` is the reason."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestChecks:
    """The rules that one engine checks requests by. `limits` are unknown until it is warm."""

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        max_queued_requests: int,
        seed: int | None,
        trusts_templates: bool = False,
    ) -> None:
        self.limits: EngineLimits | None = None
        self.draining = False
        self.flags = Terms()  # the time limits of every request
        self.admin_key: str | None = None
        self.max_queued_requests = max_queued_requests
        self.trusts_templates = trusts_templates  # a request may bring a chat template along
        self._eos_token_ids = tuple(eos_token_ids)
        self._seeds = random.Random(seed)

    @property
    def vocab_size(self) -> int:
        """The model's; before it is known, a bound of every id."""
        return self.limits.vocab_size if self.limits is not None else ANY_ID

    def check_open(self, is_new: bool = True) -> EngineLimits:
        """Raises: Refusal if the engine is starting, or takes no new request any more."""
        if self.draining and is_new:
            raise Refusal(ErrorCode.SHUTTING_DOWN, "the engine is shutting down")
        if self.limits is None:
            raise Refusal(ErrorCode.STARTING, "the engine is still starting")
        return self.limits

    def check_admin(self, key: str) -> None:
        """Raises: RequestError unless this is the operator's key, or there is none."""
        if self.admin_key is not None and not hmac.compare_digest(key.encode(), self.admin_key.encode()):
            raise RequestError("api_key", "this concerns all clients: it needs the key of --admin-api-key")

    def settle(
        self, sampling: SamplingParams, prompt: Sequence[int], limits: EngineLimits, seed: int | None = None
    ) -> SamplingParams:
        """Fill in length and seed; `seed`: instead of the sampling's.

        Raises: RequestError naming the field that does not fit.
        """
        _check_prompt(prompt, limits)
        max_new_tokens = _settle_length(sampling, len(prompt), limits)
        seed = sampling.seed if seed is None else seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        speculative = settle_speculation(sampling.speculative, limits)
        if (max_new_tokens, seed) == (sampling.max_new_tokens, sampling.seed) and speculative is sampling.speculative:
            return sampling
        return msgspec.structs.replace(sampling, max_new_tokens=max_new_tokens, seed=seed, speculative=speculative)

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Ids that end the request; one that the model lacks never does. Raises: RequestError if there are too many."""
        eos = () if sampling.ignore_eos else self._eos_token_ids
        ids = tuple(dict.fromkeys((*eos, *(token for token in sampling.stop_token_ids if token < self.vocab_size))))
        if len(ids) > MAX_STOP_IDS:
            raise RequestError("stop_token_ids", f"at most {MAX_STOP_IDS} stop ids are taken, EOS included: {len(ids)}")
        return ids


def truncated(ids: "array[int]", sampling: SamplingParams, limits: EngineLimits) -> "array[int]":
    """The end of the prompt that the request keeps."""
    keep = sampling.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        keep = min(limits.max_len, limits.max_total_tokens) - max(1, sampling.max_new_tokens or 0)
    return ids[-max(keep, 1) :]


def with_packed_ids(sampling: SamplingParams) -> SamplingParams:
    """The same with `allowed_token_ids` in `allowed_ids`. Raises: RequestError if one is no token id."""
    allowed = sampling.allowed_token_ids
    if allowed is None:
        return sampling
    packed = pack_ids(allowed, "allowed_token_ids")
    return msgspec.structs.replace(sampling, allowed_token_ids=None, allowed_ids=packed)


def for_scheduler(sampling: SamplingParams) -> SamplingParams:
    """What the scheduler is asked for: nothing that concerns text, and one token at least.

    A prompt is computed by drawing its first token, wanted or not.
    """
    of_text = sampling.stop or sampling.stop_regex or sampling.shown_tokens
    if sampling.max_new_tokens and not of_text:
        return sampling
    most = max(1, sampling.max_new_tokens or 0)
    return msgspec.structs.replace(sampling, max_new_tokens=most, stop=(), stop_regex=(), shown_tokens=())


def settle_speculation(asked: Speculative, limits: EngineLimits) -> Speculative:
    """The same with a `num_steps` that is None if it limits nothing. Raises: RequestError naming what is loaded."""
    loaded = f"{limits.method} with up to {limits.num_steps} steps" if limits.num_steps else "no method"
    if not asked.is_plain and asked.method.upper() not in ("", limits.method.upper()):
        raise RequestError(
            "speculative", f"speculative.method {asked.method!r} is not loaded: this engine has {loaded}"
        )
    most = 0 if asked.is_plain else asked.num_steps
    if most is None:
        return asked
    if most > limits.num_steps:
        raise RequestError("speculative", f"speculative.num_steps {most} is out of range: this engine has {loaded}")
    return msgspec.structs.replace(asked, num_steps=most if most < limits.num_steps else None)


def _check_prompt(prompt: Sequence[int], limits: EngineLimits) -> None:
    if not prompt:
        raise RequestError("prompt", "the prompt must have at least one token")
    check_ids("prompt", prompt, limits.vocab_size)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises: RequestError naming `field` if an id is outside the vocabulary."""
    if not ids:
        return
    most = _largest(ids) if isinstance(ids, array) else max(ids) if min(ids) >= 0 else ANY_ID
    if most >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(field, f"{field}: token id {bad} is outside the vocabulary (0 to {vocab_size - 1})")


def _largest(ids: "array[int]") -> int:
    """The largest id of a prompt, which may be long; a negative one is larger than any."""
    return int(np.frombuffer(ids, np.uint32).max())


def _settle_length(sampling: SamplingParams, prompt_len: int, limits: EngineLimits) -> int:
    most = min(limits.max_len, limits.max_total_tokens)
    asked = sampling.max_new_tokens if sampling.max_new_tokens is not None else max(1, most - prompt_len)
    total = prompt_len + max(asked, 1)
    field = "prompt" if prompt_len >= most else "max_new_tokens"
    wanted = f"{prompt_len} prompt tokens + {total - prompt_len} new tokens = {total}"
    if total > limits.max_len:
        raise RequestError(field, f"{wanted}: more than the maximum context length of {limits.max_len} tokens")
    if total > limits.max_total_tokens:
        raise RequestError(
            field,
            f"{wanted}: more than the engine's memory holds ({limits.max_total_tokens} tokens;"
            " --max-total-tokens or --mem-fraction-static would change that)",
        )
    if sampling.min_new_tokens > asked:
        raise RequestError("min_new_tokens", f"min_new_tokens {sampling.min_new_tokens} exceeds the {asked} that fit")
    return asked
