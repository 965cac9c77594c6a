"""No line of the log has what a client has written into a field, whatever is wrong with it."""

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable

import httpx
import pytest
from support.fake_engine_client import INFO, FakeClient, healthy
from support.frontend_harness import Harness, serving
from support.junk_bodies import BODIES, bodies

from overlap_spec.client.link import Malformed
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.messages import Rejected
from overlap_spec.runtime.actor import _failure
from overlap_spec.runtime.log_limits import Allowance, LineLimits, traceback_text, without_quotes

MARK = "Mrs Doe"
TEXTS = (MARK, f"it's {MARK}'s", f"a \"{MARK}\" or '{MARK}'", f"'{MARK}", f"({MARK}", f"{MARK}\n`{MARK}")
VALUES = (
    *TEXTS,
    *([MARK], [[MARK]], {MARK: MARK}, {"type": MARK}, [{"type": MARK}], [{"role": MARK, "content": MARK}]),
    *([{"type": "function", "function": {"name": MARK, "parameters": {"type": MARK}}}], {"a": {"$ref": MARK}}),
)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", BODIES)
def test_no_reason_of_a_refusal_quotes_the_request(
    path: str, every: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field has two or three of the values, one after another, and all of them in the full tests."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Allowance, "take", lambda allowance: 0)

    async def ask_all() -> int:
        transport, refused = httpx.ASGITransport(create_app(FakeClient(), INFO, healthy)), 0
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            for _, body in bodies(path, VALUES)[::every]:
                refused += (await http.post(path, content=json.dumps(body))).status_code >= 400
        return refused

    assert asyncio.run(ask_all()) >= len(VALUES) // every
    leaked = [record.getMessage() for record in caplog.records if MARK in record.getMessage() and "id=" in record.msg]
    assert not leaked, leaked[:5]


def raised(text: str) -> Exception:
    """An error that nothing expects, raised from another one, both with the text."""
    try:
        try:
            {}[text]
        except KeyError as first:
            raise ValueError(f"cannot use {text!r}") from first
    except ValueError as error:
        return error


@pytest.mark.parametrize("text", TEXTS)
def test_what_an_error_quotes_is_left_out_and_the_stack_is_not(text: str) -> None:
    error = raised(text)
    shown = traceback_text(error)
    assert MARK not in shown and __file__ in shown and "in raised" in shown
    assert "KeyError: '..'" in shown and "ValueError: cannot use '..'" in shown
    group = traceback_text(ExceptionGroup("two", [error, ValueError(f"got {text!r}")]))
    assert MARK not in group and __file__ in group and group.count("'..'") >= 3


def test_what_is_left_out_of_a_text() -> None:
    assert without_quotes("the model 'a' has no \"b\"") == "the model '..' has no '..'"
    assert without_quotes("temperature isn't at most 2, got 3") == "temperature isn't at most 2, got 3"
    assert without_quotes("the field's type is not known: 'abc") == "the field's type is not known: '..'"
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("'\"`a \n") for _ in range(9)) + MARK + "".join(rng.choice("'\"` ") for _ in range(3))
        assert MARK not in without_quotes(f"got {text!r}") and MARK not in without_quotes(f"no: {text!r} in {text!r}")


def test_a_log_handler_writes_tracebacks_without_texts() -> None:
    handler, lines = logging.Handler(), []
    handler.addFilter(LineLimits())
    handler.emit = lambda record: lines.append(logging.Formatter().format(record))
    log = logging.getLogger("test.texts")
    log.addHandler(handler)
    for _ in range(2):
        log.error("request %d failed", 1, exc_info=raised(MARK))
    log.removeHandler(handler)
    whole, short = lines
    assert "in raised" in whole and short == "request 1 failed: ValueError: cannot use '..'"
    assert MARK not in whole


def test_the_error_that_ends_an_actor_and_reaches_all_clients_has_no_text() -> None:
    class Context:
        role, generation = "frontend", 0

    failed = _failure(Context(), raised(MARK))
    assert failed.error == "ValueError: cannot use '..'" and MARK not in failed.traceback


def run(scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as harness:
            await scenario(harness)

    asyncio.run(main())


def test_the_frontend_logs_no_text_of_a_broken_message(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(harness: Harness) -> None:
        harness.say(Malformed("a", "prompt", f"Invalid enum value {MARK!r} - at `$.prompt`"))
        assert MARK in (await harness.heard(Rejected)).message, "whoever has sent it may read it"

    run(scenario)
    assert "something malformed" in caplog.text and MARK not in caplog.text
