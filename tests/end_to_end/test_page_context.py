"""The page when the context fills, and what errors say in the reader's language."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeAsyncEngine, FakeModel
from penstock.errors import RequestFailed, StepFailed

from .browser import OpenPage, answer, expect, say, serving, wait_until_done

ROOT = Path(__file__).parents[2]


def reply(prompt: list[int], params: Any) -> list[str]:
    return ["y" * 100]


def test_a_full_context_is_seen_before_and_old_messages_are_left_out(open_page: OpenPage) -> None:
    """The fake counts a token for each byte: a question of 100 and its answer take some 220 of 980."""
    engine = FakeAsyncEngine(reply, FakeModel(max_model_len=980))
    with serving(engine) as url:
        page = open_page(url)
        fullness, leave = page.locator("#fullness"), page.locator("#leave-out")
        expect(page.locator("#model")).to_contain_text("980")
        for number in range(3):
            expect(leave).to_be_hidden()
            say(page, f"{number}" + "x" * 99)
            wait_until_done(page)
        used = len(engine.streams[-1].prompt) + 101
        expect(fullness).to_have_text(f"Context {round(used / 9.8)}%: {used} of 980 tokens")
        page.get_by_label("Message", exact=True).fill("abcd" * 50)
        expect(fullness).to_have_text(re.compile(rf"≈ {used + 50} of 980"))
        page.get_by_label("Message", exact=True).fill("")
        say(page, "3" + "x" * 99)
        wait_until_done(page)
        expect(fullness).to_have_attribute("data-state", "full")
        # Too much: the error leads out of itself.
        say(page, "4" + "x" * 99)
        failure = answer(page).locator(".failure")
        expect(failure).to_contain_text(re.compile(r"context is full: what is sent has 99\d tokens"))
        failure.get_by_role("button", name="Leave out old messages and try again").click()
        expect(answer(page).locator(".body")).to_have_text("y" * 100)
        wait_until_done(page)
        sent = bytes(engine.streams[-1].prompt).decode()
        assert "user: 4x" in sent and "user: 0x" not in sent and len(sent) < 760
        expect(page.locator(".left-out")).to_have_count(1)
        page.reload()
        expect(page.locator(".left-out")).to_contain_text("not sent")
        expect(page.locator(".message")).to_have_count(10)
        # By hand, and back.
        expect(leave).to_be_hidden()
        page.get_by_role("button", name="Send them again").click()
        expect(page.locator(".left-out")).to_have_count(0)
        leave.click()
        expect(page.locator(".left-out")).to_have_count(1)
        say(page, "5")
        wait_until_done(page)
        assert "user: 0x" not in bytes(engine.streams[-1].prompt).decode()


@pytest.mark.inner
def test_a_message_that_is_too_long_alone(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(reply, FakeModel(max_model_len=200))) as url:
        page = open_page(url)
        say(page, "x" * 300)
        failure = answer(page).locator(".failure")
        expect(failure).to_contain_text("too long: edit it")
        assert failure.get_by_role("button").count() == 0


@pytest.mark.parametrize("code", ["string_above_max_length", "request_too_large"])
def test_what_is_too_long_for_a_request_leads_out_as_well(open_page: OpenPage, code: str) -> None:
    """Servers refuse by characters and bytes before they count tokens."""
    with serving(FakeAsyncEngine(reply)) as url:
        page = open_page(url)
        say(page, "one")
        wait_until_done(page)
        error = {"error": {"message": "too long", "code": code, "param": "messages", "type": "x"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=413, json=error), times=1)
        say(page, "two")
        answer(page).get_by_role("button", name="Leave out old messages and try again").click()
        expect(answer(page).locator(".body")).to_have_text("y" * 100)
        expect(page.locator(".left-out")).to_have_count(1)


def test_errors_are_chinese_on_the_chinese_page(open_page: OpenPage) -> None:
    scripts: list[list[Any]] = [[RequestFailed("no state")], ["Up", StepFailed(["r"], "layer 3 is damaged")]]
    engine = FakeAsyncEngine(lambda prompt, params: scripts.pop(), FakeModel(max_model_len=300))
    with serving(engine) as url:
        page = open_page(url, locale="zh-CN")
        for sentence, words in (("计算这个请求时出错", "layer 3 is damaged"), ("无法计算", "no state")):
            page.locator("#prompt").fill("hi")
            page.keyboard.press("Enter")
            failure = page.locator(".failure").last
            expect(failure).to_contain_text(sentence)
            expect(failure.locator("details p")).to_be_hidden()
            failure.get_by_text("服务器的原文").click()
            expect(failure.locator("details p")).to_contain_text(words)
            page.get_by_role("button", name="发送", exact=True).wait_for()
        page.locator("#prompt").fill("x" * 400)
        page.keyboard.press("Enter")
        expect(page.locator(".failure").last).to_contain_text("上下文已满")
        page.get_by_role("radio", name="续写").check()
        page.locator("#paper").fill("x" * 400)
        page.keyboard.press("Control+Enter")
        expect(page.locator(".failure").last).to_contain_text("上下文已满")


def test_every_code_of_the_server_has_a_sentence() -> None:
    """In chinese_errors.js, but for the one that has words of the page's own."""
    server = ROOT / "server" / "penstock_server"
    ui = server / "ui"
    known = set(re.findall(r"^  (\w+):", (ui / "chinese_errors.js").read_text(), re.MULTILINE))
    rooms = ["protocol/errors.py", "middleware", "routing", "facade", "models"]
    files = [file for room in rooms for file in (server / room).rglob("*.py")] + [server / rooms[0]]
    text = "\n".join(file.read_text() for file in files)
    codes = set(re.findall(r'code="([a-z_]+)"|(?:unavailable\([^)]*, )"([a-z_]+)"', text))
    found = {code for pair in codes for code in pair if code}
    table = re.search(r"_VALIDATION_CODES = \{(.*?)\}", text, re.DOTALL)
    assert table is not None
    found |= set(re.findall(r': "([a-z_]+)"', table[1]))
    assert len(found) > 15
    assert found - known == {"context_length_exceeded"}


@pytest.mark.parametrize("locale", ["en", "zh"])
def test_old_answers_keep_their_models_name(open_page: OpenPage, locale: str) -> None:
    with serving(FakeAsyncEngine(lambda prompt, params: ["Hello!"])) as url:
        page = open_page(url, locale=locale)
        cards = [{"id": name, "root": name, "max_model_len": 4096} for name in ("large", "small")]
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
        page.route("**/v1/chat/completions", lambda route: route.continue_(
            post_data=re.sub('"model":"[a-z]+"', '"model":"tiny"', route.request.post_data or "")
        ))  # fmt: skip
        page.reload()
        who, choice = page.locator(".assistant .who"), page.locator("#model-choice")
        for number, name in enumerate(("large", "small")):
            choice.select_option(name)
            page.locator("#prompt").fill("Hello")
            page.keyboard.press("Enter")
            expect(page.locator(".assistant .figures")).to_have_count(number + 1)
            page.locator("#send").wait_for()
        expect(who).to_have_text(["large", "small"])
        choice.select_option("large")
        expect(who).to_have_text(["large", "small"])
        page.reload()
        expect(who).to_have_text(["large", "small"])
        expect(page.locator(".assistant").last).to_have_accessible_name("small")
