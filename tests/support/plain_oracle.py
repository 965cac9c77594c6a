"""The oracle of requests: plain decoding of one request alone, then cut where it ends.

Full attention over one contiguous request, one token a step. The executor is the project's own, and so is its sampler:
every token that it draws by temperature is drawn again from the same logits by `sampling_oracle.py`, which shares no
code with it.
"""

import struct
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import Finish, FinishKind, ResetSlot, SamplingParams, Speculative, StepPlan
from overlap_spec.models.interfaces import LazyLogits, LoadedTarget
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from support.kept_answers import KEPT
from support.own_processors import OWN_PROCESSORS
from support.plans import SlotPart, plan_of
from support.ring import Answer, RingConfig, tiny_loaded
from support.sampling_oracle import Filters, Penalties, drawn, must_draw, softmax, strictest
from support.tiny.models import CPU
from support.token_rules import with_token_rules


@dataclass(frozen=True)
class Expected:
    """A request's tokens, text and end, and what decided its tokens (see `PlainOracle`)."""

    token_ids: list[int]
    text: str
    finish: Finish
    num_forbidden: int = 0
    decided: Counter[str] = field(default_factory=Counter)
    strictest: Counter[str] = field(default_factory=Counter)


class Endings:
    """Where requests end, and what their text is then."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        return (() if sampling.ignore_eos else self._codec.eos_token_ids) + sampling.stop_token_ids

    def finish(self, tokens: list[int], sampling: SamplingParams) -> Finish | None:
        """How a request ends with the last of these tokens, if it does; a forced token may come before the least."""
        if tokens[-1] in self.stop_ids(sampling) and len(tokens) > sampling.min_new_tokens:
            return Finish(FinishKind.STOP, tokens[-1])
        found = self._first_stop_string(tokens, sampling)
        if found is not None:
            return Finish(FinishKind.STOP, found[1])
        return Finish(FinishKind.LENGTH) if len(tokens) == sampling.max_new_tokens else None

    def text(self, tokens: list[int], finish: Finish, sampling: SamplingParams) -> str:
        """What a client is sent of a request that ended so."""
        if isinstance(finish.matched, int):
            return self._codec.decode(tokens[:-1], True)
        found = self._first_stop_string(tokens, sampling) if finish.matched is not None else None
        text = self._codec.decode(tokens, True)
        return text if found is None else text[: found[0]]

    def _first_stop_string(self, tokens: list[int], sampling: SamplingParams) -> tuple[int, str] | None:
        """Where the first stop string begins, and which; the text of the first tokens is not searched."""
        text = self._codec.decode(tokens, True)
        before = len(self._codec.decode(tokens[: max(sampling.min_new_tokens - 1, 0)], True))
        found = [(text.find(stop, before), stop) for stop in sampling.stop if text.find(stop, before) >= 0]
        return min(found, key=lambda match: match[0] + len(match[1])) if found else None


class OverheardTarget:
    """A loaded target whose last logits can be read."""

    def __init__(self, loaded: LoadedTarget) -> None:
        self._loaded = loaded
        self._last: LazyLogits | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def attach(self, *given: Any) -> Any:
        """Make it runnable, and keep its logits."""
        model = self._loaded.attach(*given)
        logits_of = model.logits

        def logits(hidden: Tensor) -> LazyLogits:
            self._last = logits_of(hidden)
            return self._last

        model.logits = logits
        return model

    def logits(self) -> list[float]:
        """What the last token of the only request was drawn from."""
        assert self._last is not None
        (row,) = self._last.compute().tolist()
        return row


class PlainOracle:
    """Decodes one request at a time, in one slot, from an empty cache.

    `strictest` counts, for requests with several filters, the tokens for which each of them was the strictest.
    `num_forbidden` counts tokens that would have been others without the `processor`, one of `OWN_PROCESSORS`;
    `decided`, those that would have been others without a request's parameter.
    """

    def __init__(
        self,
        seed: int,
        codec: Codec,
        dtype: torch.dtype = torch.float64,
        place: torch.device = CPU,
        family: str = "llama",
        processor: str | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        texts = codec.decode(list(range(100)), True), codec.eos_token_ids
        self._engine = seed, texts, dtype, place, family, processor, kv_dtype
        config = RingConfig(
            num_steps=0, page_size=16, num_pages=40, num_slots=1, max_len=400, dtype=dtype, kv_dtype=kv_dtype
        )
        self._geometry = config.geometry()
        models = tiny_loaded(seed, 0, dtype, place, family=family, **config.shape)
        self._target = OverheardTarget(models.target)
        self._processor = None if processor is None else OWN_PROCESSORS[processor]
        own = () if self._processor is None else (self._processor.in_tensors,)
        self._executor: Executor = with_token_rules(
            build_executor(replace(models, target=self._target), self._geometry, place, own_processors=own)
        )
        self._begin()
        self.num_forbidden = 0
        self.decided: Counter[str] = Counter()
        self.strictest: Counter[str] = Counter()
        self._endings = Endings(codec)

    def close(self) -> None:
        self._executor.close()

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """An answer is what is expected, token by token; an aborted one is its beginning, with all of its text."""
        expected, finish = self.expected(prompt, sampling), answer.finish
        assert finish is not None and answer.usage is not None
        counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
        assert counts == (len(prompt), len(answer.token_ids)), what
        if finish.kind is FinishKind.ABORT:
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)], what
            assert answer.text == self._endings.text(answer.token_ids, finish, sampling), what
            assert expected.text.startswith(answer.text), what
            return
        assert answer.token_ids == expected.token_ids, what
        assert finish == expected.finish, what
        assert answer.text == expected.text, what

    def expected(self, prompt: list[int], sampling: SamplingParams) -> Expected:
        """What plain decoding makes of a request, whatever it says of speculation; decoded once."""
        plain = msgspec.structs.replace(sampling, speculative=Speculative())
        request = *self._engine, tuple(prompt), msgspec.msgpack.encode(plain)
        found = KEPT.get(request, lambda: self._decoded(prompt, plain))
        self.num_forbidden += found.num_forbidden
        self.decided += found.decided
        self.strictest += found.strictest
        return found

    def _decoded(self, prompt: list[int], sampling: SamplingParams) -> Expected:
        """Decode until the request ends, token by token: stop id, stop string, length."""
        self._begin()
        stop_ids = self._endings.stop_ids(sampling)
        first = len(prompt)
        reset = ResetSlot(sampling, first, stop_ids, first + sampling.min_new_tokens, first)
        chunk = array("i", prompt).tobytes()
        pages = list(range(1, self._geometry.num_page_columns + 1))
        work = SlotPart(slot=0, new_pages=pages, tokens=chunk, reset=reset)
        tokens = self._step(plan_of(0, [work], 1), reset, prompt)
        while (finish := self._endings.finish(tokens, sampling)) is None:
            tokens += self._step(StepPlan(0, 1, [0]), reset, prompt + tokens)
        text = self._endings.text(tokens, finish, sampling)
        return Expected(tokens, text, finish, self._num_forbidden, self._decided, self._strictest)

    def _begin(self) -> None:
        """Count anew what decides a request's tokens."""
        self._num_forbidden, self._decided, self._strictest = 0, Counter[str](), Counter[str]()

    def _step(self, plan: StepPlan, reset: ResetSlot, before: list[int]) -> list[int]:
        """One token, after these of prompt and answer."""
        tokens = self._executor.launch(plan).wait().tokens[0]
        if not reset.sampling.greedy or reset.sampling.changes_logits or self._processor is not None:
            by_hand = self._drawn_by_hand(reset, before)
            assert tokens == [by_hand], f"the sampler draws {tokens}, plain Python {by_hand}: {reset.sampling}"
        return tokens

    def _drawn_by_hand(self, reset: ResetSlot, before: list[int]) -> int:
        """The token after these, from the logits that the executor has just computed."""
        sampling, logits = reset.sampling, self._target.logits()
        logits = self._changed(logits, sampling, before, reset.output_from)
        if len(before) < reset.stop_from:
            logits = masked(logits, reset.stop_ids)
        forbidden = set() if self._processor is None else self._processor.forbidden(before, reset.prompt_len)
        token = self._chosen(masked(logits, forbidden), sampling, len(before))
        self._num_forbidden += bool(forbidden) and self._chosen(logits, sampling, len(before)) in forbidden
        if (thinking := sampling.thinking) is None:
            return token
        markers = thinking.budget, thinking.is_open, thinking.opening, thinking.closing
        due = must_draw(before, reset.prompt_len, *markers)
        self._decided["thinking_budgets"] += due not in (-1, token)
        return token if due < 0 else due

    def _changed(
        self, logits: list[float], sampling: SamplingParams, before: list[int], prompt_len: int
    ) -> list[float]:
        """By penalties, biases and bad words."""
        chosen = None
        for name, new in changes(logits, sampling, before[:prompt_len], before[prompt_len:]):
            if new != logits:
                was = self._chosen(logits, sampling, len(before)) if chosen is None else chosen
                chosen = self._chosen(new, sampling, len(before))
                self._decided[name] += chosen != was
                logits = new
        return logits

    def _chosen(self, logits: list[float], sampling: SamplingParams, position: int) -> int:
        if sampling.greedy:
            return max(range(len(logits)), key=logits.__getitem__)
        assert sampling.seed is not None
        filters = Filters(sampling.top_k, sampling.top_p, sampling.min_p)
        if len(filters.names) > 1:
            self._strictest.update(strictest(softmax(logits, sampling.temperature), filters))
        return drawn(logits, sampling.temperature, filters, sampling.seed, position)


def changes(
    logits: list[float], sampling: SamplingParams, prompt: list[int], output: list[int]
) -> Iterator[tuple[str, list[float]]]:
    """Logits after each kind of parameter that changes them, in order."""
    logits = Penalties(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty).applied(
        logits, prompt, output
    )
    yield "penalties", logits
    bias = sampling.logit_bias
    logits = [logit + struct.unpack("f", struct.pack("f", bias.get(i, 0.0)))[0] for i, logit in enumerate(logits)]
    yield "logit_bias", logits
    if sampling.allowed_token_ids is not None:
        logits = masked(logits, set(range(len(logits))).difference(sampling.allowed_token_ids))
        yield "allowed_token_ids", logits
    ends = (word for word in sampling.bad_word_ids if [*output, word[-1]][-len(word) :] == list(word))
    yield "bad_words", masked(logits, {word[-1] for word in ends})


def masked(logits: Sequence[float], forbidden: Collection[int]) -> list[float]:
    """Logits of a row in which some tokens may not be drawn."""
    return [-torch.inf if token in forbidden else logit for token, logit in enumerate(logits)]
