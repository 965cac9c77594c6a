"""SGLang's own endpoint, `/generate`: attaches it to the server."""

from typing import Any

from starlette.routing import Route

from overlap_spec.entrypoints.http.app import Api, ApiParts
from overlap_spec.entrypoints.http.openapi import STREAMED, Endpoint
from overlap_spec.entrypoints.native.generate import GenerateRequest, NativeGenerate, NativeSampling

PATH = "/generate"
ENDPOINTS = {
    PATH: Endpoint(
        GenerateRequest,
        dict[str, Any] | list[dict[str, Any]],
        STREAMED,
        inner=("sampling_params", NativeSampling),
        takes_unsupported=True,
    )
}


def attach(parts: ApiParts) -> Api:
    """Its route."""
    return Api([Route(PATH, NativeGenerate(parts.runner, parts.info).post, methods=["POST"])], ENDPOINTS)
