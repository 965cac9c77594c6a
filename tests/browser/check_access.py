"""Who can use the page: by keyboard, with a screen reader, in the dark, on a telephone; with a key, or not at all."""

import os
import urllib.error
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import QUESTION, NewPage, Page, say, settings

LOCKED, CLOSED, KEY = (os.environ[name] for name in ("UI_LOCKED_URL", "UI_CLOSED_URL", "UI_KEY"))
STANDARDS = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def violations(page: Page) -> list[str]:
    """What axe-core objects to."""
    found = Axe().run(page, options=STANDARDS).response["violations"]
    return [f"{each['id']}: {node['html']} {node['failureSummary']}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize(("width", "dark"), [(1600, False), (1600, True), (400, False), (400, True)])
def check_axe_objects_to_nothing(new_page: NewPage, width: int, dark: bool) -> None:
    page = new_page(width=width, dark=dark)
    page.wait_for_selector("#figure-tokens")
    assert violations(page) == []
    settings(page, temperature=0, max_tokens=12)
    say(page, QUESTION)
    page.locator(".ring summary").click()
    page.locator("#ring-picture").scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    page.locator(".turn.assistant .token").first.focus()
    assert violations(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") == width, "nothing sticks out"


def check_the_schemes_differ(new_page: NewPage) -> None:
    colour = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = (new_page(dark=dark).evaluate(colour) for dark in (False, True))
    assert light == "rgb(246, 246, 244)" and dark == "rgb(16, 19, 21)"


def check_tab_reaches_everything_and_is_never_caught(new_page: NewPage) -> None:
    page = new_page()
    page.wait_for_selector("#figure-tokens")
    page.evaluate("() => document.activeElement.blur()")
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "() => document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
        )
        visible = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert here == "BODY" or visible != "none", here
        if seen and here == seen[0]:
            break
        seen.append(here)
    assert {"skip", "log", "prompt", "speculate", "new", "send", "ring-steps", "ring-hold"} <= set(seen)
    assert len(seen) < 40, "it comes round"


def check_landmarks_and_names(new_page: NewPage) -> None:
    page = new_page()
    for role, name in (
        ("region", "Chat"),
        ("region", "Live"),
        ("region", "Last steps"),
        ("log", "Reply"),
        ("textbox", "Message"),
    ):
        assert page.get_by_role(role, name=name, exact=True).count() == 1, name
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
    settings(page, temperature=0, max_tokens=30)
    reply = say(page, QUESTION)
    told = page.locator("#announcer").inner_text()
    assert told.endswith("End of the answer.") and " ".join(reply["content"].split())[:20] in " ".join(told.split())
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"


def check_a_key_is_asked_for_and_kept_for_the_tab(new_page: NewPage) -> None:
    page = new_page(LOCKED)
    page.wait_for_selector("#settings[open] #api_key[aria-invalid='true']")
    page.fill("#api_key", KEY)
    page.keyboard.press("Tab")
    page.wait_for_selector("#figure-tokens")
    assert page.locator("#state").inner_text() == "ready"
    settings(page, max_tokens=8)
    say(page, "a b c")
    assert page.evaluate("() => [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.reload()
    page.wait_for_selector("#figure-tokens")
    other = new_page(LOCKED)
    other.wait_for_selector("#api_key[aria-invalid='true']")
    assert other.input_value("#api_key") == ""


@pytest.mark.parametrize("path", ["/ui", "/ui/main.js", "/ui/live", "/ui/timeline"])
def check_it_can_be_switched_off(path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"{CLOSED}{path}")
    assert raised.value.code == 404
