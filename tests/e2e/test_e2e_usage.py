"""What a served answer says that it cost, against the tokenizers library's own counts, in real processes."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.command_line import Service
from tokenizers import Tokenizer

from overlap_spec.bench.traffic.arrivals import Arrival
from overlap_spec.bench.traffic.figures import Limits
from overlap_spec.bench.traffic.processes import Target
from overlap_spec.bench.traffic.runs import Clients, Traffic, run_against

PAGE = 16  # tokens
TEXTS = ["The sky is", "Counted by hand: " * 5]


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def post(service: Service, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{service.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("text", TEXTS)
def test_generate_counts_prompt_answer_and_cached_tokens(service: Service, tokenizer: Tokenizer, text: str) -> None:
    """Asked twice: what is cached then is whole pages, all that do not need the token after the prompt."""
    assert httpx.post(f"{service.url}/flush_cache", timeout=60).status_code == 200
    num_prompt = length(tokenizer, text)
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    for num_cached in (0, (num_prompt - 1) // PAGE * PAGE):
        answer = post(service, "/generate", text=text, sampling_params=sampling)
        counts = {name: answer["meta_info"][f"{name}_tokens"] for name in ("prompt", "completion", "cached")}
        assert counts == {"prompt": num_prompt, "completion": 24, "cached": num_cached}
        assert len(answer["output_ids"]) == 24
        assert tokenizer.decode(answer["output_ids"]) == answer["text"]


def test_completions_count_every_prompt(service: Service, tokenizer: Tokenizer) -> None:
    answer = post(service, "/v1/completions", model="tiny", prompt=TEXTS, max_tokens=8, ignore_eos=True)
    num_prompt = sum(length(tokenizer, text) for text in TEXTS)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        num_prompt,
        16,
        num_prompt + 16,
    )


def test_a_chat_counts_its_template(service: Service, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    answer = post(service, "/v1/chat/completions", model="tiny", messages=messages, max_tokens=8, ignore_eos=True)
    rendered = "<|user|>Why is the sky blue?</s><|assistant|>"
    assert answer["usage"]["prompt_tokens"] == length(tokenizer, rendered)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.slow
@pytest.mark.full_but_every(2)
@pytest.mark.parametrize("link", ["zmq", "generate"])
def test_a_load_generator_counts_every_token(service: Service, link: str) -> None:
    """Answers of known length, whichever way they are asked for, with several tokens in an event."""
    url = service.endpoint if link == "zmq" else service.url
    target = Target(url=url, endpoint="completions" if link == "zmq" else "generate", vocab_size=100)
    arrivals = [Arrival(at=0.05 * n, prompt_len=5 + n, output_len=20 + n, tag=f"{n}") for n in range(6)]
    arrivals.append(Arrival(at=0.0, prompt="The sky is", output_len=9, tag="text"))
    traffic = Traffic(arrivals, Clients(), Limits())
    figures = uvloop.run(run_against(target, traffic, lambda what, running: None))["server"]
    assert figures["answered"] == 7 and not figures["errors"] and figures["counted_by"] == {"usage": 7}
    assert figures["tokens"] == sum(arrival.output_len for arrival in arrivals)
    assert [figures["by_tag"][f"{n}"]["tokens"] for n in range(6)] == [20, 21, 22, 23, 24, 25]
    assert figures["gap_ms"]["max"] >= figures["gap_ms"]["p50"] > 0
