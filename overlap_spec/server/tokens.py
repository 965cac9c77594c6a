"""`POST /tokenize` and `/detokenize`."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.server.bodies import Json, convert, read_json
from overlap_spec.server.engine_client import EngineClient, ServerInfo
from overlap_spec.server.info import as_json
from overlap_spec.server.openai_requests import check_model
from overlap_spec.server.problems import Problem
from overlap_spec.server.prompts import chat_prompt, check_batch, check_chat, need_tokenizer, parse_ids, read_text
from overlap_spec.server.streams import unless_gone


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a text, several, or a conversation."""

    prompt: str | list[str] | None = None
    messages: list[Json] | None = None
    tools: list[Json] = []
    chat_template: str = ""
    chat_template_kwargs: Json = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = True
    model: str = "default"


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`. The default of `skip_special_tokens` is SGLang's."""

    tokens: list[Any]
    skip_special_tokens: bool = True
    model: str = "default"


class Tokens:
    """Text to token ids and back."""

    def __init__(self, client: EngineClient, info: ServerInfo) -> None:
        self._client = client
        self._info = info

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, of each of several, or of a conversation."""
        body = convert(await read_json(request, self._info.max_body_bytes), TokenizeRequest)
        check_model(body.model, self._info)
        tokens = await unless_gone(request.receive, self._tokenize(body))
        count = [len(each) for each in tokens] if isinstance(body.prompt, list) else len(tokens)
        return as_json({"tokens": tokens, "count": count, "max_model_len": self._info.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """The text, under SGLang's key and vLLM's."""
        body = convert(await read_json(request, self._info.max_body_bytes), DetokenizeRequest)
        check_model(body.model, self._info)
        need_tokenizer("tokens", self._info)
        text = await unless_gone(request.receive, self._detokenize(body))
        return as_json({"text": text, "prompt": text})

    async def _tokenize(self, body: TokenizeRequest) -> list[Any]:
        if (body.prompt is None) == (body.messages is None):
            raise Problem(400, "give either prompt or messages", "prompt", "missing_required_parameter")
        if body.messages is not None:
            chat = check_chat(chat_prompt(body, body.messages, body.tools, body.chat_template_kwargs), self._info)
            return await self._client.tokenize(chat, body.add_special_tokens)
        if isinstance(body.prompt, list):
            check_batch(body.prompt, "prompt")
            return [await self._tokenize_text(text, body) for text in body.prompt]
        return await self._tokenize_text(body.prompt or "", body)

    async def _tokenize_text(self, text: str, body: TokenizeRequest) -> list[int]:
        return await self._client.tokenize(read_text(text, "prompt", self._info), body.add_special_tokens)

    async def _detokenize(self, body: DetokenizeRequest) -> str | list[str]:
        if body.tokens and all(isinstance(ids, list) for ids in body.tokens):
            check_batch(body.tokens, "tokens")
            return [await self._detokenize_one(ids, body) for ids in body.tokens]
        return await self._detokenize_one(body.tokens, body)

    async def _detokenize_one(self, ids: list[Any], body: DetokenizeRequest) -> str:
        return await self._client.detokenize(parse_ids(ids, "tokens"), body.skip_special_tokens) if ids else ""
