"""A client of an engine whose answers follow a script, so that each is known; and requests to an app.

A prompt of text is answered with its own words, one word a step; token ids are answered with "<id>" each.
Words that have an effect: "sleep" never answers, "hang" stops answering after its first word, "fail" kills the engine
after the first word, "busy" is refused as overload, "dead" fails at once, "bad" is a bad prompt,
"late" runs out of time after the first word, "slow" before it, "mute" ends without a finish after the first word.
"""

import asyncio
import json
import math
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
from msgspec.structs import replace

from overlap_spec.client.log_probs import Candidate, TokenLogProb
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.errors import (
    ActorDied,
    OverlapSpecError,
    Overloaded,
    RequestAborted,
    RequestError,
    RequestFailed,
    RequestTimeout,
)
from overlap_spec.messages import (
    ANY_TERMS,
    READY,
    AuditReport,
    ChatPrompt,
    EngineHealth,
    Finish,
    FinishKind,
    Generate,
    LogProbParams,
    Phases,
    Prompt,
    SamplingParams,
    Stats,
    Terms,
    TextPrompt,
    TokenPrompt,
    Usage,
    Verified,
    id_of_user,
)
from support.audit_reports import NOTHING_AUDITED

MAX_LEN = 256
INFO = ServerInfo(
    model_name="tiny",
    model_path="/models/tiny",
    tokenizer_path="/models/tiny-tokenizer",
    max_model_len=MAX_LEN,
    max_running_requests=4,
    version="1.2.3",
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    settings={"page_size": 16, "api_key": "secret", "nested": {"api_key": "secret", "depth": 2}},
    facts=lambda: {"num_pages": 4},
)


@dataclass(frozen=True)
class FakeDelta:
    """Same shape as the client's."""

    text: str
    token_ids: list[int]
    finish: Finish | None
    usage: Usage
    verified: Verified | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    phases: Phases | None = None


def _log_probs(count: int, text: str, asked: LogProbParams | None) -> tuple[list[TokenLogProb], ...]:
    """Of the step's token, and with the first one of a prompt of two. The third best token is half a character."""
    if asked is None:
        return [], []
    names = [b"\xe2" if rank == 2 else b"t%d" % rank for rank in range(asked.top)]
    top = [Candidate(7 + rank, -0.25 * (1 + rank), name) for rank, name in enumerate(names)]
    listed = [Candidate(token, -math.inf, b"") for token in asked.token_ids]
    own = TokenLogProb(100 + count, -0.5, text.encode(), top, listed)
    prompt = [TokenLogProb(1, None, b"<s>", [], []), TokenLogProb(2, -3.0, b"say", top, listed)]
    return [own], prompt if asked.prompt_from is not None and count == 1 else []


@dataclass
class FakeClient:
    """Records what it was asked."""

    step_s: float = 0.0
    statistics: Stats = field(default_factory=Stats)
    flushable: bool = True
    asked: list[tuple[str, Prompt, SamplingParams]] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    cancelled: list[tuple[str, bool, str | None]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)  # of texts and ids to be encoded and decoded

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, *, request_id: str | None = None, terms: Terms = ANY_TERMS
    ) -> AsyncGenerator[FakeDelta, None]:
        assert request_id is not None and request_id not in self.running
        self.asked.append((request_id, prompt, sampling))
        self.terms.append(terms)
        words, num_prompt_tokens = _script(prompt)
        _check(words, num_prompt_tokens, sampling)
        abort = self.running[request_id] = asyncio.Event()
        try:
            async for delta in self._play(words, num_prompt_tokens, sampling, abort):
                yield delta
                if delta.finish is not None:
                    return
        finally:
            del self.running[request_id]
            self.left.append(request_id)

    def together(self) -> "FakeRequests":
        return FakeRequests(self)

    async def _play(
        self, words: list[str], num_prompt_tokens: int, sampling: SamplingParams, abort: asyncio.Event
    ) -> AsyncGenerator[FakeDelta, None]:
        limit = MAX_LEN - num_prompt_tokens if sampling.max_new_tokens is None else sampling.max_new_tokens
        for count, word in enumerate(words, start=1):
            if word == "sleep" or (word == "hang" and count > 1):
                await abort.wait()
            if word == "late" and count > 1:
                raise RequestTimeout("timeout", "the request was ended before its end: timeout is 5 s")
            if word == "fail" and count > 1:
                raise ActorDied("worker", "killed by signal 9")
            if word == "nan" and count > 1:
                raise RequestFailed("not_finite", "the model's logits are NaN")
            if word == "mute" and count > 1:
                return
            await asyncio.sleep(self.step_s)
            if abort.is_set():
                raise RequestAborted("on request")
            finish = None
            if count == len(words) or count == limit:
                finish = Finish(FinishKind.STOP, "</s>") if count == len(words) else Finish(FinishKind.LENGTH)
            text = word if count == 1 else " " + word
            usage = Usage(num_prompt_tokens, 1, count, count - 1)
            verified = Verified(count, 3 * (count > 1), int(count == 3)) if sampling.speculative.is_reported else None
            log_probs = _log_probs(count, text, sampling.log_probs)
            yield FakeDelta(text, [100 + count], finish, usage, verified, *log_probs)

    async def cancel(self, request_id: str, everyone: bool = False, of_key: str | None = None) -> None:
        self.cancelled.append((request_id, everyone, of_key))
        for on_link, abort in self.running.items():
            key = on_link.partition("\n")[0] if "\n" in on_link else ""
            if request_id in ("", id_of_user(key, on_link)) and of_key in (None, key):
                abort.set()

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool = True, owner: str = ""
    ) -> list[int]:
        self.owners.append(owner)
        words, _ = _script(prompt)
        return [1] * add_special_tokens + [len(word) for word in words]

    async def detokenize(self, ids: list[int], skip_special_tokens: bool = False, owner: str = "") -> str:
        self.owners.append(owner)
        return " ".join(str(each) for each in ids if not (skip_special_tokens and each == 1))

    async def flush_cache(self) -> bool:
        return self.flushable

    async def update_draft(self, path: str, load_format: str = "auto") -> None:
        self.owners.append(f"{path} {load_format}")

    async def audit(self) -> AuditReport:
        return NOTHING_AUDITED

    async def stats(self) -> Stats:
        return self.statistics


class FakeRequests:
    """Requests that one reader follows, each in a task of its own."""

    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self._come: asyncio.Queue[tuple[str, FakeDelta | Exception]] = asyncio.Queue(1)

    async def __aenter__(self) -> "FakeRequests":
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def start(self, requests: Sequence[Generate]) -> None:
        self._tasks += [asyncio.create_task(self._follow(request)) for request in requests]

    async def take(self) -> list[tuple[str, FakeDelta | OverlapSpecError]]:
        request_id, answer = await self._come.get()
        if isinstance(answer, Exception) and not isinstance(answer, OverlapSpecError):
            raise answer
        return [(request_id, answer)]

    async def _follow(self, asked: Generate) -> None:
        try:
            sampling = asked.sampling if asked.seed is None else replace(asked.sampling, seed=asked.seed)
            deltas = self._client.generate(asked.prompt, sampling, request_id=asked.request_id, terms=asked.terms)
            async with aclosing(deltas):
                async for delta in deltas:
                    await self._come.put((asked.request_id, delta))
                    if delta.finish is not None:
                        return
            raise AssertionError(f"{asked.request_id}: the last delta has no finish")
        except Exception as error:
            await self._come.put((asked.request_id, error))


def _script(prompt: Prompt) -> tuple[list[str], int]:
    """Returns the answer's words and the number of prompt tokens."""
    match prompt:
        case TextPrompt():
            words = prompt.text.split()
        case ChatPrompt():
            words = str(prompt.messages[-1]["content"]).split()
        case TokenPrompt():
            words = [f"<{each}>" for each in array("i", prompt.ids)]
    return words, len(words)


def _check(words: list[str], num_prompt_tokens: int, sampling: SamplingParams) -> None:
    if "busy" in words:
        raise Overloaded("2048 requests are open")
    if "slow" in words:
        raise RequestTimeout("first_token_timeout", "the request was ended before its first token")
    if "dead" in words:
        raise ActorDied("scheduler", "killed by signal 9")
    if "bad" in words or not words:
        raise RequestError("prompt", "prompt cannot be encoded")
    if num_prompt_tokens + (sampling.max_new_tokens or 0) > MAX_LEN:
        raise RequestError("max_new_tokens", f"max_new_tokens: this model's maximum context length is {MAX_LEN} tokens")


def ask(client: FakeClient, method: str, path: str, info: ServerInfo = INFO, **request: Any) -> httpx.Response:
    """One request to a fresh app in a loop of its own; the whole body, streamed or not."""

    async def inner() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(client, info, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.request(method, path, **request)

    return asyncio.run(inner())


def events_of(response: httpx.Response) -> list[str]:
    """The events' texts, after checking that nothing but `data: ...` and blank lines was sent."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def named_events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The names and values of events that have names, after checking that nothing else was sent."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    lines = [event.split("\n") for event in events]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in lines)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


def healthy() -> EngineHealth:
    """The health of a working engine."""
    return READY
