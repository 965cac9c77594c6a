"""`POST /tokenize` and `/detokenize`."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.entrypoints.http.auth import identity_of
from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.engine_client import EngineClient, ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.operations import as_json
from overlap_spec.entrypoints.http.request_body import PackedIds, convert, read_body
from overlap_spec.entrypoints.http.streams import unless_gone
from overlap_spec.entrypoints.openai.prompts import (
    chat_prompt,
    check_batch,
    check_chat,
    need_tokenizer,
    parse_ids,
    read_text,
)
from overlap_spec.entrypoints.openai.requests import check_model
from overlap_spec.messages import ChatPrompt, TextPrompt


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

    tokens: Any
    skip_special_tokens: bool = True
    model: str = "default"


class Tokens:
    """Text to token ids and back."""

    def __init__(self, client: EngineClient, info: ServerInfo) -> None:
        self._client = client
        self._info = info

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, of each of several, or of a conversation."""
        body, prompts = await read_body(request, self._info.max_body_bytes, self._read)
        lists = await unless_gone(request.receive, self._tokenize(prompts, body, identity_of(request).client))
        tokens, count = (lists, list(map(len, lists))) if isinstance(body.prompt, list) else (lists[0], len(lists[0]))
        return as_json({"tokens": tokens, "count": count, "max_model_len": self._info.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """The text, under SGLang's key and vLLM's."""
        body, runs, batched = await read_body(request, self._info.max_body_bytes, self._read_ids)
        texts = await unless_gone(request.receive, self._detokenize(runs, body, identity_of(request).client))
        text = texts if batched else texts[0]
        return as_json({"text": text, "prompt": text})

    def _read(self, fields: Json) -> tuple[TokenizeRequest, list[TextPrompt | ChatPrompt]]:
        body = convert(fields, TokenizeRequest)
        check_model(body.model, self._info)
        if (body.prompt is None) == (body.messages is None):
            raise Problem(400, "give either prompt or messages", "prompt", "missing_required_parameter")
        if body.messages is not None:
            prompt = chat_prompt(body, body.messages, body.tools, body.chat_template_kwargs)
            return body, [check_chat(prompt, self._info)]
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        check_batch(texts, "prompt")
        return body, [read_text(text, "prompt", self._info) for text in texts]

    async def _tokenize(
        self, prompts: list[TextPrompt | ChatPrompt], body: TokenizeRequest, owner: str
    ) -> list[list[int]]:
        return [await self._client.tokenize(prompt, body.add_special_tokens, owner) for prompt in prompts]

    def _read_ids(self, fields: Json) -> tuple[DetokenizeRequest, list[Sequence[int]], bool]:
        body = convert(fields, DetokenizeRequest)
        check_model(body.model, self._info)
        need_tokenizer("tokens", self._info)
        packed = isinstance(body.tokens, PackedIds)
        if not packed and not isinstance(body.tokens, list):
            raise Problem(
                400, "tokens: expected a list of token ids, or a list of such lists", "tokens", "invalid_type"
            )
        batched = not packed and bool(body.tokens) and all(isinstance(ids, list | PackedIds) for ids in body.tokens)
        check_batch(body.tokens if batched else [], "tokens")
        return body, [parse_ids(ids, "tokens") for ids in (body.tokens if batched else [body.tokens])], batched

    async def _detokenize(self, runs: list[Sequence[int]], body: DetokenizeRequest, owner: str) -> list[str]:
        skip = body.skip_special_tokens
        return [await self._client.detokenize(ids, skip, owner) if ids else "" for ids in runs]
