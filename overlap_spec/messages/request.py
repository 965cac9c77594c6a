"""One request: its prompt, how it is served and speculated for, and what each of its steps verified.

And the lengths of what a request can carry, with the errors that name field, limit and what was sent. No error shows
what was sent when it is long: it tells the length.
"""

import enum
from collections.abc import Collection, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from overlap_spec.errors import RequestError

MAX_STOP_IDS = 64  # ids per request, EOS included: the width of the worker's stop-id rows
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000  # of a stop string, and of a pattern
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 300_000  # whatever the vocabulary: the largest that is known has 262,208
MAX_BAD_WORDS = 128
MAX_WORD_TOKENS = 8  # of a bad word
MAX_WORD_CHARS = 2048  # of a bad word, whatever the tokenizer: 8 tokens of 256 characters
MAX_MARKER_TOKENS = 8  # of a marker of reasoning: the width of the worker's rows
MAX_MARKERS = 64  # of a grammar, and special tokens that are shown
MAX_MARKER_CHARS = 256
MAX_GRAMMAR_BYTES = 256 << 10
MAX_TOP_LOG_PROBS = 20  # most probable tokens at a position: OpenAI's bound
MAX_LISTED_LOG_PROBS = 32  # token ids whose log-probs are returned at every position
MAX_LOG_PROBS = 1 << 21  # of all answers to a request: choices x tokens x (1 + top + listed)
MAX_ID_CHARS = 256  # of an id that a user chooses
MAX_KEY_NAME_CHARS = 128  # of the name of an API key
# Of a request's, which may begin with the name of its key and end with the number of a choice.
MAX_WIRE_ID_CHARS = MAX_KEY_NAME_CHARS + 1 + MAX_ID_CHARS + 16
MAX_SALT_BYTES = 256  # of a client's own salt of the prefix cache, as UTF-8
MAX_NAME_CHARS = 1024  # of a client's name, a key, a method
MAX_TEMPLATE_CHARS = 64 << 10
MAX_TEMPLATE_ARGUMENTS = 64  # of a chat template, by name
MAX_TOOLS = 1024
MAX_MESSAGES = 1 << 15  # of a conversation, whatever the context: as many objects as a body may have
MOST = 2**63  # what a message can carry
# A message with a longer list is not read: a list takes many times the bytes of its message. Shorter ones that are too
# long are refused by a rule, which tells what was sent.
FEW = msgspec.Meta(max_length=1 << 12)
MANY = msgspec.Meta(max_length=4 * MAX_ALLOWED_IDS)
SHOWN_CHARS = 100  # of a value, in an error
SHOWN_ITEMS = 8  # of a list


def shown(value: object) -> str:
    """A value as an error shows it: whole if it is short, else how long it is."""
    if isinstance(value, str | bytes):
        unit = "characters" if isinstance(value, str) else "bytes"
        return repr(value) if len(value) <= SHOWN_CHARS else f"{len(value)} {unit}"
    if isinstance(value, Collection):
        if len(value) > SHOWN_ITEMS:
            return f"{len(value)} of them"
        return f"[{', '.join(map(shown, value))}]"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + ".."


def check_text(field: str, text: str, most: int) -> None:
    """Raises: RequestError if a text is too long."""
    if len(text) > most:
        raise RequestError(field, f"{field} must be at most {most} characters, got {len(text)}")


def check_salt(field: str, salt: str) -> None:
    """Raises: RequestError unless this can keep a client's prefixes apart from others'."""
    num_bytes = len(salt) if len(salt) > MAX_SALT_BYTES else len(salt.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_SALT_BYTES:
        raise RequestError(field, f"{field} must be at most {MAX_SALT_BYTES} bytes, got {num_bytes}")
    if "\0" in salt:
        raise RequestError(field, f"{field} must have no NUL")


def check_count(field: str, items: Collection[object], most: int, what: str) -> None:
    """Raises: RequestError if there are too many items. `what`: their name in the plural."""
    if len(items) > most:
        raise RequestError(field, f"{field} must be at most {most} {what}, got {len(items)} of them")


def check_strings(field: str, strings: Sequence[str], most: int, most_chars: int, what: str) -> None:
    """Raises: RequestError if there are too many strings, or one is too long."""
    check_count(field, strings, most, what)
    longest = max(map(len, strings), default=0)
    if longest > most_chars:
        raise RequestError(field, f"{field} must be {what} of at most {most_chars} characters, got one of {longest}")


MOST_SECONDS = 10_000_000  # of a time limit
NO_METHOD = "NONE"  # the method that guesses nothing
MOST_STEPS = 1 << 31


class TextPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True, weakref=True):
    """Plain text; special tokens are added as the tokenizer's own post-processor does."""

    text: str
    add_special_tokens: bool = True


class ChatPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True, weakref=True):
    """OpenAI-style messages, rendered by the model's chat template, or by `template`, a source of the client's own.

    `continue_final_message`: the prompt ends where the last message's content does, and the answer goes on from there.
    """

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
    tools: Annotated[list[dict[str, Any]], FEW] | None = None
    template_kwargs: Annotated[dict[str, Any], FEW] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""

    def __post_init__(self) -> None:
        check_count("tools", self.tools or (), MAX_TOOLS, "tools")
        check_count("chat_template_kwargs", self.template_kwargs, MAX_TEMPLATE_ARGUMENTS, "arguments")


class TokenPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True, weakref=True):
    """Token ids, packed: int32, little-endian."""

    ids: bytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request is served, whatever its tokens. Times in seconds; None: no limit of the request's own.

    `client`: clients take turns while they wait; a gateway names its own, "" is the sender. `age_s`: how long ago the
    request came; limits count from then. `has_begun`: it goes on after another's first token, so its own is not timed,
    and an engine that is shutting down takes it. `is_traced`: its last row tells when it passed from phase to phase.
    `key`: a gateway's name of the API key whose request it is. For who is no gateway, `client` and `key` are those of
    its own key, whatever it sends.
    `cache_salt`: requests of different salts share nothing of the prefix cache; "" is a salt like others.
    `adapt`: a draft may learn from it, if the engine's does and whose key it is allows it.
    Raises: RequestError naming the field.
    """

    client: str = ""
    timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    age_s: float = 0.0
    has_begun: bool = False
    is_traced: bool = False
    key: str = ""
    cache_salt: str = ""
    adapt: bool = True

    def __post_init__(self) -> None:
        for field, value in ("timeout", self.timeout_s), ("first_token_timeout", self.first_token_timeout_s):
            if value is not None and not 0 < value <= MOST_SECONDS:
                raise RequestError(field, f"{field} must be seconds above 0 and at most {MOST_SECONDS}, got {value!r}")
        if not self.age_s >= 0:
            raise RequestError("age_s", f"age_s must be seconds from 0 on, got {self.age_s!r}")
        check_text("client", self.client, MAX_NAME_CHARS)
        check_text("key", self.key, MAX_KEY_NAME_CHARS)
        if self.cache_salt:
            check_salt("cache_salt", self.cache_salt)


ANY_TERMS = Terms()


def id_on_link(key: str, request_id: str) -> str:
    """The id of a key's request on a gateway's link, which no other key's request has: no key has a line break."""
    return f"{key}\n{request_id}" if key else request_id


def id_of_user(key: str, request_id: str) -> str:
    """Inverse of `id_on_link`: what the user calls the request."""
    return request_id.removeprefix(f"{key}\n") if key else request_id


class MetricsLevel(enum.StrEnum):
    """What a reply reports of its steps. The names are those of vLLM's `--per-request-spec-decode-metrics`."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"  # with what each step did


class Speculative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one request is speculated for, and what its reply reports of that. Its tokens do not depend on it.

    `method`: the engine's, or NONE; "" is the engine's. `num_steps`: guesses in a row that a step verifies, of a tree
    its levels; None: as many as the engine has. 0 is plain decoding, as NONE is.
    Raises: RequestError if a number is out of range, or NONE is to guess.
    """

    method: str = ""
    num_steps: int | None = None
    provenance: bool = False  # tell where each token came from
    metrics: MetricsLevel = MetricsLevel.NONE

    def __post_init__(self) -> None:
        check_text("speculative.method", self.method, MAX_MARKER_CHARS)
        if self.num_steps is not None and not 0 <= self.num_steps < MOST_STEPS:
            raise RequestError("speculative", f"speculative.num_steps must be at least 0, got {self.num_steps}")
        if self.is_plain and self.num_steps:
            raise RequestError("speculative", "speculative.num_steps must be 0, or left out, with the method NONE")

    @property
    def is_plain(self) -> bool:
        """Whether the method is NONE."""
        return self.method.upper() == NO_METHOD

    @property
    def is_reported(self) -> bool:
        """Whether every step of the request reports what it verified."""
        return self.provenance or self.metrics is not MetricsLevel.NONE


class Origin(enum.StrEnum):
    """Where a token came from."""

    ACCEPTED = "accepted"  # guessed, and accepted
    BONUS = "bonus"  # the target's own, after the guesses that it accepted
    PLAIN = "plain"  # the target's own: nothing was guessed


class Verified(msgspec.Struct, frozen=True, array_like=True):
    """What one step verified for one request: guesses that might have been accepted (of a tree, its levels)."""

    step_id: int
    proposed: int
    accepted: int  # also of those that the end of the request cut off

    def origin(self, index: int) -> Origin:
        """Where the step's token came from, counted from 0."""
        if self.proposed == 0:
            return Origin.PLAIN
        return Origin.ACCEPTED if index < self.accepted else Origin.BONUS


PAIR_BYTES = 16  # a log-prob and a token id, float64


class LogProbParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probs are returned: of every output token, and of the prompt's from position `prompt_from` on.

    At every position also those of the `top` most probable tokens and of `token_ids`. `prompt_from=None`: none of the
    prompt. The first prompt token that is returned has no log-prob. Raises: RequestError naming the field.
    """

    top: int = 0
    token_ids: Annotated[tuple[int, ...], FEW] = ()
    prompt_from: int | None = None

    @property
    def width(self) -> int:
        """Log-probs at a position, the token's own included."""
        return 1 + self.top + len(self.token_ids)

    @property
    def record_bytes(self) -> int:
        """Of a position's, as they are packed."""
        return self.width * PAIR_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.top <= MAX_TOP_LOG_PROBS:
            raise RequestError("log_probs.top", f"log_probs.top must be 0 to {MAX_TOP_LOG_PROBS}, got {self.top}")
        if self.prompt_from is not None and not 0 <= self.prompt_from < MOST:
            text = f"log_probs.prompt_from must be a position of the prompt, from 0 on, got {self.prompt_from}"
            raise RequestError("log_probs.prompt_from", text)
        if len(self.token_ids) > MAX_LISTED_LOG_PROBS or not all(0 <= i < MOST for i in self.token_ids):
            want = f"at most {MAX_LISTED_LOG_PROBS} token ids >= 0, got {shown(self.token_ids)}"
            raise RequestError("log_probs.token_ids", f"log_probs.token_ids must be {want}")


class LogProbCount(NamedTuple):
    """How many log-probs an answer may have. `prompt_len`, `max_new_tokens`: at the most."""

    asked: LogProbParams
    prompt_len: int
    max_new_tokens: int

    @property
    def num_tokens(self) -> int:
        start = self.asked.prompt_from
        return self.max_new_tokens + (0 if start is None else max(self.prompt_len - start, 0))

    @property
    def total(self) -> int:
        return self.num_tokens * self.asked.width


def check_log_prob_count(answers: Sequence[LogProbCount]) -> None:
    """Raises: RequestError if all answers to a request together may have more log-probs than are returned."""
    total = sum(answer.total for answer in answers)
    if total <= MAX_LOG_PROBS:
        return
    first = answers[0]
    product = f"{first.num_tokens:,} tokens x {first.asked.width} log-probs"
    if len(answers) > 1:
        alike = all(answer.total == first.total for answer in answers)
        product = f"{len(answers):,} answers x {product}" if alike else f"{len(answers):,} answers"
    text = f"log_probs: {product} = {total:,}: at most {MAX_LOG_PROBS:,} are returned; ask for fewer, or set max_tokens"
    raise RequestError("log_probs", text)
