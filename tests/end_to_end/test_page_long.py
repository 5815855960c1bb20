"""Long conversations: the work for a message does not grow with the number of messages. Work is counted, not
timed: tests/bench/long_conversations.py has the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeAsyncEngine, FakeModel

from .browser import OpenPage, Page, answer, expect, say, serving, wait_until_done

#: The scripts whose work could grow: the tree, the stage, the storage, the list.
SCRIPTS = ("chat", "context", "conversation", "list", "log", "main", "markdown", "message", "store")

COUNTED = """() => {
  globalThis.work = { puts: 0, added: 0, parsed: 0 };
  const put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = function (...values) {
    work.puts += 1;
    return put.apply(this, values);
  };
  new MutationObserver((records) => {
    for (const { addedNodes } of records) work.added += addedNodes.length;
  }).observe(document.getElementById("stage"), { childList: true, subtree: true });
}"""


def conversation(num_messages: int) -> dict[str, Any]:
    nodes = [
        {
            "id": f"m{index}",
            "parent": f"m{index - 1}" if index else None,
            "role": "assistant" if index % 2 else "user",
            "content": f"Message **{index}** \\(x_{{{index}}}\\)",
            "figures": {"finish": "stop"},
        }
        for index in range(num_messages)
    ]
    return {"mode": "chat", "title": f"{num_messages} messages", "nodes": nodes, "leaf": nodes[-1]["id"]}


def open_conversation(page: Page, folder: Path, num_messages: int) -> None:
    file = folder / f"{num_messages}.json"
    file.write_text(json.dumps({"conversations": [conversation(num_messages)]}))
    page.get_by_label("File to import").set_input_files(file)
    page.get_by_role("button", name=f"{num_messages} messages", exact=True).click()
    expect(page.locator(".message .katex").last).to_contain_text(f"{num_messages - 1}")


@pytest.mark.slow
def test_a_message_costs_the_same_in_a_long_conversation(open_page: OpenPage, tmp_path: Path) -> None:
    found: dict[int, dict[str, int]] = {}
    with serving(FakeAsyncEngine(model=FakeModel(max_model_len=10**7))) as url:
        for number in (40, 640):
            page = open_page(url)
            open_conversation(page, tmp_path, number)
            page.evaluate(COUNTED)
            session = page.context.new_cdp_session(page)
            session.send("Profiler.enable")
            session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
            say(page, "And now?")
            wait_until_done(page)
            expect(answer(page).locator(".body")).to_have_text("Hello!")
            coverage = session.send("Profiler.takePreciseCoverage")["result"]
            calls = sum(
                function["ranges"][0]["count"]
                for script in coverage
                if script["url"].rpartition("/")[2].removesuffix(".js") in SCRIPTS
                for function in script["functions"]
            )
            found[number] = page.evaluate("work") | {"calls": calls}
            page.close()
    short, long = found[40], found[640]
    assert long["puts"] == short["puts"] <= 8
    assert abs(long["added"] - short["added"]) <= 20
    # The request has all messages; some frames more or less are drawn meanwhile.
    assert long["calls"] <= short["calls"] + 3 * 600 + 400, (short, long)


def test_what_is_far_away_is_plain_until_it_comes_near(open_page: OpenPage, tmp_path: Path) -> None:
    with serving(FakeAsyncEngine(model=FakeModel(max_model_len=10**7))) as url:
        page = open_page(url)
        open_conversation(page, tmp_path, 400)
        expect(page.locator(".message")).to_have_count(400)
        assert page.locator(".message .katex").count() < 100
        first = page.locator(".message.assistant").first
        assert (first.text_content() or "").startswith("ModelMessage **1** ")  # a reader can search for it
        first.scroll_into_view_if_needed()
        expect(first.locator("strong")).to_have_text("1")
        first.get_by_role("button", name="Answer again").click()
        expect(page.locator(".message")).to_have_count(2)
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        expect(answer(page)).to_contain_text("2/2")
        wait_until_done(page)
        page.get_by_role("button", name="Previous version").click()
        expect(page.locator(".message")).to_have_count(400)


@pytest.mark.inner
def test_the_end_stays_in_sight_unless_the_reader_leaves_it(open_page: OpenPage, tmp_path: Path) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["word\n\n" * 60], FakeModel(max_model_len=10**7))
    rest = "document.getElementById('stage').scrollHeight - stage.scrollTop - stage.clientHeight"
    with serving(engine) as url:
        page = open_page(url)
        open_conversation(page, tmp_path, 100)
        page.wait_for_function(f"{rest} < 2")
        say(page, "More")
        wait_until_done(page)
        page.wait_for_function(f"{rest} < 2")
        page.evaluate("new Promise((done) => { stage.onscrollend = done; stage.scrollTop -= 900; })")
        say(page, "More")
        page.wait_for_function(f"{rest} < 2")  # a new question is shown
        wait_until_done(page)
        page.wait_for_function(f"{rest} < 2")
