"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.entrypoints.anthropic.replies import MessageEvents, MessageHead
from overlap_spec.entrypoints.anthropic.requests import MESSAGES, CountRequest, MessagesRequest, chat_fields
from overlap_spec.entrypoints.http.api_translation import prepare
from overlap_spec.entrypoints.http.client_identity import identity_of, sent_by
from overlap_spec.entrypoints.http.engine_client import EngineClient, ServerInfo
from overlap_spec.entrypoints.http.info import as_json
from overlap_spec.entrypoints.http.json_bodies import Json
from overlap_spec.entrypoints.http.request_body import convert, read_body
from overlap_spec.entrypoints.http.streams import EventStream, unless_gone
from overlap_spec.entrypoints.openai.chat_runs import ChatGroup, ChatRunner
from overlap_spec.entrypoints.openai.content_parts import collect_blocks, stream_blocks
from overlap_spec.messages import ChatPrompt

C = TypeVar("C", MessagesRequest, CountRequest)


class Messages:
    """The endpoints."""

    def __init__(self, client: EngineClient, chats: ChatRunner, info: ServerInfo) -> None:
        self._client = client
        self._chats = chats
        self._info = info

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/messages", self.post, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
        ]

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of events."""
        body, group = await self._read(request, MessagesRequest)
        group = sent_by(request, group)
        head = MessageHead(group.id, self._info.model_name, body.stop_sequences)
        if body.stream:
            events = MessageEvents(head)
            return EventStream(stream_blocks(self._chats.run(group), events), events.failed)
        answer = await unless_gone(request.receive, collect_blocks(self._chats.run(group, streams=False)))
        return as_json(head.whole(answer))

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt."""
        _, group = await self._read(request, CountRequest)
        prompt = group.requests[0].prompt
        assert isinstance(prompt, ChatPrompt)
        ids = await unless_gone(request.receive, self._client.tokenize(prompt, owner=identity_of(request).client))
        return as_json({"input_tokens": len(ids)})

    async def _read(self, request: Request, shape: type[C]) -> tuple[C, ChatGroup]:
        def check(fields: Json) -> tuple[C, ChatGroup]:
            MESSAGES.refuse_not_built(fields)
            body = convert(fields, shape)
            return body, prepare(self._chats, MESSAGES, fields, chat_fields(body, fields), self._info)

        return await read_body(request, self._info.max_body_bytes, check)
