"""A chat: typed, streamed, its tokens marked as the API's reply says; stopped, asked again, and never run as markup."""

import time

from conftest import QUESTION, NewPage, ask_api, ended, live, say, settings, shown

LINES = {"accepted": "solid", "bonus": "double", "plain": "dotted"}  # what tells them apart without colours


def check_tokens_are_marked_as_the_reply_says(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=40)
    reply = say(page, QUESTION)
    marked = shown(page)
    assert len(marked) == len(reply["tokens"]) > 20
    for mark, token, origin in zip(marked, reply["tokens"], reply["provenance"], strict=True):
        assert mark["text"].encode() == bytes(token["bytes"])
        assert (mark["origin"], mark["step"]) == (origin["origin"], origin["step"])
        assert mark["line"] == LINES[origin["origin"]]
    assert {"accepted", "bonus"} < {mark["origin"] for mark in marked}
    foot = page.locator(".turn.assistant .figures").inner_text()
    length = reply["metrics"]["mean_acceptance_length"]
    assert f"{len(marked)} tokens" in foot and f"accept length {length:.2f}" in foot
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40}
    whole = ask_api(body | {"speculative": {"method": "NONE"}})
    assert reply["content"] == whole["choices"][0]["message"]["content"], "as plain decoding"


def check_a_token_tells_its_step_and_what_else_was_likely(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=16, top_logprobs=4)
    reply = say(page, QUESTION)
    tokens, details = page.locator(".turn.assistant .token"), page.locator("#details")
    for index in (2, 9):
        tokens.nth(index).hover()
        text, token = details.inner_text(), reply["tokens"][index]
        assert f"{reply['provenance'][index]['step']}, token" in text or "step" in text
        assert f"{token['logprob']:.3f}".replace("-", "−") in text
        assert details.locator("tbody tr").count() == 4
        for row, likely in zip(details.locator("tbody tr").all(), token["top_logprobs"], strict=True):
            assert f"{likely['logprob']:.3f}".replace("-", "−") in row.inner_text()
    page.mouse.move(0, 0)
    assert details.is_hidden()


def check_arrow_keys_walk_the_tokens(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=16)
    reply = say(page, QUESTION)
    page.locator(".turn.assistant .token").first.focus()
    for key, index in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", len(reply["tokens"]) - 1),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate("() => document.activeElement.dataset.index") == str(index)
        assert f"{reply['tokens'][index]['logprob']:.3f}".replace("-", "−") in page.locator("#details").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    assert page.locator(".turn.assistant .token[tabindex='0']").count() == 1, "one stop of Tab"


def check_stop_ends_the_request(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=2000)
    page.fill("#prompt", "Tell a very long story.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .token", timeout=60_000)
    page.click("#stop")
    ended(page)
    assert "stopped" in page.locator(".turn.assistant .figures").inner_text()
    deadline = time.monotonic() + 20
    while live()["running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert live()["running"] == 0
    count = len(shown(page))
    time.sleep(0.5)
    assert len(shown(page)) == count


def check_asking_again_and_anew(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=12)
    first = say(page, QUESTION)
    page.click("#again")
    ended(page)
    assert "".join(mark["text"] for mark in shown(page)) == first["content"]
    assert page.locator(".turn").count() == 2
    say(page, "And now?")
    assert page.locator(".turn").count() == 4
    page.click("#new")
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()


def check_without_speculation_every_token_is_plain(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=12)
    with_guesses = say(page, QUESTION)
    page.click("#new")
    page.locator("#speculate").focus()
    page.keyboard.press("Space")
    without = say(page, QUESTION)
    assert {mark["origin"] for mark in shown(page)} == {"plain"}
    assert without["content"] == with_guesses["content"]


def check_what_a_model_writes_is_never_markup(new_page: NewPage) -> None:
    """A grammar forces the model to write an element that would run a script; the user types one too."""
    written = "<img src=x onerror=window.hacked=1><b>"
    page = new_page()

    def force(route, request) -> None:
        route.continue_(post_data=dict(request.post_data_json) | {"regex": written.replace(".", r"\.")})

    page.route("**/v1/chat/completions", force)
    reply = say(page, "<img src=x onerror=window.hacked=2>")
    assert reply["content"] == written == page.locator(".turn.assistant .said").inner_text().replace("<|im_end|>", "")
    assert page.locator(".turn.user .said").inner_text() == "<img src=x onerror=window.hacked=2>"
    page.locator(".turn.assistant .token").first.hover()
    assert page.locator("#log img, #log b, #details img, #announcer img").count() == 0
    assert page.evaluate("() => window.hacked") is None


def check_an_error_is_told(new_page: NewPage) -> None:
    page = new_page()
    settings(page, temperature=0, max_tokens=1_000_000)
    page.fill("#prompt", "Hello")
    with page.expect_response("**/v1/chat/completions") as said:
        page.keyboard.press("Enter")
    assert said.value.status == 400
    page.wait_for_selector("#problem:not(:empty)")
    assert "maximum context length" in page.locator("#problem").inner_text()
    assert page.locator("#send").is_enabled()
