"""The chat page in a real browser: against a scripted server for what must be forced, against the real one for the rest."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.helpers.fake_openai import FakeOpenAI, fake_openai
from tests.helpers.server import Server, running_server, wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian package chromium)"),
]

KEY = "a-key-for-tests"

MARKDOWN = """## A heading

Some **bold**, *italic* and `code`, 2 * 3 * 4 and snake_case_name.

- one
- two
  1. nested

```python
print("<b>not bold</b>")
```

[a link](https://example.org/a_(b)) and [no link](javascript:alert(1)) <img src=x onerror="window.hacked=1">

| a | b |
|---|---|
| 1 | **2** |
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab. Errors of the page's own scripts, and everything its policy forbids, fail the test."""
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    page = context.new_page()
    page.set_default_timeout(20_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security Policy" in message.text else None)
    page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
    yield page
    context.close()
    assert not faults


@pytest.fixture(scope="module")
def scripted() -> Iterator[FakeOpenAI]:
    with fake_openai() as server:
        yield server


@pytest.fixture
def fake(scripted: FakeOpenAI) -> FakeOpenAI:
    scripted.reset()
    return scripted


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real one, with the tiny model, asking for a key. Its steps take so long that nobody is too slow to stop a long reply."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with running_server("--num-blocks", "256", "--api-key-file", str(keys), "--inject", "worker.forward=pause:0.01@*") as server:
        yield server


def say(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def finished_reply(page: Page, number: int = 0) -> Any:
    reply = page.locator(".reply[aria-busy=false]").nth(number)
    expect(reply).to_be_visible()
    return reply


def assert_soon(page: Page, condition: str, what: str) -> None:
    """Polls from outside: the page's policy allows no evaluation inside."""
    wait_for(lambda: page.evaluate(condition), 20.0, lambda: f"{what}: not {condition}")


def wait_for_growth(page: Page, pixels: int) -> None:
    assert_soon(page, f"messages.offsetHeight > {page.evaluate('messages.offsetHeight') + pixels}", "the reply goes on")


def let_replies_go_on(page: Page) -> None:
    """To the end of the context: a tiny random model may else end one with any token."""

    def amend(route: Route) -> None:
        body: dict[str, Any] = route.request.post_data_json or {}
        route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))

    page.route("**/v1/chat/completions", amend)


def debug_state(server: Server) -> Any:
    with urllib.request.urlopen(f"{server.url}/debug/state", timeout=20) as response:
        return json.load(response)


# --- the real server -------------------------------------------------------------------------------------------


def test_a_message_is_answered_and_its_cost_is_shown(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#model")).not_to_be_empty()
    expect(page.locator("#key-form")).to_be_hidden()
    page.click("#open-settings")
    page.fill("#max_tokens", "12")
    page.click("text=Done")
    say(page, "What is the capital of France?")
    reply = finished_reply(page)
    expect(reply.locator(".text")).not_to_be_empty()
    expect(reply.locator("[data-stat=tokens]")).to_have_text("12 tokens")
    expect(reply.locator("[data-stat=speed]")).to_contain_text("tokens/s")
    expect(reply.locator("[data-stat=first]")).to_contain_text("first token after")
    expect(reply.locator("[data-stat=cached]")).to_contain_text("cached")
    expect(page.locator("#context")).to_contain_text("tokens of context")


def test_stopping_a_long_reply_frees_its_blocks(page: Page, server: Server) -> None:
    page.add_init_script(f"sessionStorage.setItem('pagemill.key', '{KEY}')")
    let_replies_go_on(page)
    page.goto(server.url)
    say(page, "Tell me everything.")
    expect(page.locator(".reply .text")).not_to_be_empty()
    wait_for(lambda: debug_state(server)["sequences"], 20.0, lambda: "no sequence runs")
    page.click("#stop")
    expect(finished_reply(page).locator(".note")).to_have_text("Stopped")
    wait_for(lambda: not debug_state(server)["sequences"], 20.0, lambda: "the sequence still runs")
    assert debug_state(server)["blocks"]["used"] == 0
    say(page, "And now?")  # the conversation goes on
    expect(page.locator(".reply")).to_have_count(2)


def test_the_page_is_served_with_its_policy_and_without_anything_foreign(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/", timeout=20) as response:
        policy, html = response.headers["Content-Security-Policy"], response.read().decode()
        tag = response.headers["ETag"]
    assert policy.startswith("default-src 'self';")
    assert "//" not in html.replace("<!doctype html>", "")
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/", headers={"If-None-Match": tag}), timeout=20)
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/__init__.py", "/static/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(urllib.request.Request(server.url + path, headers={"X-Api-Key": KEY}), timeout=20)


# --- a scripted server -----------------------------------------------------------------------------------------


def test_what_a_model_says_is_rendered_and_never_executed(page: Page, fake: FakeOpenAI) -> None:
    fake.reply = MARKDOWN
    page.goto(fake.url)
    say(page, "Show me")
    text = finished_reply(page).locator(".text")
    expect(text.locator("h3")).to_have_text("A heading")
    assert text.locator("strong").all_inner_texts() == ["bold", "2"]
    assert text.locator("em").all_inner_texts() == ["italic"]
    expect(text.locator("p").first).to_contain_text("2 * 3 * 4 and snake_case_name.")
    expect(text.locator("ul > li > ol > li")).to_have_text("nested")
    expect(text.locator("pre")).to_have_text('print("<b>not bold</b>")')
    expect(text.locator("td").last).to_have_text("2")
    links = text.locator("a")
    expect(links).to_have_count(1)
    expect(links).to_have_attribute("href", "https://example.org/a_(b)")
    expect(links).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(text).to_contain_text('<img src=x onerror="window.hacked=1">')
    expect(text).to_contain_text("[no link](javascript:alert(1))")
    assert page.evaluate("[document.querySelectorAll('img:not(.brand img), script:not([src])').length, window.hacked ?? 0]") == [0, 0]


def test_markup_in_a_message_stays_text(page: Page, fake: FakeOpenAI) -> None:
    page.goto(fake.url)
    say(page, "<img src=x onerror=alert(1)><script>alert(2)</script>")
    finished_reply(page)
    expect(page.locator(".own .said")).to_have_text("<img src=x onerror=alert(1)><script>alert(2)</script>")
    page.reload()  # from memory it is text as well
    expect(page.locator(".own .said")).to_have_text("<img src=x onerror=alert(1)><script>alert(2)</script>")


@pytest.mark.parametrize("text", ["*" * 20000, "[" * 20000, "`" * 19999 + " `", "**a " * 5000, "- " * 8000, "1. " * 3000, "|" * 20000, "> " * 3000])
def test_hostile_markdown_is_rendered_in_reasonable_time(page: Page, fake: FakeOpenAI, text: str) -> None:
    page.goto(fake.url)
    script = "async (text) => { const m = await import('/static/markdown.js'); const t = performance.now(); m.renderAll(text); return performance.now() - t; }"
    assert page.evaluate(script, text) < 2000


def test_the_page_waits_while_the_server_loads(page: Page, fake: FakeOpenAI) -> None:
    fake.loading = {"status": "loading", "phase": "weights", "progress": 0.42, "detail": "113 of 270 MB"}
    page.goto(fake.url)
    expect(page.locator("#loading")).to_contain_text("Reading the weights 42 % · 113 of 270 MB")
    say(page, "Too early")
    expect(page.locator("#input")).to_have_value("Too early")  # kept, not lost
    assert not fake.requests
    fake.loading = None
    expect(page.locator("#loading")).to_be_hidden()
    page.click("#send")
    expect(finished_reply(page).locator(".text")).to_have_text("Hello there.")


def test_a_key_is_asked_for_only_if_the_server_wants_one(page: Page, fake: FakeOpenAI) -> None:
    page.goto(fake.url)
    expect(page.locator("#model")).to_have_text("tiny-chat")
    expect(page.locator("#key-form")).to_be_hidden()
    fake.key = "secret"
    say(page, "Hello")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-hint")).to_have_text("The server did not accept that key.")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    expect(finished_reply(page).locator(".text")).to_have_text("Hello there.")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_settings_and_system_prompt_go_with_the_request(page: Page, fake: FakeOpenAI) -> None:
    page.goto(fake.url)
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0")
    page.fill("#seed", "7")
    page.fill("#max_tokens", "99")
    page.click("text=Done")
    say(page, "Hello")
    finished_reply(page)
    request = fake.requests[0]
    assert request["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (request["temperature"], request["seed"], request["max_tokens"], request["model"]) == (0, 7, 99, "tiny-chat")
    assert request["stream_options"]["include_usage"] is True


def test_the_last_message_can_be_edited_and_the_reply_made_again(page: Page, fake: FakeOpenAI) -> None:
    page.goto(fake.url)
    for number, text in enumerate(("First", "Second")):
        say(page, text)
        finished_reply(page, number)
    page.click("text=Regenerate")
    wait_for(lambda: len(fake.requests) == 3, 20.0, lambda: "no new request")
    assert fake.requests[2]["messages"] == fake.requests[1]["messages"]
    finished_reply(page, 1)
    page.locator(".own").last.get_by_text("Edit").click()
    expect(page.locator("#input")).to_have_value("Second")
    say(page, "Third")
    finished_reply(page, 1)
    assert [message["content"] for message in fake.requests[3]["messages"]] == ["First", "Hello there.", "Third"]
    expect(page.locator(".own")).to_have_count(2)
    page.reload()
    expect(page.locator(".said").last).to_have_text("Third")
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()
    page.reload()
    expect(page.locator(".message")).to_have_count(0)


def test_shift_enter_makes_a_new_line(page: Page, fake: FakeOpenAI) -> None:
    page.goto(fake.url)
    page.fill("#input", "one")
    page.press("#input", "Shift+Enter")
    page.type("#input", "two")
    page.press("#input", "Enter")
    expect(page.locator(".said")).to_have_text("one\ntwo")
    finished_reply(page)
    assert fake.requests[0]["messages"][0]["content"] == "one\ntwo"


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((429, "rate_limit_exceeded", "Too many."), "The server is busy. Try again in 1 s."),
        ((400, "context_length_exceeded", "Too long."), "longer than the model can read"),
        ((500, "internal_error", "The server failed on this request."), "The server failed on this request."),
    ],
)
def test_errors_are_told_kindly_and_can_be_retried(page: Page, fake: FakeOpenAI, refusal: tuple[int, str, str], words: str) -> None:
    fake.refusal = refusal
    page.goto(fake.url)
    say(page, "Hello")
    expect(page.locator("#problem-text")).to_contain_text(words)
    expect(page.locator("#announcer")).to_have_text("Not complete")
    fake.refusal = None
    page.click("#problem-retry")
    expect(finished_reply(page).locator(".text")).to_have_text("Hello there.")
    expect(page.locator("#problem")).to_be_hidden()


def test_an_error_in_the_stream_keeps_what_was_said(page: Page, fake: FakeOpenAI) -> None:
    fake.break_after = 1
    page.goto(fake.url)
    say(page, "Hello")
    expect(page.locator("#problem-text")).to_have_text("The worker died.")
    expect(finished_reply(page).locator(".text")).to_have_text("Hello")
    expect(page.locator(".note")).to_have_text("Not complete")


def test_a_reply_that_a_stopping_server_broke_off_is_not_called_complete(page: Page, fake: FakeOpenAI) -> None:
    fake.finish_reason = "abort"
    page.goto(fake.url)
    say(page, "Hello")
    expect(page.locator("#problem-text")).to_have_text("The server broke the reply off before it was complete.")
    expect(finished_reply(page).locator(".text")).to_have_text("Hello there.")
    expect(page.locator(".note")).to_have_text("Not complete")
    expect(page.locator("#announcer")).to_have_text("Not complete")


def test_stop_and_escape_break_the_connection(page: Page, fake: FakeOpenAI) -> None:
    fake.endless, fake.pace_s = True, 0.01
    page.goto(fake.url)
    say(page, "Hello")
    expect(page.locator(".reply .text")).to_contain_text("there.Hello")
    page.keyboard.press("Escape")
    expect(finished_reply(page).locator(".note")).to_have_text("Stopped")
    wait_for(lambda: fake.num_disconnects, 20.0, lambda: "the connection is still open")


def test_a_reply_stopped_before_its_first_word_leaves_no_gap(page: Page, fake: FakeOpenAI) -> None:
    fake.pace_s = 60.0
    page.goto(fake.url)
    say(page, "First")
    wait_for(lambda: fake.requests, 20.0, lambda: "no request")
    page.click("#stop")
    expect(page.locator(".note")).to_have_text("Stopped")
    fake.pace_s = 0.0
    say(page, "Second")
    expect(finished_reply(page, 1).locator(".text")).to_have_text("Hello there.")
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "First\n\nSecond"}]


def test_scrolling_up_is_not_fought(page: Page, fake: FakeOpenAI) -> None:
    fake.endless, fake.pace_s, fake.reply = True, 0.005, "word\n\nword\n\n word"
    page.goto(fake.url)
    say(page, "Hello")
    assert_soon(page, "scroller.scrollTop > 300", "it follows by itself")
    page.locator("#scroller").hover()
    page.mouse.wheel(0, -200)
    expect(page.locator("#jump")).to_be_visible()
    wait_for_growth(page, 2000)  # by then the scrolling itself has come to rest
    resting = page.evaluate("scroller.scrollTop")
    wait_for_growth(page, 2000)
    assert page.evaluate("scroller.scrollTop") == resting
    page.click("#jump")
    assert_soon(page, "scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60", "it is at the end again")
    page.click("#stop")


@pytest.mark.parametrize("width", [320, 390, 1400])
def test_nothing_overflows_at_any_width(page: Page, fake: FakeOpenAI, width: int) -> None:
    fake.reply = MARKDOWN + "\n\n```\n" + "x" * 400 + "\n```\n\n" + "y" * 400
    page.set_viewport_size({"width": width, "height": 700})
    page.goto(fake.url)
    say(page, "z" * 300)
    finished_reply(page)
    wide = "[...document.querySelectorAll('body *')].filter((node) => node.getBoundingClientRect().right > innerWidth + 1)"
    allowed = "node.closest('.visually-hidden, pre, .table')"  # these scroll by themselves
    assert page.evaluate(f"{wide}.filter((node) => !{allowed}).map((node) => `${{node.tagName}} ${{node.className}}`)") == []
    assert page.evaluate("scroller.scrollWidth <= innerWidth")
