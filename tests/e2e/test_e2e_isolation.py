"""One client guesses what another has sent: neither fields nor times of the answers tell, in real processes.

    python -m pytest -m full tests/e2e/test_e2e_isolation.py --summaries FILE

By time, `.ci/run` has 40 guesses at 2,048 tokens; the command above has 200 at 8,192. The attack works where clients
share what is cached, else it would measure nothing.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.command_line import Service
from support.prying import KEYS, Guesses, Prober, Times, cached_counts, guess_times, key_flags, write_slow_model
from support.summaries import describe, update

from overlap_spec import Client, Engine, SamplingParams
from overlap_spec.client.answers import Delta
from overlap_spec.config.settings import OPERATOR
from overlap_spec.errors import RequestAborted
from overlap_spec.messages import Terms

pytestmark = pytest.mark.slow

TOLD, CHANCE = 1e-6, 1e-3  # p-values: two samples that are told apart, and two that are not
# Of samples that must be alike: one in a thousand is not. And of two that must not be: of 40 guesses, two right ones
# that a busy machine delays are too many, and by chance no two samples are ever so different.
TRIES = 2

Start = Callable[..., Service]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Servers by their flags, each started once."""
    running: dict[tuple[str, ...], Service] = {}
    with ExitStack() as services:

        def started(*flags: str) -> Service:
            if flags not in running:
                directory = tmp_path_factory.mktemp("served")
                service = Service(directory, *flags, *key_flags(directory), "--zmq-endpoint", "tcp://127.0.0.1:0")
                running[flags] = services.enter_context(service)
            return running[flags]

        yield started


SECRET = "The patient Jane Doe, born in 1980, takes 20 mg of it daily."
SHORT = {"max_tokens": 4, "temperature": 0}


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **SHORT}


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda text: {"prompt": text, **SHORT},
    "/v1/chat/completions": chat,
    "/v1/messages": chat,
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 4, "temperature": 0},
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
}


# By what keeps alice and bob apart: the server's flag, and the field in which each sends a salt.
APART = {
    "nothing": ("--no-isolate-clients", ""),
    "names": ("--isolate-clients", ""),
    "cache_salt": ("--no-isolate-clients", "cache_salt"),
    "extra_key": ("--no-isolate-clients", "extra_key"),
    "both": ("--isolate-clients", "cache_salt"),
}


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", WAYS)
def test_no_answer_tells_what_another_client_has_sent(
    start: Start, tiny_flags: tuple[str, ...], path: str, stream: bool, apart: str
) -> None:
    # No two begin alike: bob would find what he sent before.
    text = f"{list(APART).index(apart)}{list(WAYS).index(path)}{stream:d}: {SECRET}"
    usage = {"stream_options": {"include_usage": True}} if path.startswith(("/v1/com", "/v1/chat")) else {}
    more = {"stream": True, **usage} if stream else {}
    flag, field = APART[apart]
    with Prober(start(*tiny_flags, flag)) as prober:

        def cached(name: str, said: str) -> set[int]:
            salt = {field: f"of {name}"} if field else {}
            return cached_counts(prober.send(name, path, WAYS[path](said) | more | salt))

        first, guessed, own = cached("alice", text), cached("bob", text[:-12]), cached("alice", text)
    assert first == {0} and max(own) >= 16, "she finds her own"
    assert max(guessed) >= 16 if apart == "nothing" else guessed == {0}


@pytest.mark.parametrize("apart", ["nothing", "names", "cache_salt", "both"])
def test_no_answer_over_zmq_tells_what_another_client_has_sent(
    start: Start, tiny_flags: tuple[str, ...], apart: str
) -> None:
    flag, field = APART[apart]
    service, few = start(*tiny_flags, flag), SamplingParams(max_new_tokens=4, temperature=0)
    text = f"{apart} {SECRET}"

    async def cached(name: str, text: str) -> int:
        terms = Terms(cache_salt=f"of {name}" if field else "")
        async with Client(service.endpoint, KEYS[name]) as client:
            return (await client.complete(text, few, terms=terms)).usage.cached_tokens

    async def story() -> list[int]:
        return [await cached(*each) for each in (("alice", text), ("bob", text[:-5]), ("alice", text))]

    first, guessed, own = asyncio.run(story())
    assert first == 0 and own >= 16 and (guessed >= 16 if apart == "nothing" else guessed == 0)


@pytest.mark.parametrize(
    "names", [pytest.param(("", ""), marks=pytest.mark.full), ("alice", "bob")], ids=["of salts", "of names"]
)
def test_callers_of_an_engine_in_their_own_process_are_apart(
    engine_of: Callable[[dict[str, object]], Engine], tmp_path: Path, names: tuple[str, str]
) -> None:
    """Who has an `Engine` is a gateway: it says whose request is which. `Completion.usage` tells what was found."""
    flag, keys = key_flags(tmp_path)
    engine = engine_of({"api_key_file": keys} if all(names) else {})

    async def story() -> list[int]:
        async with engine:

            async def cached(caller: int, text: str) -> int:
                salt = "" if all(names) else f"of {caller}"
                terms = Terms(client=names[caller], key=names[caller], cache_salt=salt)
                few = SamplingParams(max_new_tokens=4, temperature=0)
                return (await engine.client.complete(text, few, terms=terms)).usage.cached_tokens

            return [await cached(*each) for each in ((0, SECRET), (1, SECRET[:-5]), (0, SECRET))]

    first, guessed, own = asyncio.run(story())
    assert (first, guessed) == (0, 0) and own >= 16


ENDLESS = SamplingParams(max_new_tokens=400, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("flag", ["--isolate-clients", "--no-isolate-clients"])
def test_a_client_over_zmq_ends_its_own_requests_alone(start: Start, tiny_flags: tuple[str, ...], flag: str) -> None:
    """By everyone's id, and by the one that both have; as itself, as another key's, as the operator's."""
    service = start(*tiny_flags, flag)

    async def is_aborted(deltas: AsyncGenerator[Delta, None]) -> bool:
        try:
            async for _ in deltas:
                pass
        except RequestAborted:
            return True
        return False

    async def story() -> tuple[bool, bool]:
        async with (
            Client(service.endpoint, KEYS["alice"]) as alice,
            Client(service.endpoint, KEYS["bob"]) as bob,
            aclosing(alice.generate(SECRET, ENDLESS, "same")) as hers,
            aclosing(bob.generate(SECRET, ENDLESS, "same")) as his,
        ):
            await asyncio.gather(anext(hers), anext(his))
            for request_id in ("", "same"):
                for of_key in (None, "alice", "", OPERATOR):
                    await bob.cancel(request_id, everyone=True, of_key=of_key)
            return await is_aborted(hers), await is_aborted(his)

    assert asyncio.run(story()) == (False, True), "his own show that the messages were read"


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")


@pytest.mark.parametrize("flag", ["--isolate-clients", pytest.param("--no-isolate-clients", marks=pytest.mark.full)])
def test_counts_of_guesses_tell_nothing_of_what_another_client_has_sent(
    start: Start, tiny_flags: tuple[str, ...], flag: str
) -> None:
    """N-grams guess what followed before: who sends what another has sent would have more guesses than she had."""
    ngrams = (*tiny_flags[: tiny_flags.index("--speculative-algorithm")], *NGRAM)
    body = {"text": SECRET, "sampling_params": {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}}
    with Prober(start(*ngrams, flag)) as prober:
        answers = [json.loads(prober.send(name, "/generate", body))["meta_info"] for name in ("alice", "bob", "alice")]
    first, guessed, own = ({name: meta[name] for name in meta if name.startswith("spec_")} for meta in answers)
    assert own["spec_verify_ct"] < first["spec_verify_ct"], "she finds her own"
    assert guessed == first if flag == "--isolate-clients" else guessed == own


def test_the_log_has_no_text_of_requests(start: Start, tiny_flags: tuple[str, ...]) -> None:
    """At the default level, of answers and of refusals."""
    service = start(*tiny_flags, "--isolate-clients")
    wrong = {"temperature": -7}
    with Prober(service) as prober:
        for path, body in WAYS.items():
            refused = {"sampling_params": wrong} if path == "/generate" else wrong
            prober.send("alice", path, body(SECRET))
            prober.send("alice", path, body(SECRET) | refused, 400)
    assert service.logs("-7")
    assert "Jane" not in service.log()


FOR_ALL = [
    *(("POST", "/abort_request", {"abort_all": True}), ("POST", "/flush_cache", None), ("GET", "/audit", None)),
    *(("GET", "/ui/live", None), ("GET", "/ui/timeline", None)),
]


@pytest.mark.parametrize("flag", ["--isolate-clients", "--no-isolate-clients"])
def test_what_concerns_all_clients_needs_an_operator_where_they_are_apart(
    start: Start, tiny_flags: tuple[str, ...], flag: str
) -> None:
    service, is_refused = start(*tiny_flags, flag), flag == "--isolate-clients"
    headers = {"authorization": f"Bearer {KEYS['bob']}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        for method, path, body in FOR_ALL:
            reply = http.request(method, path, json=body)
            assert (reply.status_code == 403 and "--admin-api-key" in reply.text) == is_refused, f"{path}: {reply.text}"
        assert http.get("/metrics").status_code == 200 and http.get("/server_info").status_code == 200

    async def refusals() -> list[str]:
        async with Client(service.endpoint, KEYS["bob"]) as client:
            asked = client.flush_cache(), client.audit()
            return [str(each) for each in await asyncio.gather(*asked, return_exceptions=True)]

    assert all(("--admin-api-key" in text) == is_refused for text in asyncio.run(refusals()))


LONG = pytest.mark.full, pytest.mark.timeout(3600)
SIZES = [pytest.param((40, 2048), id="40 at 2k"), pytest.param((200, 8192), id="200 at 8k", marks=LONG)]
SALTS = {"alice": "a", "bob": "b"}
WHOSE: dict[str, tuple[str, dict[str, str]]] = {
    "shared": ("--no-isolate-clients", {}),
    "by name": ("--isolate-clients", {}),
    "by salt": ("--no-isolate-clients", SALTS),
}
# 24 answered tokens of a prompt that is less than a page longer than what both have cached: n-grams alone can tell.
KINDS: dict[str, tuple[tuple[str, ...], Callable[[int], dict[str, int]]]] = {
    "prefixes": ((), lambda size: {"length": size}),
    "ngrams": ((*NGRAM[:-1], "8"), lambda size: {"length": 12, "context": size - 16, "new_tokens": 24}),
}


@pytest.fixture(scope="module")
def slow_models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By length of prompts."""
    return {
        size: write_slow_model(tmp_path_factory.mktemp("slow"), 8448, layers) for size, layers in ((2048, 2), (8192, 1))
    }


Timed = Callable[[str, str], Times]


@pytest.fixture(params=SIZES)
def timed(start: Start, slow_models: dict[int, Path], request: pytest.FixtureRequest) -> Timed:
    """Times of guesses, by kind and by what keeps the clients apart; the last ones go to the file of `--summaries`."""
    probes, size = request.param

    def times_of(kind: str, whose: str) -> Times:
        (method, guesses), (flag, salts) = KINDS[kind], WHOSE[whose]
        flags = ("--model", str(slow_models[size]), "--dtype", "float32", "--max-total-tokens", str(8 * 8448), *method)
        with Prober(start(*flags, flag), **salts) as prober:
            times = guess_times(prober, Guesses(probes, **guesses(size)))
        note(request, f"{kind}, {whose}: {probes} probes at {size} tokens", times)
        return times

    return times_of


@pytest.mark.parametrize("kind", ["prefixes", pytest.param("ngrams", marks=pytest.mark.full)])
def test_time_tells_where_clients_share(timed: Timed, kind: str) -> None:
    assert any(timed(kind, "shared").p_value < TOLD for _ in range(TRIES))


@pytest.mark.parametrize(
    ("kind", "whose"),
    [
        ("prefixes", "by name"),
        pytest.param("prefixes", "by salt", marks=pytest.mark.full),
        # Slow tests count guesses of n-grams, which are what a step's time follows from.
        pytest.param("ngrams", "by salt", marks=pytest.mark.full),
        pytest.param("ngrams", "by name", marks=pytest.mark.full),
    ],
)
def test_time_tells_nothing_between_clients_that_are_apart(timed: Timed, kind: str, whose: str) -> None:
    assert any(timed(kind, whose).p_value >= CHANCE for _ in range(TRIES))


def note(request: pytest.FixtureRequest, name: str, times: Times) -> None:
    """Add to the file of `--summaries` what the times were."""
    given = request.config.getoption("--summaries")
    if given is None:
        return
    right, wrong = (round(1e3 * sorted(each)[len(each) // 2], 2) for each in times)
    figures = {"right_ms": right, "wrong_ms": wrong, "p_value": float(f"{times.p_value:.3g}")}
    entry = {"test": request.node.name, **figures, "run": describe("cpu", torch.get_num_threads())}
    update(Path(given), lambda summaries: summaries.update({name: entry}))
