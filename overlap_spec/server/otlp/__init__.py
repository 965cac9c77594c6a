"""Spans of requests for an OpenTelemetry collector (extra `otlp`): made beside the answer, sent by a thread of its own.

    chat MODEL ............................. one span a request, with OpenTelemetry's attributes for generative AI
      tokenize | queued | prefill | decode   its phases; decode ends with the last tokens' arrival
                                 detokenize  from there to the last text

At most `MOST_WAITING` spans wait to be sent; more are dropped. A collector that cannot be reached is logged once.
"""

from overlap_spec.server.otlp.spans import OtlpSpans

__all__ = ["OtlpSpans"]
