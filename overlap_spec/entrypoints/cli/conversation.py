"""One conversation: its messages, the next answer, and a line of figures after it."""

import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from overlap_spec.engine import Engine
from overlap_spec.errors import RequestError
from overlap_spec.messages import ChatPrompt, Finish, FinishKind, SamplingParams, Usage

DEFAULT_MAX_TOKENS = 512


@dataclass
class Figures:
    """Figures of one answer. Times in seconds on the monotonic clock."""

    began_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    usage: Usage | None = None
    finish: Finish | None = None

    def line(self) -> str:
        """Tokens, tok/s after the first, accept length, time to first token."""
        if self.usage is None:
            return "no answer"
        tokens, steps = self.usage.completion_tokens, self.usage.spec_verify_ct
        parts = [f"{tokens} tokens"]
        if tokens > 1 and self.ended_at > self.first_at:
            parts.append(f"{(tokens - 1) / (self.ended_at - self.first_at):.1f} tok/s")
        if steps:
            parts.append(f"accept length {(tokens - 1) / steps:.2f}")
        parts.append(f"first token {self.first_at - self.began_at:.2f} s")
        if self.finish is not None and self.finish.kind is not FinishKind.STOP:
            parts.append("cut at the token limit" if self.finish.kind is FinishKind.LENGTH else "stopped")
        return ", ".join(parts)


class Conversation:
    """Messages so far; `answer` adds a turn. A refused turn is not added."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._opening)

    async def answer(self, text: str) -> None:
        """Print the answer as it comes, then the figures. Cancellation: keeps what has been printed as the answer."""
        prompt = ChatPrompt([*self._messages, {"role": "user", "content": text}])
        figures = Figures(began_at=time.monotonic())
        said: list[str] = []
        try:
            async for delta in self._engine.generate(prompt, await self._limited(prompt)):
                figures.first_at = figures.first_at or time.monotonic()
                figures.usage, figures.finish = delta.usage, delta.finish
                said.append(delta.text)
                print(delta.text, end="", flush=True)
        finally:
            if figures.usage is not None:
                figures.ended_at = time.monotonic()
                self._messages = [*prompt.messages, {"role": "assistant", "content": "".join(said)}]
                print(flush=True)
        print(figures.line(), file=sys.stderr)

    async def _limited(self, prompt: ChatPrompt) -> SamplingParams:
        """Without a limit of the user's, an answer may be as long as the context leaves, within reason."""
        if self._sampling.max_new_tokens is not None:
            return self._sampling
        most = self._engine.settings.model.max_len
        room = most - len(await self._engine.client.tokenize(prompt))
        if room < 1:
            way_out = "ask for less, or start a new conversation with /reset"
            raise RequestError("messages", f"this fills the maximum context length of {most} tokens: {way_out}")
        return msgspec.structs.replace(self._sampling, max_new_tokens=min(DEFAULT_MAX_TOKENS, room))
