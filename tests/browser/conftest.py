"""A browser, pages in it, and what is often done with them. Runs in the environment of `run.py`."""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Response, sync_playwright

REPLY_MS = 120_000  # for an answer, on a busy machine
URL = os.environ["UI_URL"]
QUESTION = "Name three colours of the rainbow."

REFUSED = "Failed to load resource: the server responded with a status of 40"  # what a check asks wrongly on purpose
NewPage = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=os.environ["UI_CHROMIUM"], args=as_root)
        yield started
        started.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """Opens the page of a server. At the end: it has complained of nothing, and asked only its own server."""
    contexts, complaints, asked = [], [], []

    def open_page(url: str = URL, width: int = 1600, height: int = 1000, dark: bool = False, **more: Any) -> Page:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/ui")
        return page

    yield open_page
    for context in contexts:
        context.close()
    origins = (URL, os.environ.get("UI_LOCKED_URL", URL))
    assert all(address.startswith(origins) for address in asked), "something was asked for elsewhere"
    assert not [each for each in complaints if not each.startswith(REFUSED)], complaints


def settings(page: Page, **values: object) -> None:
    """Fill in the settings' fields."""
    page.locator("#settings").evaluate("details => { details.open = true }")
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def ended(page: Page) -> None:
    """Wait for the end of the answer."""
    page.wait_for_selector(".turn.assistant:not([aria-busy])", timeout=REPLY_MS)
    page.wait_for_selector("[aria-busy]", state="detached", timeout=REPLY_MS)


def say(page: Page, text: str) -> dict[str, Any]:
    """Type a message on the keyboard and wait for the whole answer. Returns what the server said, as one reply."""
    with page.expect_response("**/v1/chat/completions", timeout=REPLY_MS) as said:
        page.locator("#prompt").focus()
        page.keyboard.type(text)
        page.keyboard.press("Enter")
    ended(page)
    return joined(said.value)


def joined(response: Response) -> dict[str, Any]:
    """The chunks of a stream as one reply: the text, and the entries of its tokens."""
    events = [part.removeprefix("data: ") for part in response.text().split("\n\n") if part]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    origins = [entry for choice in choices for entry in choice.get("provenance", ())]
    return {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "tokens": tokens,
        "provenance": origins,
        "metrics": next(chunk["metrics"] for chunk in chunks if "metrics" in chunk)["speculative_decoding"],
    }


def shown(page: Page) -> list[dict[str, Any]]:
    """The tokens of the last answer as the page marks them."""
    found: list[dict[str, Any]] = (
        page.locator(".turn.assistant")
        .last.locator(".token")
        .evaluate_all(
            """spans => spans.map(span => ({
            text: span.textContent,
            origin: ["accepted", "bonus", "plain"].filter(name => span.classList.contains(name)).join(),
            step: Number(span.dataset.step),
            line: getComputedStyle(span).borderBottomStyle,
        }))"""
        )
    )
    return found


def live(url: str = URL) -> dict[str, Any]:
    """What the live panel is told."""
    with urllib.request.urlopen(f"{url}/ui/live") as answer:
        figures: dict[str, Any] = json.load(answer)
    return figures


def ask_api(body: dict[str, Any]) -> dict[str, Any]:
    """A whole reply of the API."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        reply: dict[str, Any] = json.load(answer)
    return reply
