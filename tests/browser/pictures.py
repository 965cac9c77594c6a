"""Takes the pictures of `docs/images/` from the page. Run by `run.py --pictures`."""

import os
from pathlib import Path

from conftest import URL, say, settings
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).resolve().parents[2] / "docs/images"
QUESTION = "Write a Python function that adds two numbers, with an example."
MOST_BYTES = 200_000


def main() -> None:
    """A chat on a wide screen, light and dark, a token's details, and the page of a telephone."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["UI_CHROMIUM"], args=as_root)
        for name, width, height, scheme in (
            ("ui-light", 1440, 860, "light"),
            ("ui-dark", 1440, 860, "dark"),
            ("ui-narrow", 400, 860, "light"),
        ):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(f"{URL}/ui")
            ask(page)
            take(page, name)
            context.close()
        browser.close()


def ask(page: Page) -> None:
    """A short chat, with the details of a token open."""
    settings(page, temperature=0, max_tokens=110)
    page.locator("#settings").evaluate("details => { details.open = false }")
    say(page, QUESTION)
    page.wait_for_timeout(1500)
    page.locator(".turn.assistant .token.accepted", has_text="num").first.hover()


def take(page: Page, name: str) -> None:
    """Write one picture. Raises: AssertionError if it is too large to be committed."""
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_BYTES, f"{path}: {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
