"""Conversations in the browser's storage: two tabs on one, what older pages kept, storage that is full or
missing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fakes import FakeAsyncEngine, Gate

from .browser import OpenPage, Page, answer, expect, say, serving, wait_until_done


def shouted(prompt: list[int], params: Any) -> list[str]:
    """The last message in capitals."""
    return [bytes(prompt).decode().rpartition("user: ")[2].removesuffix("\nassistant:").upper()]


def second_tab(page: Page) -> Page:
    other = page.context.new_page()
    other.goto(page.url)
    return other


#: All messages that the browser keeps, whatever is shown: [[role, content]].
KEPT = """() => new Promise((resolve) => {
  const opening = indexedDB.open("penstock");
  opening.onsuccess = () => {
    const asking = opening.result.transaction("nodes").objectStore("nodes").getAll();
    asking.onsuccess = () => {
      opening.result.close();
      resolve(asking.result.sort((a, b) => a.at - b.at).map(({ role, content }) => [role, content]));
    };
  };
})"""


def test_two_tabs_in_one_conversation_lose_nothing(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(shouted)) as url:
        page = open_page(url)
        say(page, "first")
        expect(answer(page).locator(".body")).to_have_text("FIRST")
        wait_until_done(page)
        other = second_tab(page)
        expect(answer(other).locator(".body")).to_have_text("FIRST")
        say(other, "from the other")
        expect(answer(other).locator(".body")).to_have_text("FROM THE OTHER")
        wait_until_done(other)
        # What the other tab has added is shown here, and goes on here.
        expect(answer(page).locator(".body")).to_have_text("FROM THE OTHER")
        say(page, "from the first")
        expect(answer(page).locator(".body")).to_have_text("FROM THE FIRST")
        wait_until_done(page)
        expect(answer(other).locator(".body")).to_have_text("FROM THE FIRST")
        other.reload()
        expect(other.locator(".message .body")).to_have_text(
            ["first", "FIRST", "from the other", "FROM THE OTHER", "from the first", "FROM THE FIRST"]
        )


def test_two_answers_at_the_same_time_are_two_branches(open_page: OpenPage) -> None:
    ends = {"one": Gate(), "two": Gate()}

    def script(prompt: list[int], params: Any) -> list[Any]:
        text = bytes(prompt).decode()
        return ["Base"] if text[6:10] == "base" and "user: " not in text[7:] else [
            "Half ", ends["one" if "one" in text else "two"], "whole"
        ]  # fmt: skip

    with serving(FakeAsyncEngine(script)) as url:
        page = open_page(url)
        say(page, "base")
        expect(answer(page).locator(".body")).to_have_text("Base")
        wait_until_done(page)
        other = second_tab(page)
        expect(answer(other).locator(".body")).to_have_text("Base")
        say(page, "one")
        expect(answer(page).locator(".body")).to_have_text("Half")
        say(other, "two")
        expect(answer(other).locator(".body")).to_have_text("Half")
        page.get_by_role("button", name="Rename").first.click()
        page.get_by_label("Name", exact=True).fill("Renamed")
        page.keyboard.press("Enter")
        expect(other.locator("#title")).to_have_text("Renamed")
        for end in ends.values():
            end.set()
        for tab, text in ((page, "one"), (other, "two")):
            expect(answer(tab).locator(".body")).to_have_text("Half whole")
            wait_until_done(tab)
            expect(tab.locator(".message.user").last).to_contain_text(text)
            expect(tab.locator(".message.user").last).to_contain_text("/2")
        assert sorted(page.evaluate(KEPT)) == sorted(
            [["user", "base"], ["assistant", "Base"], ["user", "one"], ["user", "two"]]
            + 2 * [["assistant", "Half whole"]]
        )
        page.reload()
        expect(page.locator("#title")).to_have_text("Renamed")
        page.get_by_role("button", name=re.compile("(Previous|Next) version")).and_(
            page.locator(":enabled")
        ).first.click()
        expect(answer(page).locator(".body")).to_have_text("Half whole")


def test_what_is_deleted_in_one_tab_stays_deleted(open_page: OpenPage) -> None:
    end = Gate()
    scripts: list[list[Any]] = [["Half ", end, "whole"], ["First"]]
    engine = FakeAsyncEngine(lambda prompt, params: scripts.pop())
    with serving(engine) as url:
        page = open_page(url)
        say(page, "Doomed")
        wait_until_done(page)
        other = second_tab(page)
        say(other, "Again")
        expect(answer(other).locator(".body")).to_have_text("Half")
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete “Doomed”").click()
        expect(page.get_by_role("navigation")).to_contain_text("None is kept")
        expect(other.get_by_role("navigation")).to_contain_text("None is kept")
        expect(other.locator("#notice")).to_contain_text("deleted in another tab")
        end.set()
        say(other, "New")  # not in the conversation that is gone
        for tab in (page, other):
            expect(tab.locator(".item-title")).to_have_text(["New"])
        page.reload()
        expect(page.locator(".item-title")).to_have_text(["New"])
        assert "Doomed" not in str(page.evaluate(KEPT))


LEGACY = {
    "id": "mold1", "title": "Old", "mode": "chat", "changed": 5, "settings": {"temperature": 0.5},
    "leaf": "m3", "text": "", "before": None,
    "nodes": {
        "m9": {"id": "m9", "parent": None, "role": "user", "content": "Question"},
        "m2": {"id": "m2", "parent": "m9", "role": "assistant", "content": "One",
               "figures": {"finish": "stop", "outputTokens": 1}},
        "m3": {"id": "m3", "parent": "m9", "role": "assistant", "content": "Two",
               "figures": {"finish": "stop", "outputTokens": 1}},
    },
}  # fmt: skip


def test_what_older_pages_kept_is_moved_once_and_whole(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(shouted)) as url:
        page = open_page(url)
        completion = LEGACY | {
            "id": "mold2",
            "title": "",
            "mode": "completion",
            "text": "Once\nmore",
            "nodes": {},
        }
        page.evaluate(
            """([chat, completion]) => {
              localStorage.setItem("penstock.conversation." + chat.id, JSON.stringify(chat));
              localStorage.setItem("penstock.conversation." + completion.id, JSON.stringify(completion));
              localStorage.setItem("penstock.conversation.broken", "{");
              localStorage.setItem("penstock.open", chat.id);
            }""",
            [LEGACY, completion | {"leaf": None}],
        )
        page.reload()
        expect(page.locator(".message .body")).to_have_text(["Question", "Two"])
        expect(answer(page)).to_contain_text("2/2")
        expect(page.locator(".item-title")).to_have_count(2)
        names = page.evaluate("Object.keys(localStorage).filter((name) => name.includes('conversation'))")
        assert names == ["penstock.conversation.broken"], "what can't be read stays"
        say(page, "More")
        expect(answer(page).locator(".body")).to_have_text("MORE")
        wait_until_done(page)
        # An older page in another tab writes again: what is new in it is added, what was deleted stays so.
        later = json.loads(json.dumps(LEGACY)) | {"changed": 9}
        later["nodes"]["m4"] = {"id": "m4", "parent": "m3", "role": "user", "content": "Late"}
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete “Once”").click()
        expect(page.locator(".item-title")).to_have_text(["Old"])
        page.evaluate(
            """([chat, completion]) => {
              localStorage.setItem("penstock.conversation." + chat.id, JSON.stringify(chat));
              localStorage.setItem("penstock.conversation." + completion.id, JSON.stringify(completion));
            }""",
            [later, completion | {"leaf": None}],
        )
        page.reload()
        expect(page.locator(".message .body")).to_have_text(["Question", "Two", "More", "MORE"])
        expect(page.locator(".item-title")).to_have_text(["Old"])
        assert ["user", "Late"] in page.evaluate(KEPT)


NO_ROOM = """
const put = IDBObjectStore.prototype.put;
IDBObjectStore.prototype.put = function (...values) {
  if (!globalThis.isFull) return put.apply(this, values);
  throw new DOMException("no room", "QuotaExceededError");
};
"""


def test_a_full_storage_is_said_and_nothing_is_lost(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(shouted)) as url:
        page = open_page(url)
        page.add_init_script(NO_ROOM)
        page.reload()
        say(page, "kept")
        wait_until_done(page)
        page.evaluate("globalThis.isFull = true")
        say(page, "held")
        expect(page.locator("#notice")).to_contain_text("storage is full")
        wait_until_done(page)
        page.get_by_role("button", name="New", exact=True).click()
        page.get_by_role("navigation").get_by_role("button", name="kept", exact=True).click()
        expect(answer(page).locator(".body")).to_have_text("HELD")
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        assert "HELD" in download.value.path().read_text()
        page.evaluate("globalThis.isFull = false")
        say(page, "again")
        expect(answer(page).locator(".body")).to_have_text("AGAIN")
        wait_until_done(page)
        page.reload()
        expect(page.locator(".message .body")).to_have_text(
            ["kept", "KEPT", "held", "HELD", "again", "AGAIN"]
        )


def test_without_any_storage_the_page_works_and_says_so(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(shouted)) as url:
        page = open_page(url)
        page.add_init_script("Object.defineProperty(globalThis, 'indexedDB', { value: undefined })")
        page.reload()
        expect(page.get_by_role("navigation")).to_contain_text("keeps nothing")
        say(page, "one")
        expect(answer(page).locator(".body")).to_have_text("ONE")
        wait_until_done(page)
        page.get_by_role("button", name="New", exact=True).click()
        page.get_by_role("navigation").get_by_role("button", name="one", exact=True).click()
        expect(answer(page).locator(".body")).to_have_text("ONE")


@pytest.mark.inner
def test_an_answer_under_way_is_kept_when_the_page_is_left(open_page: OpenPage) -> None:
    ends = [Gate() for _ in range(2)]
    with serving(FakeAsyncEngine(lambda prompt, params: ["Half ", ends[0], "more ", ends[1]])) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Half")
        ends[0].set()
        expect(answer(page).locator(".body")).to_have_text("Half more")
        page.reload()
        expect(answer(page).locator(".body")).to_have_text("Half more")
        expect(answer(page)).to_contain_text("not finished")
