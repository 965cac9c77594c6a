"""A chat's answer as a list of blocks, which is how Anthropic's messages and OpenAI's responses show it.

    reasoning | text | tool call | tool call ...        a block ends where the next one begins

`Blocks.add` turns the deltas of one choice into the events of a stream. Whole answers are the blocks that are left.
"""

import enum
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from overlap_spec.entrypoints.http.request_runner import NOTHING
from overlap_spec.entrypoints.openai.chat import ChatDelta, ChatFinish, ChatSteps
from overlap_spec.entrypoints.parsers.pieces import ToolCallPiece
from overlap_spec.errors import RequestAborted


class BlockKind(enum.Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


@dataclass
class Block:
    """One block so far. A tool call's `text` is its arguments; `call` counts the calls of the answer from 0."""

    kind: BlockKind
    index: int
    text: str = ""
    call: int = -1
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Opened:
    """A block begins; its text comes in `Grown`."""

    block: Block


@dataclass(frozen=True)
class Grown:
    """Text was added to a block."""

    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    """A block is whole, unless the answer was cut."""

    block: Block


BlockEvent = Opened | Grown | Closed


class Blocks:
    """The blocks of one choice, and the last word on it."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish: ChatFinish | None = None
        self.usage = NOTHING
        self.reasoning_tokens = 0  # exact to a step: a step may end the reasoning and begin the answer
        self._open: Block | None = None

    def add(self, delta: ChatDelta) -> list[BlockEvent]:
        """Take what one step added. The last delta closes the last block.

        Raises: RequestAborted, for which these APIs have no reason to stop.
        """
        if delta.finish is not None and delta.finish.reason == "abort":
            raise RequestAborted("on request")
        self.usage, self.finish = delta.usage, delta.finish
        if delta.reasoning:
            self.reasoning_tokens = delta.usage.completion_tokens
        events = [*self._grow(BlockKind.REASONING, delta.reasoning), *self._grow(BlockKind.TEXT, delta.content)]
        for piece in delta.tool_calls:
            events += self._continue_call(piece)
        if delta.finish is not None:
            events += self._close()
        return events

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        yield self._append(text)

    def _continue_call(self, piece: ToolCallPiece) -> Iterator[BlockEvent]:
        if self._open is None or self._open.call != piece.index:
            yield from self._begin(Block(BlockKind.TOOL_CALL, len(self.blocks), "", piece.index, piece.id, piece.name))
        if piece.arguments:
            yield self._append(piece.arguments)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._close()
        self.blocks.append(block)
        self._open = block
        yield Opened(block)

    def _append(self, text: str) -> Grown:
        assert self._open is not None
        self._open.text += text
        return Grown(self._open, text)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield Closed(self._open)
        self._open = None


class BlockWriter(Protocol):
    """Writes an answer as the server-sent events of an API."""

    def opening(self, answer: Blocks) -> bytes:
        """The first events, once there is something to tell."""

    def change(self, event: BlockEvent, answer: Blocks) -> Iterable[bytes]: ...

    def closing(self, answer: Blocks) -> bytes:
        """The last events of an answer that has ended."""


async def stream_blocks(steps: ChatSteps, writer: BlockWriter) -> AsyncGenerator[bytes, None]:
    """Yield the events of each step of a chat with one choice. Leaving early aborts the request."""
    answer, begun = Blocks(), False
    async with aclosing(steps):
        async for ((_, delta),) in steps:
            changes = answer.add(delta)
            parts = [] if begun else [writer.opening(answer)]
            begun = True
            parts += [part for change in changes for part in writer.change(change, answer)]
            if answer.finish is not None:
                parts.append(writer.closing(answer))
            if parts:
                yield b"".join(parts)


async def collect_blocks(steps: ChatSteps) -> Blocks:
    """Wait for the whole answer of a chat with one choice."""
    answer = Blocks()
    async with aclosing(steps):
        async for ((_, delta),) in steps:
            answer.add(delta)
    return answer
