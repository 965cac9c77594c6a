"""`POST /v1/responses`."""

from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.entrypoints.http.api_translation import prepare
from overlap_spec.entrypoints.http.client_identity import sent_by
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.info import as_json
from overlap_spec.entrypoints.http.json_bodies import Json
from overlap_spec.entrypoints.http.request_body import convert, read_body
from overlap_spec.entrypoints.http.streams import EventStream, unless_gone
from overlap_spec.entrypoints.openai.chat_runs import ChatGroup, ChatRunner
from overlap_spec.entrypoints.openai.content_parts import collect_blocks, stream_blocks
from overlap_spec.entrypoints.responses.replies import ResponseEvents, ResponseHead
from overlap_spec.entrypoints.responses.requests import RESPONSES, ResponsesRequest, chat_fields


class Responses:
    """The endpoint."""

    def __init__(self, chats: ChatRunner, info: ServerInfo) -> None:
        self._chats = chats
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of events."""
        body, group = await read_body(request, self._info.max_body_bytes, self._read)
        group = sent_by(request, group)
        head = ResponseHead(group.id, self._info.model_name, body, group.requests[0].sampling)
        if body.stream:
            events = ResponseEvents(head)
            return EventStream(stream_blocks(self._chats.run(group), events), events.failed)
        answer = await unless_gone(request.receive, collect_blocks(self._chats.run(group, streams=False)))
        return as_json(head.whole(answer))

    def _read(self, fields: Json) -> tuple[ResponsesRequest, ChatGroup]:
        RESPONSES.refuse_not_built(fields)
        body = convert(fields, ResponsesRequest)
        return body, prepare(self._chats, RESPONSES, fields, chat_fields(body), self._info)
