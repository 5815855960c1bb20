"""The web page in a real browser: answers and conversations. Over the real server: answers, what is kept.
Over a fake engine, which does what a test tells it when it tells it: everything that goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeAsyncEngine, Gate
from penstock.errors import QueueFull, StepFailed

from .browser import OpenPage, answer, expect, say, serving, wait_until_done
from .server_process import ServerProcess

WIDTHS = (390, 768, 1280, 1920)


# -- the real server ----------------------------------------------------------------------------------


@pytest.mark.inner
def test_an_answer_and_what_it_took(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    say(page, "What is 7 plus 5?")
    wait_until_done(page)
    expect(answer(page).locator(".body")).not_to_be_empty()
    figures = answer(page).locator(".figures").inner_text()
    assert re.search(r"^\d+ tokens? · .*first after [\d.]+ m?s · prompt \d+ tokens", figures)


def test_a_conversation_survives_a_reload(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    say(page, "Who are you?")
    wait_until_done(page)
    text = answer(page).locator(".body").inner_text()
    page.reload()
    expect(answer(page).locator(".body")).to_have_text(text)
    expect(
        page.get_by_role("navigation").get_by_role("button", name="Who are you?", exact=True)
    ).to_be_visible()


def test_a_completion_goes_on_and_back(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("radio", name="Completion").check()
    paper = page.get_by_label("Text to complete")
    paper.fill("Once upon a time")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Undo").wait_for()
    text = paper.input_value()
    assert text.startswith("Once upon a time") and len(text) > 30
    page.get_by_role("button", name="Undo").click()
    expect(paper).to_have_value("Once upon a time")


@pytest.mark.inner
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(server: ServerProcess, open_page: OpenPage, width: int) -> None:
    page = open_page(server.url, viewport={"width": width, "height": 844})
    expect(page.locator("#state")).to_have_text("ready")
    say(page, "Tell me a story about a fox, with `" + "a-very-long-word" * 20 + "` in it.")
    for _ in range(2):  # while it streams, and afterwards with both panels open
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.getElementById('stage').scrollWidth - stage.clientWidth") <= 0
        wait_until_done(page)
        page.get_by_role("button", name="Settings").click()


# -- a fake engine ------------------------------------------------------------------------------------


@pytest.mark.inner
def test_stopping_keeps_what_came_and_frees_the_sequence(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["Half of ", "it", Gate()])
    with serving(engine) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Half of it")
        page.keyboard.press("Escape")
        wait_until_done(page)
        expect(answer(page).locator(".figures")).to_contain_text("stopped")
        expect(answer(page).get_by_role("button", name="Go on")).to_be_visible()
        assert answer(page).locator(".body").inner_text() == "Half of it"
    assert engine.streams[0].is_aborted


@pytest.mark.inner
def test_a_key_is_asked_for_and_kept(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(), api_key=("open-sesame",)) as url:
        page = open_page(url)
        for key in ("wrong", "open-sesame"):
            page.get_by_role("dialog").wait_for()
            page.get_by_role("textbox", name="API key").fill(key)
            page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#state")).to_have_text("ready")
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        assert page.get_by_role("dialog").count() == 0


def test_a_key_that_is_not_given_is_not_asked_for_again_and_again(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(), api_key=("open-sesame",)) as url:
        page = open_page(url)
        page.get_by_role("dialog").wait_for()
        page.keyboard.press("Escape")
        expect(page.locator("#state")).to_have_text("needs a key")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_role("dialog")).to_have_count(0)
        say(page, "Hello")
        page.get_by_role("textbox", name="API key").fill("open-sesame")
        page.keyboard.press("Enter")
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        expect(page.locator("#state")).to_have_text("ready")


def test_a_busy_server_is_asked_again(open_page: OpenPage) -> None:
    full = [QueueFull("2 requests run or wait", 2)]
    engine = FakeAsyncEngine()
    submit = engine.submit

    def submit_later(request: Any) -> Any:
        if full:
            raise full.pop()
        return submit(request)

    engine.submit = submit_later  # type: ignore[method-assign]
    with serving(engine) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(page.get_by_role("alert")).to_have_text(re.compile(r"busy. Trying again in \d s"))
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        expect(page.locator("#notice")).to_be_hidden()


def test_an_error_within_a_stream_is_shown_and_can_be_tried_again(open_page: OpenPage) -> None:
    scripts = [["Fine."], ["Up to here", StepFailed(["r"], "layer 3 is damaged")]]
    engine = FakeAsyncEngine(lambda prompt, params: scripts.pop())
    with serving(engine) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(answer(page).locator(".failure")).to_contain_text("layer 3 is damaged")
        assert "Up to here" in answer(page).inner_text()
        page.get_by_role("button", name="Try again").click()
        expect(answer(page).locator(".body")).to_have_text("Fine.")
        expect(answer(page)).to_contain_text("2/2")


def test_a_server_that_is_gone_is_said_to_be(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["Hel", Gate()])
    with serving(engine) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Hel")
    expect(answer(page).locator(".failure")).to_be_visible()
    expect(page.locator("#state")).to_have_text("can't be reached")
    say(page, "Hello again")
    expect(answer(page).locator(".failure")).to_contain_text("can't be reached")


def test_editing_a_message_makes_a_branch(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: [bytes(prompt).decode().upper()])
    with serving(engine) as url:
        page = open_page(url)
        say(page, "first")
        expect(answer(page)).to_contain_text("USER: FIRST")
        page.get_by_role("button", name="Edit and send again").click()
        page.get_by_label("Edit the message").fill("second")
        page.keyboard.press("Enter")
        expect(answer(page)).to_contain_text("USER: SECOND")
        assert "FIRST" not in answer(page).inner_text()
        page.get_by_role("button", name="Previous version").click()
        expect(answer(page)).to_contain_text("USER: FIRST")


def test_settings_are_sent_and_kept(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: [bytes(prompt).decode()])
    with serving(engine) as url:
        page = open_page(url)
        page.get_by_role("button", name="Settings").click()
        for name, value in (("Temperature", "0.5"), ("Top k", "7"), ("Seed", "3"), ("Max tokens", "200")):
            page.get_by_label(name, exact=True).fill(value)
        page.get_by_label("Stop", exact=True).fill("END\n\\n\\n")
        page.get_by_label("System prompt").fill("Be kind")
        say(page, "Hello")
        expect(answer(page)).to_contain_text("system: Be kind")
        params = engine.streams[0].params
        assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 200)
        assert params.stop == ("END", "\n\n")
        page.reload()
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Top k", exact=True)).to_have_value("7")


HOSTILE = """<img src=x onerror="document.title='broken'"><script>document.title='broken'</script>
[click](javascript:alert(1)) ![picture](https://example.org/?said=all) <iframe src="https://example.org"></iframe>
<style>body { display: none }</style> <form action="https://example.org"><input name=a></form>

```html
<b>bold</b>
```

- [x] done
"""


@pytest.mark.inner
def test_what_a_model_writes_can_not_act(open_page: OpenPage) -> None:
    asked: list[str] = []
    with serving(FakeAsyncEngine(lambda prompt, params: [HOSTILE])) as url:
        page = open_page(url)
        page.on("request", lambda request: asked.append(request.url))
        say(page, "Hello")
        wait_until_done(page)
        body = answer(page).locator(".body")
        assert body.locator("img, script, iframe, style, form, input:not([type=checkbox])").count() == 0
        assert body.locator("a[href]").evaluate_all("links => links.map(link => link.href)") == [
            "https://example.org/?said=all"
        ]
        expect(body.locator("pre")).to_have_text("<b>bold</b>\n")
        assert "broken" not in page.title() and all(each.startswith(url) for each in asked)


def test_code_is_copied_as_it_is(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(lambda prompt, params: ["```py\nif a < b:\n    pass\n```"])) as url:
        page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
        say(page, "Hello")
        wait_until_done(page)
        page.get_by_role("button", name="Copy code").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    pass\n"


def test_code_has_colours_and_stays_text(open_page: OpenPage) -> None:
    code = 'def name(x):\n    return "<img src=x onerror=alert(1)>"  # why\n'
    asked = f"```python\n{code}```\n\n```nonsense\n{code}```"
    with serving(FakeAsyncEngine(lambda prompt, params: [asked])) as url:
        page = open_page(url)
        say(page, "Hello")
        wait_until_done(page)
        coloured, plain = page.locator("pre").all()
        expect(coloured.locator(".hljs-keyword").first).to_have_text("def")
        expect(coloured.locator(".hljs-comment")).to_have_text("# why")
        assert coloured.locator("img").count() == 0
        assert coloured.evaluate("pre => pre.textContent") == code
        assert plain.locator("span").count() == 0


def test_long_messages_collapse(open_page: OpenPage) -> None:
    lines = "\n".join(f"line {number}" for number in range(1, 41))
    answers = ["short", lines.replace("\n", "\n\n")]
    with serving(FakeAsyncEngine(lambda prompt, params: [answers.pop()])) as url:
        page = open_page(url)
        page.get_by_label("Message", exact=True).fill(lines)
        page.keyboard.press("Enter")
        wait_until_done(page)
        question = page.locator(".message.user").first
        height = "body => body.clientHeight < body.scrollHeight"
        assert question.locator(".body").evaluate(height)
        assert not answer(page).locator(".body").evaluate(height), "the newest answer is whole"
        question.get_by_role("button", name="Show all").click()
        assert not question.locator(".body").evaluate(height)
        say(page, "And now?")
        wait_until_done(page)
        expect(page.get_by_role("button", name="Show less")).to_have_count(1)  # what was opened stays open
        assert page.locator(".message.assistant .body").first.evaluate(height)


def test_text_files_are_attached(open_page: OpenPage) -> None:
    prompts: list[str] = []

    def echo(prompt: Any, params: Any) -> list[Any]:
        prompts.append(bytes(prompt).decode())
        return ["ok"]

    def file(name: str, content: bytes) -> dict[str, Any]:
        return {"name": name, "mimeType": "text/plain", "buffer": content}

    with serving(FakeAsyncEngine(echo)) as url:
        page = open_page(url)
        chooser = page.locator("#attach-input")
        chooser.set_input_files([file("a.py", b"x = '```'\n"), file("b.txt", "né".encode())])
        expect(page.locator("#attached li")).to_have_count(2)
        page.get_by_role("button", name="Remove b.txt").click()
        expect(page.locator("#attached li")).to_have_count(1)
        for name, content, why in (
            ("c.bin", b"\xff\xfe\x00", "no text"),
            ("d.txt", b"x" * 2**21, "too long"),
        ):
            chooser.set_input_files([file(name, content)])
            expect(page.locator("#notice")).to_contain_text(f"{name} is {why}")
        say(page, "What is this?")
        wait_until_done(page)
        assert "What is this?\n\na.py:\n````py\nx = '```'\n````" in prompts[0]
        expect(page.locator("#attached")).to_be_hidden()


def test_a_choice_of_models(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url)
        cards = [{"id": "large", "root": "large", "max_model_len": 4096}, {"id": "small", "root": "small"}]
        cards.append({"id": "alias", "root": "large"})
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
        asked: list[dict[str, Any]] = []

        def note(route: Any) -> None:
            asked.append(route.request.post_data_json)
            route.abort()

        page.route("**/v1/chat/completions", note)
        page.reload()
        choice = page.get_by_label("Model", exact=True)
        expect(choice.locator("option")).to_have_text(["large", "small"])
        choice.select_option("small")
        page.reload()
        expect(choice).to_have_value("small")
        say(page, "Hello")
        expect(page.locator(".failure")).to_be_visible()
        assert asked[0]["model"] == "small" and page.title() == "small · Penstock"


def test_an_answer_in_one_piece_has_no_rate(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine(lambda prompt, params: ["all at once"])) as url:
        page = open_page(url)
        say(page, "Hello")
        wait_until_done(page)
        expect(answer(page).locator(".figures")).to_contain_text("first after")
        assert "tokens/s" not in answer(page).locator(".figures").inner_text()


def test_conversations_are_exported_imported_renamed_and_deleted(open_page: OpenPage, tmp_path: Path) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url)
        say(page, "Keep this")
        wait_until_done(page)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        saved = tmp_path / "export.json"
        download.value.save_as(saved)
        assert len(json.loads(saved.read_text())["conversations"]) == 1
        page.get_by_role("button", name="Rename “Keep this”").click()
        page.get_by_label("Name").fill("Kept")
        page.keyboard.press("Enter")
        expect(page.locator("#title")).to_have_text("Kept")
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete “Kept”").click()
        expect(page.get_by_role("navigation")).to_contain_text("None is kept")
        page.get_by_label("File to import").set_input_files(saved)
        page.get_by_role("navigation").get_by_role("button", name="Keep this", exact=True).click()
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        saved.write_text('{"conversations": [{"mode": "chat", "nodes": {"a": {"id": "a", "role": "tool"}}}]}')
        page.get_by_label("File to import").set_input_files(saved)
        expect(page.locator("#notice")).to_contain_text("nothing was added")


def test_by_keyboard_alone(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url)
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert page.locator(".message").count() == 0
        page.keyboard.press("Enter")
        expect(page.locator(".message.user .body")).to_have_text("one\ntwo")
        wait_until_done(page)
        expect(page.locator("#spoken")).to_contain_text("Hello!")
        # Where a keyboard on the screen would come up, nothing has the focus at first.
        page = open_page(url, has_touch=True, is_mobile=True)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_colours_follow_the_system_or_the_reader(open_page: OpenPage) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url, color_scheme="dark")
        dark = page.evaluate(colour)
        page.get_by_role("button", name="Colours: system").click()
        light = page.evaluate(colour)
        assert dark != light
        page.reload()
        assert page.evaluate(colour) == light
        page.get_by_role("button", name="Colours: light").click()
        assert page.evaluate(colour) == dark


def test_with_less_motion_nothing_moves_by_itself(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["Hel", Gate()])
    with serving(engine) as url:
        page = open_page(url, reduced_motion="reduce")
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Hel")
        assert page.evaluate("document.getAnimations().length") == 0


def test_nothing_leads_away_from_an_answer_that_is_written(open_page: OpenPage) -> None:
    """Asking again, editing or another branch would move the page to where the answer does not grow."""
    end = Gate()
    scripts = [["Second", end, " part"], ["Again"], ["First"]]
    with serving(FakeAsyncEngine(lambda prompt, params: scripts.pop())) as url:
        page = open_page(url)
        say(page, "one")
        wait_until_done(page)
        page.get_by_role("button", name="Answer again").click()
        expect(answer(page).locator(".body")).to_have_text("Again")
        wait_until_done(page)
        say(page, "two")
        expect(answer(page).locator(".body")).to_have_text("Second")
        for name in ("Answer again", "Edit and send again", "Previous version"):
            for button in page.get_by_role("button", name=name).all():
                expect(button).to_be_disabled()
        end.set()
        expect(answer(page).locator(".body")).to_have_text("Second part")
        expect(page.get_by_role("button", name="Answer again").first).to_be_enabled()


def test_the_focus_is_not_lost_with_a_button(open_page: OpenPage) -> None:
    end = Gate()
    with serving(FakeAsyncEngine(lambda prompt, params: ["Hel", end, "lo"])) as url:
        page = open_page(url)
        page.get_by_label("Message", exact=True).fill("Hello")
        page.get_by_role("button", name="Send", exact=True).press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        end.set()
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_focused()


def test_buttons_can_be_seen_where_nothing_hovers(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        for text in ("one", "two"):
            page.get_by_label("Message", exact=True).fill(text)
            page.get_by_role("button", name="Send", exact=True).click()
            expect(answer(page).locator(".body")).to_have_text("Hello!")
            page.get_by_role("button", name="Conversations").click()
            page.get_by_role("button", name="New", exact=True).click()
        page.get_by_role("button", name="Conversations").click()
        opacities = page.locator(".item-tools").evaluate_all(
            "all => all.map(each => getComputedStyle(each).opacity)"
        )
        assert opacities == ["1", "1"]


def test_on_a_phone_one_panel_lies_over_the_conversation(open_page: OpenPage) -> None:
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url, viewport={"width": 390, "height": 844})
        conversations, settings = page.get_by_role("navigation"), page.get_by_role("complementary")
        expect(conversations).to_be_hidden()
        page.get_by_role("button", name="Conversations").click()
        expect(conversations).to_be_visible()
        page.get_by_role("button", name="Settings").click()
        expect(settings).to_be_visible()
        expect(conversations).to_be_hidden()
        page.keyboard.press("Escape")
        expect(settings).to_be_hidden()
        expect(page.get_by_role("button", name="Settings")).to_be_focused()


SAFARI = "new KeyboardEvent('keydown', {key, keyCode: 229, bubbles: true, cancelable: true})"
COMPOSING = "new KeyboardEvent('keydown', {key, isComposing: true, bubbles: true, cancelable: true})"


@pytest.mark.parametrize("event", [SAFARI, COMPOSING])
def test_keys_of_an_input_method_are_its_own(open_page: OpenPage, event: str) -> None:
    """Enter confirms a word, Escape drops it: nothing is sent, stopped, renamed or closed."""

    def press(place: Any, key: str) -> None:
        place.evaluate(f"(place, key) => place.dispatchEvent({event})", key)

    end = Gate()
    with serving(FakeAsyncEngine(lambda prompt, params: ["Half", end])) as url:
        page = open_page(url)
        prompt = page.get_by_label("Message", exact=True)
        prompt.fill("\u4f60")
        press(prompt, "Enter")
        assert page.locator(".message").count() == 0 and prompt.input_value() == "\u4f60"
        prompt.press("Enter")
        expect(answer(page).locator(".body")).to_have_text("Half")
        press(prompt, "Escape")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        end.set()
        wait_until_done(page)
        page.get_by_role("button", name="Edit and send again").click()
        edit = page.get_by_label("Edit the message")
        for key in ("Enter", "Escape"):
            press(edit, key)
        expect(edit).to_be_visible()
        edit.press("Escape")
        expect(edit).to_have_count(0)
        page.get_by_role("button", name="Rename").click()
        name = page.get_by_label("Name", exact=True)
        for key in ("Enter", "Escape"):
            press(name, key)
        expect(name).to_be_focused()
        name.press("Escape")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").focus()
        press(page.get_by_label("System prompt"), "Escape")
        expect(page.get_by_role("complementary")).to_be_visible()
        page.get_by_role("radio", name="Completion").check()
        paper = page.get_by_label("Text to complete")
        paper.fill("x")
        paper.evaluate(
            f"(place, key) => place.dispatchEvent({event.replace('key,', 'key, ctrlKey: true,')})", "Enter"
        )
        expect(page.get_by_role("button", name="Complete")).to_be_visible()
        assert len(page.locator("#paper[readonly]").all()) == 0


def test_escape_closes_the_settings(open_page: OpenPage) -> None:
    end = Gate()
    with serving(FakeAsyncEngine(lambda prompt, params: ["Half ", end, "whole"])) as url:
        page = open_page(url)
        settings, toggle = page.get_by_role("complementary"), page.get_by_role("button", name="Settings")
        toggle.click()
        page.get_by_label("System prompt").fill("Be kind")
        page.keyboard.press("Escape")
        expect(settings).to_be_hidden()
        expect(toggle).to_be_focused()
        toggle.click()
        expect(page.get_by_label("System prompt")).to_have_value("Be kind")
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Escape")
        expect(settings).to_be_hidden()
        # Escape stops an answer, unless the reader is in the settings.
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Half")
        toggle.click()
        page.get_by_label("Top k", exact=True).focus()
        page.keyboard.press("Escape")
        expect(settings).to_be_hidden()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.locator(".term").first.click()
        page.keyboard.press("Escape")  # closes the explanation alone
        expect(page.locator("#explanation")).to_be_hidden()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        toggle.click()
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Escape")
        wait_until_done(page)
        expect(settings).to_be_visible()
        end.set()


#: Hands files to the page by "paste" or "drop", with a text beside them if there is one; true: the browser
#: would do what it does with them by itself.
GIVE = """(place, [kind, files, text]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) data.items.add(new File([content], name, { type }));
  if (text) data.setData("text/plain", text);
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: data })
    : new DragEvent("drop", { ...options, dataTransfer: data });
  return place.dispatchEvent(event);
}"""


def test_why_a_picture_does_not_come(open_page: OpenPage) -> None:
    picture, text = ["shot.png", "image/png", "x"], ["a.txt", "text/plain", "hello"]
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url)
        notice, attached = page.locator("#notice"), page.locator("#attached li")
        for place in ("#prompt", ".bar"):
            for kind in ("paste", "drop"):
                assert not page.locator(place).evaluate(GIVE, [kind, [picture], ""])
                expect(notice).to_contain_text("shot.png is a picture")
                assert not page.locator(place).evaluate(GIVE, [kind, [text, ["b.bin", "", "\0"]], ""])
                expect(notice).to_contain_text("b.bin is no text")
                expect(attached).to_have_count(1)
                page.get_by_role("button", name="Remove a.txt").click()
        # Office programs give a picture of a text beside the text: the text is pasted.
        assert page.locator("#prompt").evaluate(GIVE, ["paste", [picture], "a table"])
        assert page.locator("#prompt").evaluate(GIVE, ["paste", [], "plain"])
        assert not page.locator("#prompt").evaluate(GIVE, ["drop", [["photo.HEIC", "", "x"]], ""])
        expect(notice).to_contain_text("photo.HEIC is a picture")
        page.get_by_role("radio", name="Completion").check()
        for kind in ("paste", "drop"):
            assert not page.locator("#paper").evaluate(GIVE, [kind, [text], ""])
            expect(notice).to_contain_text("Files go with a message of a chat")
            page.get_by_role("button", name="New", exact=True).click()


NODE = {"id": "m1", "parent": None, "role": "user", "content": "Hello"}
ANSWER = {"id": "m2", "parent": "m1", "role": "assistant", "content": "Hi"}


@pytest.mark.inner
@pytest.mark.parametrize(
    ("conversation", "shown"),
    [
        ({"nodes": [NODE, ANSWER | {"figures": {"outputTokens": {}, "tokensPerS": "fast"}}]}, "Hi"),
        ({"nodes": [NODE, ANSWER | {"reasoning": {"a": 1}, "error": ["no"]}]}, "Hi"),
        ({"nodes": [NODE, ANSWER], "settings": {"stop": 7, "temperature": "hot", "system": {}}}, "Hi"),
        ({"nodes": [NODE, ANSWER], "leaf": "toString"}, None),
        ({"nodes": [NODE | {"parent": "constructor"}]}, "nothing was added"),
        ({"nodes": [NODE | {"id": ["m1"]}]}, "nothing was added"),
        ({"nodes": [NODE, ANSWER | {"parent": "m3"}, ANSWER | {"id": "m3"}]}, "nothing was added"),
    ],
)
def test_an_import_can_not_break_the_page(
    open_page: OpenPage, tmp_path: Path, conversation: dict[str, Any], shown: str | None
) -> None:
    file = tmp_path / "export.json"
    made = {"mode": "chat", "title": "Made", "leaf": "m2"} | conversation
    file.write_text(json.dumps({"conversations": [made]}))
    with serving(FakeAsyncEngine()) as url:
        page = open_page(url)
        page.get_by_label("File to import").set_input_files(file)
        if shown == "nothing was added":
            expect(page.locator("#notice")).to_contain_text(shown)
            return
        # A conversation that was chosen is open after a reload, even if the page never came to read it.
        page.evaluate("IDBObjectStore.prototype.get = () => ({})")
        page.get_by_role("button", name="Made", exact=True).click()
        page.reload()
        expect(page.locator("#title")).to_have_text("Made")
        assert page.locator(".message.assistant").count() == (shown is not None)
        say(page, "And you?")
        expect(answer(page).locator(".body")).to_have_text("Hello!")
