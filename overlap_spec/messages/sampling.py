"""How the tokens of a request are drawn, by which grammar and within which reasoning, and when its output ends."""

import enum
import math
import struct
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.messages.base import TOKEN_BYTES
from overlap_spec.messages.request import (
    FEW,
    MANY,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR_BYTES,
    MAX_MARKER_CHARS,
    MAX_MARKER_TOKENS,
    MAX_MARKERS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_WORD_CHARS,
    MAX_WORD_TOKENS,
    MOST,
    LogProbParams,
    Speculative,
    check_strings,
    check_text,
    shown,
)

INTEGER = "a 64-bit integer"


class Reasoning(msgspec.Struct, frozen=True, array_like=True):
    """The markers between which a model reasons before it answers.

    The text of an answer begins with the opening marker wherever it was written: if the prompt ends with it, it is put
    before the answer's text. `bridge`, `header`: what the model writes between the reasoning and its next message, and
    before the text of its answer; only a grammar needs them.
    """

    opening: str
    closing: str
    is_implicit: bool = False  # an answer may begin with reasoning without the opening marker
    is_separate: bool = True  # False: the text is as it was drawn, without the prompt's marker before it
    budget: int | None = None  # tokens after which the reasoning is closed
    bridge: str = ""
    header: str = ""

    def __post_init__(self) -> None:
        check_text("reasoning.opening", self.opening, MAX_MARKER_CHARS)
        check_text("reasoning.closing", self.closing, MAX_MARKER_CHARS)
        check_text("reasoning.bridge", self.bridge, MAX_MARKER_CHARS)
        check_text("reasoning.header", self.header, MAX_MARKER_CHARS)


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """A thinking budget in token ids, as the frontend works it out. `is_open`: the output begins in the reasoning."""

    budget: int
    is_open: bool
    opening: Annotated[tuple[int, ...], FEW]
    closing: Annotated[tuple[int, ...], FEW]

    def __post_init__(self) -> None:
        if not 0 <= self.budget < 1 << 31:
            raise RequestError("thinking_budget", f"thinking_budget must be tokens from 0 on, got {self.budget}")
        if len(self.opening) > MAX_MARKER_TOKENS or not 1 <= len(self.closing) <= MAX_MARKER_TOKENS:
            lengths = f"{len(self.opening)} and {len(self.closing)}"
            text = f"a thinking budget needs markers of 1 to {MAX_MARKER_TOKENS} tokens, got {lengths}"
            raise RequestError("thinking_budget", text)
        if not all(0 <= token < 1 << 31 for token in (*self.opening, *self.closing)):
            raise RequestError("thinking_budget", "thinking: the markers' token ids must be from 0 on, below 2^31")


# Between tokens of JSON, unless a schema has its own. Without a bound a weak model may go on with white space until its
# length is used up.
JSON_WHITE_SPACE = r"[ \n\t]{0,20}"


class GrammarKind(enum.StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    LARK = "lark"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an output must be: its tokens are drawn from those that the grammar allows, and EOS once it is complete.

    `text` is JSON of a JSON schema, of a list of strings (choice) and of a structural tag (`structures` with `begin`,
    `schema` and `end`, and `triggers`, as in SGLang); else the expression or the rules themselves.

    `markers`: what the rules `marker_0`, `marker_1`, .. of Lark stand for: text, or a special token. `reasoning`: the
    output may reason first, and `is_reasoning`: it begins inside the reasoning; the grammar is of what follows.
    `thinking`: the reasoning has a budget; the frontend adds it, and it decides where the grammar begins. So it does
    `is_slow`: to compile it takes long.
    """

    kind: GrammarKind
    text: str
    markers: Annotated[tuple[str, ...], FEW] = ()
    reasoning: Reasoning | None = None
    is_reasoning: bool = False
    thinking: Thinking | None = None
    is_slow: bool = False

    def __post_init__(self) -> None:
        check_strings("grammar.markers", self.markers, MAX_MARKERS, MAX_MARKER_CHARS, "markers")

    @property
    def num_bytes(self) -> int:
        """Of its text; a text that is far too long is not encoded."""
        if len(self.text) > MAX_GRAMMAR_BYTES:
            return len(self.text)
        return len(self.text.encode("utf-8", "surrogatepass"))


DRAWS = ("greedy", "sampled", "constrained")  # how the tokens of a request are drawn


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """How one request's tokens are drawn and when it ends. Names and defaults are SGLang's, and defaults do not travel.

    `max_new_tokens=None` means up to the model's context, and 0 that only the prompt is computed; `seed=None` means the
    engine draws one.
    Raises: RequestError naming the field that is out of range.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0  # <= 1e-6 is greedy
    top_k: int = -1  # -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], FEW] = ()
    stop_token_ids: Annotated[tuple[int, ...], FEW] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: Grammar | None = None
    speculative: Speculative = Speculative()
    shown_tokens: Annotated[
        tuple[str, ...], FEW
    ] = ()  # special tokens that stay in the text although others are skipped
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None  # made of `reasoning` and the prompt
    log_probs: LogProbParams | None = None
    stop_regex: Annotated[tuple[str, ...], FEW] = ()
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last so many; -1: as many as the context holds
    logit_bias: Annotated[dict[int, float], FEW] = {}  # by token id
    allowed_token_ids: Annotated[tuple[int, ...], MANY] | None = None  # None: all
    bad_words: Annotated[tuple[str, ...], FEW] = ()
    # As tokens; the frontend adds those of `bad_words`.
    bad_word_ids: Annotated[tuple[Annotated[tuple[int, ...], FEW], ...], FEW] = ()
    # `allowed_token_ids`, packed: int32, little-endian. The frontend puts them here, whatever it was sent.
    allowed_ids: Annotated[bytes, msgspec.Meta(max_length=2 * TOKEN_BYTES * MAX_ALLOWED_IDS)] = b""

    def __post_init__(self) -> None:
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        if self.shown_tokens:
            check_strings("shown_tokens", self.shown_tokens, MAX_MARKERS, MAX_MARKER_CHARS, "tokens")
        for rule in SAMPLING_RULES if self.has_lists else NUMBER_RULES:
            try:
                if rule.holds(self):
                    continue
                got = (rule.shown or shown)(getattr(self, rule.field))
            except (TypeError, AttributeError):  # a value of another type
                got = shown(getattr(self, rule.field))
            raise RequestError(rule.field, f"{rule.field} must be {rule.want}, got {got}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            most = self.max_new_tokens
            raise RequestError("min_new_tokens", f"min_new_tokens must not exceed the limit of {most} new tokens")

    def _check_grammar(self, grammar: Grammar) -> None:
        """A grammar ends its output by EOS, so nothing else may decide when EOS is drawn."""
        if grammar.num_bytes > MAX_GRAMMAR_BYTES:
            got = f"{grammar.num_bytes} bytes"
            raise RequestError("grammar", f"grammar has {got}: at most {MAX_GRAMMAR_BYTES} are taken")
        ends = {"ignore_eos": self.ignore_eos, "min_new_tokens": self.min_new_tokens}
        for field, value in ends.items():
            if value:
                raise RequestError(field, f"{field} cannot be used with a grammar, which ends its output by EOS")
        given_lists = {"allowed_token_ids": self.allows_some, "bad_words": bool(self.bad_words or self.bad_word_ids)}
        for field, given in given_lists.items():
            if given:
                raise RequestError(field, f"{field} cannot be used with a grammar, which may allow nothing else")

    @property
    def draw(self) -> str:
        if self.grammar is not None:
            return "constrained"
        return "greedy" if self.greedy else "sampled"

    @property
    def needs(self) -> tuple[str, ...]:
        """The features without which an engine cannot draw these tokens, by their names in `features/`."""
        return () if self.grammar is None else ("grammar",)

    @property
    def has_lists(self) -> bool:
        """True if it has tokens, words or patterns, as few requests do."""
        ends = self.stop or self.stop_token_ids or self.stop_regex
        return bool(ends or self.biases_logits or self.bad_words or self.bad_word_ids)

    @property
    def greedy(self) -> bool:
        """True if every token is the argmax; the bound is SGLang's."""
        return self.temperature <= 1e-6

    @property
    def changes_logits(self) -> bool:
        """True if its parameters change its logits; a grammar's masks are apart."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        lists = self.biases_logits or bool(self.bad_word_ids)
        return self.min_new_tokens > 0 or penalties != (0, 0, 1) or lists or self.thinking is not None

    @property
    def biases_logits(self) -> bool:
        """True if tokens have a bias, or only some are allowed."""
        return bool(self.logit_bias) or self.allows_some

    @property
    def packed_allowed(self) -> bytes:
        """`allowed_ids`, made of `allowed_token_ids` if they are not packed yet; b"": all tokens are allowed."""
        if self.allowed_token_ids is None:
            return self.allowed_ids
        return struct.pack(f"<{len(self.allowed_token_ids)}i", *self.allowed_token_ids)

    @property
    def allows_some(self) -> bool:
        """True if only some tokens are allowed."""
        return bool(self.allowed_ids) or self.allowed_token_ids is not None


class SamplingRule(NamedTuple):
    """What a parameter must be. `shown`: what an error shows of it, unless `bounds.shown` is enough."""

    field: str
    holds: Callable[[SamplingParams], bool]
    want: str
    shown: Callable[[Any], str] | None = None


def _fit(strings: tuple[str, ...], most: int, most_chars: int) -> bool:
    return not strings or (len(strings) <= most and max(map(len, strings)) <= most_chars and all(strings))


def _are_ids(ids: tuple[int, ...]) -> bool:
    """Whether they fit 31 bits. To pack them takes half as long as to compare each with two bounds."""
    try:
        packed = struct.pack(f"<{len(ids)}i", *ids)
    except struct.error:
        return False
    return packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()  # the sign is in a token's last byte


def _sizes(strings: tuple[str, ...]) -> str:
    return f"{len(strings)} of them, of up to {max(map(len, strings), default=0)} characters"


# Every request is checked where it enters a process, so a rule that is kept must cost next to nothing. The length of a
# list is checked before its items.
SAMPLING_RULES = (
    SamplingRule("logit_bias", lambda asked: len(asked.logit_bias) <= MAX_BIASES, f"at most {MAX_BIASES} biases"),
    SamplingRule(
        "logit_bias",
        lambda asked: (
            not asked.logit_bias or all(0 <= i < MOST and -100 <= bias <= 100 for i, bias in asked.logit_bias.items())
        ),
        "token ids >= 0, with a bias in [-100, 100] each",
        lambda biases: ", ".join(f"{shown(i)}: {shown(bias)}" for i, bias in list(biases.items())[:8]),
    ),
    SamplingRule(
        "allowed_token_ids",
        lambda asked: (
            asked.allowed_token_ids is None
            or (0 < len(asked.allowed_token_ids) <= MAX_ALLOWED_IDS and _are_ids(asked.allowed_token_ids))
        ),
        f"1 to {MAX_ALLOWED_IDS} token ids, each of 0 to 2**31 - 1",
    ),
    SamplingRule(
        "allowed_ids",
        lambda asked: (
            len(asked.allowed_ids) <= TOKEN_BYTES * MAX_ALLOWED_IDS and not len(asked.allowed_ids) % TOKEN_BYTES
        ),
        f"at most {MAX_ALLOWED_IDS} packed token ids",
    ),
    SamplingRule(
        "bad_words", lambda asked: len(asked.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} words", _sizes
    ),
    SamplingRule(
        "bad_words",
        lambda asked: (
            not asked.bad_words
            or (
                max(map(len, asked.bad_words)) <= MAX_WORD_CHARS
                and not any(map(str.isspace, asked.bad_words))
                and all(asked.bad_words)
            )
        ),
        f"words that are not blank, of at most {MAX_WORD_CHARS} characters",
        _sizes,
    ),
    SamplingRule(
        "bad_word_ids",
        lambda asked: (
            not asked.bad_word_ids
            or (
                len(asked.bad_word_ids) <= 2 * MAX_BAD_WORDS
                and all(1 <= len(ids) <= MAX_WORD_TOKENS and min(ids) >= 0 for ids in asked.bad_word_ids)
            )
        ),
        f"at most {2 * MAX_BAD_WORDS} words of 1 to {MAX_WORD_TOKENS} token ids",
    ),
    SamplingRule("max_new_tokens", lambda asked: -MOST <= (asked.max_new_tokens or 0) < MOST, INTEGER),
    SamplingRule("min_new_tokens", lambda asked: -MOST <= asked.min_new_tokens < MOST, INTEGER),
    SamplingRule("top_k", lambda asked: -MOST <= asked.top_k < MOST, INTEGER),
    SamplingRule("seed", lambda asked: -MOST <= (asked.seed or 0) < MOST, INTEGER),
    SamplingRule("max_new_tokens", lambda asked: (asked.max_new_tokens or 0) >= 0, "at least 0"),
    SamplingRule("min_new_tokens", lambda asked: asked.min_new_tokens >= 0, "at least 0"),
    SamplingRule("temperature", lambda asked: 0 <= asked.temperature < math.inf, "a finite number >= 0"),
    SamplingRule("top_k", lambda asked: asked.top_k == -1 or asked.top_k >= 1, "-1 or at least 1"),
    SamplingRule("top_p", lambda asked: 0 < asked.top_p <= 1, "in (0, 1]"),
    SamplingRule("min_p", lambda asked: 0 <= asked.min_p <= 1, "in [0, 1]"),
    SamplingRule("presence_penalty", lambda asked: -2 <= asked.presence_penalty <= 2, "in [-2, 2]"),
    SamplingRule("frequency_penalty", lambda asked: -2 <= asked.frequency_penalty <= 2, "in [-2, 2]"),
    SamplingRule("repetition_penalty", lambda asked: 1e-6 <= asked.repetition_penalty <= 2, "in [0.000001, 2]"),
    SamplingRule(
        "stop",
        lambda asked: _fit(asked.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS),
        f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_CHARS} characters",
        _sizes,
    ),
    SamplingRule(
        "stop_regex",
        lambda asked: _fit(asked.stop_regex, MAX_STOP_STRINGS, MAX_STOP_CHARS),
        f"at most {MAX_STOP_STRINGS} non-empty patterns of at most {MAX_STOP_CHARS} characters",
        _sizes,
    ),
    SamplingRule(
        "truncate_prompt_tokens",
        lambda asked: (
            asked.truncate_prompt_tokens is None
            or (-1 <= asked.truncate_prompt_tokens < MOST and asked.truncate_prompt_tokens != 0)
        ),
        "-1 or at least 1",
    ),
    SamplingRule(
        "stop_token_ids",
        lambda asked: (
            not asked.stop_token_ids
            or (len(asked.stop_token_ids) <= MAX_STOP_IDS // 2 and all(0 <= i < MOST for i in asked.stop_token_ids))
        ),
        f"at most {MAX_STOP_IDS // 2} token ids >= 0",
    ),
)


LARGE_FIELDS = ("logit_bias", "allowed_ids", "bad_word_ids")  # what requests of a group may share
LISTS = (
    "logit_bias",
    "allowed_token_ids",
    "allowed_ids",
    "bad_words",
    "bad_word_ids",
    "stop",
    "stop_regex",
    "stop_token_ids",
)
NUMBER_RULES = tuple(rule for rule in SAMPLING_RULES if rule.field not in LISTS)
