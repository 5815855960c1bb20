"""The page in the reader's language: every text that can be seen or heard, in each view."""

from __future__ import annotations

import re

import pytest

from fakes import FakeAsyncEngine
from penstock.metrics import StepStats, Traffic

from .browser import OpenPage, Page, expect, serving
from .test_page_machine import planned_engine

#: Every text node and attribute that a reader sees or hears.
SHOWN = """() => {
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.nodeType === Node.TEXT_NODE) {
      if (!node.parentElement.closest("noscript, [hidden]")) texts.push(node.textContent);
    } else for (const name of ["aria-label", "title", "placeholder", "value"])
      if (!node.closest("[hidden]") && !(name === "value" && node.localName !== "button"))
        texts.push(node.getAttribute(name) ?? "");
  }
  return texts;
}"""
#: What stays in Latin letters: names, units, keys, and what readers type.
LATIN = {
    "Penstock", "tiny", "token", "API", "KV", "Top", "Enter", "Shift", "Ctrl", "Esc", "GiB", "MiB", "KiB",
    "temperature", "Hello", "ok", "GB", "ms", "JSON",
}  # fmt: skip


def latin(page: Page, ignored: tuple[str, ...] = ()) -> set[str]:
    texts = [text for text in page.evaluate(SHOWN) if text not in ignored]
    return set(re.findall(r"[A-Za-z]{2,}", " ".join(texts))) - LATIN


@pytest.mark.inner
@pytest.mark.parametrize("locale", ["zh-CN", "zh-TW", "zh"])
def test_a_chinese_browser_gets_a_chinese_page(open_page: OpenPage, locale: str) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url, locale=locale)
        expect(page.locator("#state")).to_have_text("就绪")
        expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
        assert not latin(page)


@pytest.mark.parametrize("locale", ["en-GB", "de-DE"])
def test_any_other_browser_gets_an_english_page(open_page: OpenPage, locale: str) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url, locale=locale)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("html")).to_have_attribute("lang", "en")
        assert not re.search("[\u4e00-\u9fff]", " ".join(page.evaluate(SHOWN)))


def test_every_view_is_chinese(open_page: OpenPage) -> None:
    """A conversation, its edit, the settings, the table of the plan, a completion, the dialog of the key."""
    engine = planned_engine("GTX 1060")
    engine.model.metrics.links["host to device"] = Traffic()
    engine.model.metrics.record(StepStats(2.0, 1, 1, 1, 10**9, 0.1, 1.2, 1.6))
    plan = engine.model.plan
    with serving(engine) as url:
        page = open_page(url, locale="zh-CN")
        expect(page.locator("#state")).to_have_text("就绪")
        page.get_by_role("button", name="内存分布").click()
        page.get_by_role("button", name="设置").click()
        page.get_by_label("消息", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .figures")).to_contain_text("token")
        page.get_by_role("button", name="修改后重新发送").click()
        own = ("Hello!", *plan.notes, *plan.warnings)
        assert not latin(page, own)
        page.get_by_role("radio", name="续写").check()
        expect(page.get_by_label("要续写的文本")).to_be_visible()
        page.get_by_role("button", name="API 密钥").click()
        page.get_by_role("dialog").wait_for()
        assert not latin(page, own)
