"""Chats whose deltas are given: reasoning, text and tool calls without a model that makes them."""

from collections.abc import Sequence

from overlap_spec.entrypoints.http.request_runner import Runner
from overlap_spec.entrypoints.openai.chat import ChatDelta, ChatFinish, ChatGroup, ChatRunner, ChatSteps
from overlap_spec.entrypoints.parsers.pieces import ToolCallPiece
from overlap_spec.messages import Usage
from overlap_spec.metrics.prometheus import ServerMetrics
from support.fake_engine_client import INFO, FakeClient


def usage(tokens: int) -> Usage:
    """Of a prompt of 5 tokens, 2 of them cached."""
    return Usage(5, 2, tokens, tokens)


THOUGHT = [ChatDelta(usage(1), reasoning="hm,"), ChatDelta(usage(3), reasoning=" so")]
PLAIN = [ChatDelta(usage(4), "I "), ChatDelta(usage(5), "look")]
CALLS = [
    ChatDelta(usage(6), tool_calls=(ToolCallPiece(0, id="call_0", name="weather"),)),
    ChatDelta(usage(7), tool_calls=(ToolCallPiece(0, '{"city": '), ToolCallPiece(0, '"Os'))),
    ChatDelta(usage(8), tool_calls=(ToolCallPiece(0, 'lo"}'), ToolCallPiece(1, id="call_1", name="time"))),
    ChatDelta(usage(9), finish=ChatFinish("tool_calls")),
]
CUT = [
    ChatDelta(usage(6), tool_calls=(ToolCallPiece(0, '{"ci', id="call_0", name="weather"),)),
    ChatDelta(usage(7), finish=ChatFinish("length")),
]
ABORTED = [ChatDelta(usage(1), "one"), ChatDelta(usage(1), finish=ChatFinish("abort"))]


class ScriptedChats(ChatRunner):
    """Says `deltas`, one a step, whatever is asked."""

    def __init__(self, deltas: Sequence[ChatDelta]) -> None:
        super().__init__(Runner(FakeClient(), ServerMetrics()), INFO)
        self._deltas = deltas

    async def run(self, group: ChatGroup, streams: bool = True) -> ChatSteps:
        for delta in self._deltas:
            yield [(0, delta)]
