"""Who gets a request: Ray Serve LLM's router by prefix, told what of a call is its prompt.

Its public name is in `ray.serve.llm`, which cannot be imported without vLLM or SGLang; the class itself needs neither.
"""

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest

from overlap_spec.entrypoints.ray.calls import Call


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]  # Ray has no types
    """Ray's router for prefix affinity; a request without a prompt goes to the shorter of two queues."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str | None:
        call: Any = pending_request.args[0] if pending_request.args else None
        return call.prompt or None if isinstance(call, Call) else None
