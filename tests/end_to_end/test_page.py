"""The web page in a real browser. Over the real server: answers, the machine at work, what is kept. Over a
fake engine, which does what a test tells it when it tells it: everything that goes wrong.

Needs the extra `browser` (playwright) and a Chromium of the system's; skipped where one is missing.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from fakes import FakeAsyncEngine, render_chat
from penstock.async_engine import EngineStatus
from penstock.config import EngineConfig
from penstock.errors import QueueFull, StepFailed
from penstock.memory.cards import find_card
from penstock.memory.cost import predict_step
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.plan import plan_memory
from penstock.metrics import StepStats, Traffic
from penstock.model.shapes import find_shape
from penstock_server.app import create_app
from penstock_server.listener import bind
from penstock_server.plan_report import footprint_of
from penstock_server.settings import Settings

from .server_process import ServerProcess

playwright = pytest.importorskip("playwright.sync_api", reason="the extra 'browser' is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

#: As root there is no sandbox; the rest keeps the browser from calling anybody by itself.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
#: For waits that end when something happens; only a broken page lets one run out.
PATIENCE_MS = 60_000
WIDTHS = (390, 768, 1280, 1920)

Page = Any
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """open_page(url, **options of the browser context). Errors in the page's scripts, and what its policy
    forbade, fail the test."""
    contexts, problems = [], []

    def listen(message: Any) -> None:
        if "Content Security Policy" in message.text or "Trusted" in message.text:
            problems.append(message.text)

    def open_one(url: str, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", listen)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems


@contextmanager
def serving(engine: FakeAsyncEngine, **settings: Any) -> Iterator[str]:
    """The application over a fake engine, on a socket, in a thread; its address."""
    fake: Any = engine
    app = create_app(fake, Settings(**({"model": "tiny"} | settings)))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(autouse=True)
def plain_chat_template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes' tokenizer has no template of its own; the real server is another process."""
    monkeypatch.setattr("penstock_server.inputs.render_chat", render_chat)


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page: Page) -> Any:
    """The last answer."""
    return page.locator(".message.assistant").last


def wait_until_done(page: Page) -> None:
    page.get_by_role("button", name="Send", exact=True).wait_for()


def expect(found: Any) -> Any:
    return playwright.expect(found)


@pytest.fixture(autouse=True)
def patience() -> None:
    playwright.expect.set_options(timeout=PATIENCE_MS)


# -- the real server ----------------------------------------------------------------------------------


def test_an_answer_and_what_it_took(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    say(page, "What is 7 plus 5?")
    wait_until_done(page)
    expect(answer(page).locator(".body")).not_to_be_empty()
    figures = answer(page).locator(".figures").inner_text()
    assert re.search(r"^\d+ tokens? · .*first after [\d.]+ m?s · prompt \d+ tokens", figures)


def test_the_machine_is_shown_as_it_is_planned(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    strip = page.get_by_role("img", name=re.compile("layers"))
    expect(strip).to_have_accessible_name(re.compile(r"^6 layers, 6 in RAM; nothing is streamed"))
    assert page.locator(".cell.host").count() == page.locator(".cell").count() == 6
    say(page, "Tell me a story about a fox.")
    wait_until_done(page)
    tokens = page.locator(".reading", has_text="Tokens/s").locator(".words")
    expect(tokens).to_have_text(re.compile(r"^[1-9][\d,]* since the start"))
    page.get_by_role("button", name="What lies where").click()
    expect(page.get_by_role("region", name="What lies where")).to_contain_text("keys and values")


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


def planned_engine(card: str | None = None) -> FakeAsyncEngine:
    """A fake that claims to be a SOLAR-10.7B planned into 6 GiB on an invented machine."""
    hardware = HardwareProfile(2, 24 << 30, 20 << 30, 40.0, 1500.0, DiskProfile(2.0, 4 << 20, 4, True))
    hardware = replace(hardware, device=find_card(card)) if card else hardware
    config = EngineConfig(host_memory_bytes=6 << 30)
    size = footprint_of(find_shape("solar-10.7b"), config)
    engine = FakeAsyncEngine()
    plan = engine.model.plan = plan_memory(size, hardware, config)
    engine.model.predict = lambda num_tokens, num_sampled: predict_step(
        plan, size, hardware, config, num_tokens, num_sampled
    )
    engine.model.metrics.links["disk"] = Traffic()
    return engine


def test_a_sweep_passes_over_the_layers(open_page: OpenPage) -> None:
    engine = planned_engine()
    plan, metrics = engine.model.plan, engine.model.metrics
    assert plan is not None
    with serving(engine) as url:
        page = open_page(url, reduced_motion="reduce")
        cells = page.locator(".cell")
        expect(cells).to_have_count(48)
        homes = cells.evaluate_all("cells => cells.map(cell => cell.classList.contains('disk'))")
        assert homes == [layer.home == "disk" for layer in plan.layers] and any(homes)
        expect(page.locator(".reading", has_text="Step")).to_contain_text("predicted")
        metrics.record(StepStats(2.0, 1, 1, 1, 10**9, 0.1, 1.2, 1.6))
        metrics.num_running = 1
        for layer in (5, 17):
            engine.model.streamer.current_layer = layer
            expect(page.locator("#caption")).to_have_text(f"Layer {layer + 1} of 48")
            expect(cells.nth(layer)).to_have_class(re.compile("now"))
            expect(page.locator(".cell.done")).to_have_count(layer)
        expect(page.locator("#state")).to_have_text("working")
        expect(page.locator(".reading", has_text="Step")).to_contain_text("predicted 1.60 s, 60% of floor")
        engine.model.streamer.current_layer, metrics.num_running = None, 0
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator(".cell.now")).to_have_count(0)


def test_a_card_has_a_lane_of_its_own(open_page: OpenPage) -> None:
    engine = planned_engine("GTX 1060")
    engine.model.metrics.links["host to device"] = Traffic()
    with serving(engine) as url:
        page = open_page(url)
        expect(page.locator(".lane b")).to_have_text(["Disk", "RAM", "GPU"])
        expect(page.locator(".reading dt")).to_contain_text(["From disk", "To the GPU"])


def test_nobody_asks_while_nobody_looks(open_page: OpenPage) -> None:
    with serving(planned_engine()) as url:
        page = open_page(url)
        expect(page.locator("#state")).to_have_text("ready")
        page.clock.install()
        page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        page.wait_for_load_state("networkidle")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(60_000)
        assert asked == []
        with page.expect_request("**/v1/engine/stats"):
            page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


def test_stopping_keeps_what_came_and_frees_the_sequence(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["Half of ", "it", asyncio.Event()])
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
    generate = engine.generate

    def generate_later(*arguments: Any, **options: Any) -> Any:
        if full:
            raise full.pop()
        return generate(*arguments, **options)

    engine.generate = generate_later  # type: ignore[method-assign]
    with serving(engine) as url:
        page = open_page(url)
        say(page, "Hello")
        expect(page.get_by_role("alert")).to_have_text(re.compile(r"busy. Trying again in \d s"))
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        expect(page.locator("#notice")).to_be_hidden()


def test_loading_is_shown_and_waited_for(open_page: OpenPage) -> None:
    engine = FakeAsyncEngine()
    engine.status = EngineStatus("loading", 3, 12)
    with serving(engine) as url:
        page = open_page(url)
        expect(page.locator("#state")).to_have_text("loading, 3 of 12 layers")
        assert page.locator(".cell.absent").count() == 9
        say(page, "Hello")
        expect(page.locator("#notice")).to_contain_text("3 of 12 layers")
        engine.status = EngineStatus("ready", 12, 12)
        expect(answer(page).locator(".body")).to_have_text("Hello!")


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
    engine = FakeAsyncEngine(lambda prompt, params: ["Hel", asyncio.Event()])
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
        page.locator("input[type=file]").set_input_files(saved)
        page.get_by_role("navigation").get_by_role("button", name="Keep this", exact=True).click()
        expect(answer(page).locator(".body")).to_have_text("Hello!")
        saved.write_text('{"conversations": [{"mode": "chat", "nodes": {"a": {"id": "a", "role": "tool"}}}]}')
        page.locator("input[type=file]").set_input_files(saved)
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
    engine = FakeAsyncEngine(lambda prompt, params: ["Hel", asyncio.Event()])
    with serving(engine) as url:
        page = open_page(url, reduced_motion="reduce")
        say(page, "Hello")
        expect(answer(page).locator(".body")).to_have_text("Hel")
        assert page.evaluate("document.getAnimations().length") == 0
