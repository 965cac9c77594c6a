"""When a traced request passes from phase to phase, through a whole ring; and the spans that are made of it."""

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_engine_client import INFO, healthy
from support.ring import RingConfig, running, tiny_loaded
from support.ring_server import RingClient

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import Phases, SamplingParams, Terms

CONFIG = RingConfig(num_steps=3, num_slots=2, num_pages=60)
NAMES = ["tokenize", "queued", "prefill", "decode", "detokenize"]
PROMPT = [5, 17, 42, 9]


def times_of(phases: Phases) -> list[float]:
    return [getattr(phases, name) for name in Phases.__struct_fields__[:6]]


def test_only_a_traced_request_tells_its_phases_and_only_at_its_end(codec: TextCodec) -> None:
    async def main() -> list[list[Phases | None]]:
        async with running(tiny_loaded(3, 3), CONFIG, codec) as ring, RingClient(ring) as client:
            ring.scheduler.tells_started = True

            async def ask(is_traced: bool) -> list[Phases | None]:
                sampling = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
                deltas = client.generate(PROMPT, sampling, terms=Terms(is_traced=is_traced))
                return [delta.phases async for delta in deltas]

            # Four requests for two slots: the last ones wait.
            return await asyncio.gather(*(ask(is_traced) for is_traced in (True, False, True, True)))

    first, silent, *waited = asyncio.run(main())
    assert set(silent) == {None}
    for told in (first, *waited):
        assert set(told[:-1]) <= {None} and told[-1] is not None
        times = times_of(told[-1])
        assert times == sorted(times) and times[0] > 0
        assert 0 < told[-1].detokenize_s < times[-1] - times[0]
    began, ended = first[-1], waited[-1][-1]
    assert began is not None and ended is not None
    assert ended.started - ended.admitted > began.started - began.admitted, "it waited for a slot"


@pytest.mark.slow
def test_the_phases_are_spans_below_the_requests(codec: TextCodec) -> None:
    from support.collector import http_collector, values_of

    from overlap_spec.entrypoints.otlp import OtlpSpans

    with http_collector() as collector:
        spans = OtlpSpans(collector.target, "tiny")

        async def main() -> Any:
            async with running(tiny_loaded(3, 3), CONFIG, codec) as ring, RingClient(ring) as client:
                ring.scheduler.tells_started = True
                transport = httpx.ASGITransport(create_app(client, INFO, healthy, spans=spans))
                async with httpx.AsyncClient(transport=transport, base_url="http://ring", timeout=60) as http:
                    return await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 24})

        assert asyncio.run(main()).status_code == 200
        spans.close(10.0)
        root = collector.named("text_completion tiny")
    children = collector.children(root)
    assert sorted(children) == sorted(NAMES)
    borders = [children[name].start_time_unix_nano for name in NAMES] + [children[NAMES[-1]].end_time_unix_nano]
    assert borders == sorted(borders)
    assert [children[name].end_time_unix_nano for name in NAMES[:-1]] == borders[1:-1], "one begins where another ends"
    assert root.start_time_unix_nano <= borders[0] and borders[-1] <= root.end_time_unix_nano
    found = values_of(root.attributes)
    assert found["gen_ai.usage.output_tokens"] <= 24 and found["overlap_spec.accept_length"] >= 1
    assert 0 < found["gen_ai.latency.time_in_queue"] < found["gen_ai.latency.time_to_first_token"]
