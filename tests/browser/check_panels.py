"""The live panel and the timeline: they change with the engine's work, and rest while the page is out of sight."""

import re
from typing import Any

from conftest import QUESTION, NewPage, Page, live, say, settings

HIDDEN = """() => {
    Object.defineProperty(document, "hidden", { get: () => true, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def total(page: Page) -> int:
    """Tokens since the start, as the panel shows them."""
    found = re.search(r"([\d,]+) since the start", page.locator("#figure-tokens").inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


def check_figures_change_with_work(new_page: NewPage) -> None:
    page = new_page()
    page.wait_for_selector("#figure-tokens")
    before, steps = total(page), page.locator("#figure-step").inner_text()
    settings(page, temperature=0, max_tokens=24)
    say(page, QUESTION)
    page.wait_for_timeout(2500)
    now = live()
    assert total(page) == now["generated"] >= before + 24
    assert page.locator("#figure-step").inner_text() != steps
    assert (
        "ms" in page.locator("#figure-first strong").inner_text() or " s" in page.locator("#figure-first").inner_text()
    )
    assert (
        f"{100 * sum(now['accepted_per_position']) / now['proposed']:.0f}%"
        in page.locator("#figure-guesses").inner_text()
    )
    assert page.locator("#state").inner_text() == "ready"
    assert f"of {now['pages']['total']:,} in use" in page.locator("#figure-pages").inner_text()


def check_nothing_is_asked_for_while_the_page_is_out_of_sight(new_page: NewPage) -> None:
    page = new_page()
    page.wait_for_selector("#figure-tokens")
    page.evaluate(HIDDEN)
    page.wait_for_timeout(500)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(3000)
    assert asked == []


def spans(page: Page, kinds: str) -> dict[int, list[tuple[float, float]]]:
    """Left and right ends of the picture's bars, by step."""
    bars: list[dict[str, Any]] = page.locator(kinds).evaluate_all(
        """bars => bars.map(bar => ({
            title: bar.querySelector("title").textContent,
            left: bar.x.baseVal.value,
            right: bar.x.baseVal.value + bar.width.baseVal.value,
        }))"""
    )
    found: dict[int, list[tuple[float, float]]] = {}
    for bar in bars:
        step = re.match(r"step (\d+):", bar["title"])
        assert step is not None, bar
        found.setdefault(int(step[1]), []).append((bar["left"], bar["right"]))
    return found


def check_the_timeline_shows_steps_queued_while_others_run(new_page: NewPage) -> None:
    page = new_page()
    page.select_option("#ring-steps", "12")
    settings(page, temperature=0, max_tokens=60)
    say(page, QUESTION)
    page.wait_for_timeout(2500)
    page.click("#ring-hold")
    device, queued = (
        spans(page, "#ring-picture rect.verify, #ring-picture rect.draft"),
        spans(page, "#ring-picture rect.queued"),
    )
    assert len(device) >= 12  # and parts of those before
    known = [step for step in device if step + 1 in queued]
    overlapping = [
        step
        for step in known
        if any(left < end and begin < right for left, right in queued[step + 1] for begin, end in device[step])
    ]
    assert len(known) > 6 and len(overlapping) > len(known) / 2
    rows = page.locator("#ring-table tbody tr")
    page.locator(".ring summary").click()
    assert rows.count() == 12
    waited = [row.locator("td").last.inner_text() for row in rows.all()]
    assert sum(text not in ("–", "0 ms") for text in waited) >= len(overlapping)
    assert "were queued while the step before ran" in page.locator("#ring-note").inner_text()
    lanes = page.locator("#ring-picture .lane").all_text_contents()
    assert lanes == ["client", "frontend", "scheduler", "queued", "worker host", "CPU, as device"]


def check_hold_keeps_the_picture(new_page: NewPage) -> None:
    page = new_page()
    page.click("#ring-hold")
    assert page.locator("#ring-hold").get_attribute("aria-pressed") == "true"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert not [url for url in asked if "timeline" in url] and [url for url in asked if "live" in url]
