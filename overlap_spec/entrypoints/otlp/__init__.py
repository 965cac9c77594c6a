"""Spans of requests for an OpenTelemetry collector (extra `otlp`): made beside the answer, sent by a thread of its own.

    chat MODEL ............................. one span a request, with OpenTelemetry's attributes for generative AI
      tokenize | queued | prefill | decode   its phases; decode ends with the last tokens' arrival
                                 detokenize  from there to the last text

At most `MOST_WAITING` spans wait to be sent; more are dropped. A collector that cannot be reached is logged once.
"""

from overlap_spec.config.settings import OtlpTarget
from overlap_spec.entrypoints.http.request_spans import RequestSpans
from overlap_spec.errors import ConfigError


def open_spans(target: OtlpTarget, model: str) -> RequestSpans:
    """What sends spans of a model's requests to the collector. Raises: ConfigError if the extra is not installed."""
    try:
        from overlap_spec.entrypoints.otlp.spans import OtlpSpans
    except ImportError as error:
        wanted = f"needs the extra otlp ({error}): pip install 'overlap-spec[otlp]'"
        raise ConfigError("otlp_traces_endpoint", wanted) from None
    return OtlpSpans(target, model)
