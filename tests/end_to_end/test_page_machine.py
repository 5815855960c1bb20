"""The page's view of the machine at work, in a real browser: over the real server, and over a fake engine
with a plan of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fakes import FakeAsyncEngine
from penstock.config import EngineConfig
from penstock.engine_thread import EngineStatus
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.planner import plan_memory
from penstock.metrics import KVDiskReads, KVDiskStats, StepStats, Traffic
from penstock.model.known_shapes import find_shape
from penstock.nodes.member import NodeStatus
from penstock_server.commands.planning.footprints import footprint_of
from server.models.pools import Fakes

from .browser import OpenPage, answer, expect, say, serving, wait_until_done
from .server_process import ServerProcess


def planned_engine(
    card: str | None = None, shape: str = "solar-10.7b", kv_host_bytes: int | None = None
) -> FakeAsyncEngine:
    """A fake that claims to be a model of that shape planned into 6 GiB on an invented machine."""
    hardware = HardwareProfile(2, 24 << 30, 20 << 30, 40.0, 1500.0, DiskProfile(2.0, 4 << 20, 4, True))
    hardware = replace(hardware, device=find_card(card)) if card else hardware
    config = EngineConfig(host_memory_bytes=6 << 30, kv_host_bytes=kv_host_bytes)
    size = footprint_of(find_shape(shape), config)
    engine = FakeAsyncEngine()
    plan = engine.model.plan = plan_memory(size, hardware, config)
    engine.model.meter.predict = lambda load: predict_step(plan, size, hardware, config, load)
    engine.model.metrics.links["disk"] = Traffic()
    return engine


@pytest.mark.inner
def test_the_machine_is_shown_as_it_is_planned(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    strip = page.get_by_role("img", name=re.compile("layers"))
    expect(strip).to_have_accessible_name(re.compile(r"^6 layers, 3 on disk, 3 in RAM; .* are streamed"))
    assert page.locator(".cell.streamed").count() == page.locator(".cell.host").count() == 3
    say(page, "Tell me a story about a fox.")
    wait_until_done(page)
    tokens = page.locator(".reading", has_text="Tokens/s").locator(".words")
    expect(tokens).to_have_text(re.compile(r"^[1-9][\d,]* tokens since the start"))
    page.get_by_role("button", name="What lies where").click()
    expect(page.get_by_role("region", name="What lies where")).to_contain_text("keys and values")


def test_what_came_from_disk_is_shown(open_page: OpenPage) -> None:
    engine = planned_engine()
    reads = KVDiskReads(num_blocks=3, num_tokens=4800, read_s=0.5, saved_s=75.0)
    engine.model.metrics.kv_disk = KVDiskStats(limit_bytes=1 << 30, num_bytes=1 << 28, reads=reads)
    with serving(engine) as url:
        kept = open_page(url).locator(".reading", has_text="Tokens from disk")
        expect(kept).to_contain_text("4,800")
        expect(kept).to_contain_text(re.compile("75.* s saved; .* kept"))


def test_what_came_from_ram_is_shown(open_page: OpenPage) -> None:
    engine = planned_engine(card="RTX 3060 12GB", kv_host_bytes=1 << 30)
    reads = KVDiskReads(num_blocks=3, num_tokens=4800, read_s=0.5, saved_s=75.0)
    engine.model.metrics.kv_host = KVDiskStats(limit_bytes=1 << 30, num_bytes=1 << 28, reads=reads)
    with serving(engine) as url:
        page = open_page(url)
        kept = page.locator(".reading", has_text="Tokens from RAM")
        expect(kept).to_contain_text("4,800")
        expect(kept).to_contain_text(re.compile("75.* s saved; .* kept"))
        expect(page.locator(".reading", has_text="Tokens from disk")).to_have_count(0)
        page.get_by_role("button", name="What lies where").click()
        row = page.get_by_role("row", name=re.compile("keys and values RAM"))
        expect(row).to_contain_text("kept for texts that come again")


def test_a_sweep_passes_over_the_layers(open_page: OpenPage) -> None:
    engine = planned_engine()
    plan, metrics = engine.model.plan, engine.model.metrics
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


def test_guesses_are_shown(open_page: OpenPage) -> None:
    engine = planned_engine()
    engine.model.meter.known_s = lambda num_tokens: 1 + 0.01 * num_tokens
    metrics = engine.model.metrics
    with serving(engine) as url:
        page = open_page(url)
        reading = page.locator(".reading", has_text="Guesses accepted")
        expect(reading).to_contain_text("none yet")
        metrics.record(StepStats(2.0, 9, 1, 4, 10**9, 0.1, 1.2, 1.6, num_drafts=8, num_right_drafts=3))
        metrics.record_chain(3)
        expect(reading).to_contain_text("38%")
        expect(reading).to_contain_text("4.0 tokens a step where guessed")
        expect(reading).to_contain_text("since the start 3 accepted, 5 rejected")
        page.get_by_role("button", name="What lies where").click()
        plan = page.get_by_role("region", name="What lies where")
        expect(plan).to_contain_text("Guesses (a quotation)")


def test_a_card_that_shares_each_layer_with_the_processor(open_page: OpenPage) -> None:
    engine = planned_engine("GTX 1060")
    engine.model.metrics.links["host to device"] = Traffic()
    with serving(engine) as url:
        page = open_page(url)
        name = re.compile(r"^48 layers, \d\d% of each on the GPU; a part of the other .* is streamed")
        expect(page.get_by_role("img", name=re.compile("layers"))).to_have_accessible_name(name)
        # The link's rate on the data sheet: what the processor computes does not come over the link.
        expect(page.locator(".reading", has_text="To the GPU")).to_contain_text("of 12.0 GB/s measured")


def test_a_card_has_a_lane_of_its_own(open_page: OpenPage) -> None:
    engine = planned_engine("GTX 1060", "llama-2-13b")  # does not fit into card and RAM together
    engine.model.metrics.links["host to device"] = Traffic()
    with serving(engine) as url:
        page = open_page(url)
        expect(page.locator(".lane b")).to_have_text(["Disk", "RAM", "GPU"])
        expect(page.locator(".reading dt")).to_contain_text(["From disk", "To the GPU"])


def test_an_encoder_is_counted_as_a_reader_counts_it(open_page: OpenPage) -> None:
    with serving(planned_engine(shape="cpm-2")) as url:
        page = open_page(url)
        strip = page.get_by_role("img", name=re.compile("layers"))
        expect(strip).to_have_accessible_name(re.compile("^48 layers, 24 cross-attention projections, "))
        page.get_by_role("button", name="What lies where").click()
        region = page.get_by_role("region", name="What lies where")
        expect(region).to_contain_text("24 encoder layers")
        expect(region).to_contain_text("24 cross-attention projections")


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
        with page.expect_request("**/v1/engine/stats?model=tiny"):
            page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


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


@pytest.mark.parametrize("card", [None, "GTX 1060"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_moves_when_the_plan_comes(open_page: OpenPage, width: int, card: str | None) -> None:
    engine = planned_engine(card)
    if card:
        engine.model.metrics.links["host to device"] = Traffic()
    engine.status = EngineStatus("loading", 0, 0)
    with serving(engine) as url:
        page = open_page(url, viewport={"width": width, "height": 844}, reduced_motion="reduce")
        top = "document.querySelector('.work').getBoundingClientRect().top"
        expect(page.locator("#caption")).to_have_text("Loading")
        page.evaluate("document.fonts.ready")
        before = page.evaluate(top)
        engine.status = EngineStatus("ready", 48, 48)
        expect(page.locator(".reading", has_text="Step")).to_contain_text("predicted")
        assert page.evaluate(top) == before
        engine.model.metrics.num_running, engine.model.streamer.current_layer = 1, 3
        expect(page.locator("#caption")).to_have_text("Layer 4 of 48")
        assert page.evaluate(top) == before


@pytest.mark.parametrize(("width", "locale"), [(390, "zh"), (768, "en"), (1024, "en"), (1024, "zh")])
def test_nothing_moves_while_an_answer_streams(open_page: OpenPage, width: int, locale: str) -> None:
    engine = planned_engine("GTX 1060")
    metrics = engine.model.metrics
    metrics.links["host to device"] = Traffic()
    metrics.record(StepStats(0.5, 1, 1, 1, 10**9, 0.1, 0.2, 0.4))
    with serving(engine) as url:
        page = open_page(
            url, viewport={"width": width, "height": 844}, locale=locale, reduced_motion="reduce"
        )
        if width < 640:
            page.locator("#machine-toggle").click()
        step = page.locator(".reading b").nth(1)
        expect(step).to_have_text("500 ms")
        page.evaluate("document.fonts.ready")
        tops = {page.evaluate("document.querySelector('.work').getBoundingClientRect().top")}
        for duration, tokens, layer in ((55.5, 2048, 3), (0.009, 1, 40), (1.23, 33, None)):
            metrics.num_running, engine.model.streamer.current_layer = int(layer is not None), layer
            metrics.record(StepStats(duration, tokens, 1, 1, 10**9, 0.1, duration / 2, duration / 3))
            for link in metrics.links.values():
                link.num_bytes += 10**9
            expect(step).to_have_text({55.5: "55.5 s", 0.009: "9.0 ms", 1.23: "1.23 s"}[duration])
            tops.add(page.evaluate("document.querySelector('.work').getBoundingClientRect().top"))
        assert len(tops) == 1, tops


def test_the_panel_folds_and_stays_folded(open_page: OpenPage) -> None:
    with serving(planned_engine()) as url:
        page = open_page(url)
        toggle, strip = page.get_by_role("button", name="Machine", exact=True), page.locator("#strip")
        expect(toggle).to_have_attribute("aria-expanded", "true")
        expect(strip).to_be_visible()
        toggle.click()
        expect(strip).to_be_hidden()
        page.reload()
        expect(page.locator("#caption")).to_contain_text("48 layers")
        expect(toggle).to_have_attribute("aria-expanded", "false")
        expect(strip).to_be_hidden()


def test_on_a_phone_the_machine_is_a_line_until_touched(open_page: OpenPage) -> None:
    with serving(planned_engine()) as url:
        page = open_page(url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        caption = page.locator("#caption")
        expect(caption).to_contain_text("48 layers")
        box = page.locator("#machine").bounding_box()
        assert box is not None and box["height"] < 50
        expect(page.locator("#model b")).to_have_text("tiny")
        caption.tap()  # the whole line is touched, not its button alone
        expect(page.locator("#strip")).to_be_visible()
        # A panel lies over the machine, and a touch beside the panel closes it.
        page.get_by_role("button", name="Conversations").tap()
        assert page.evaluate("document.elementFromPoint(60, 120).closest('#list') !== null")
        page.touchscreen.tap(370, 400)
        expect(page.get_by_role("navigation")).to_be_hidden()


@pytest.mark.parametrize(("locale", "word", "meaning"), [("en", "sweep", "One pass"), ("zh", "一遍", "依次")])
def test_words_explain_themselves(open_page: OpenPage, locale: str, word: str, meaning: str) -> None:
    with serving(planned_engine()) as url:
        page = open_page(url, locale=locale)
        explanation = page.locator("#explanation")
        expect(explanation).to_be_hidden()
        page.locator("#caption .term", has_text=word).click()
        expect(explanation).to_contain_text(meaning)
        page.keyboard.press("Escape")
        expect(explanation).to_be_hidden()


def test_a_short_step_is_not_compared_with_its_floor(open_page: OpenPage) -> None:
    engine = planned_engine()
    with serving(engine) as url:
        page = open_page(url)
        step = page.locator(".reading", has_text="Step")
        engine.model.metrics.record(StepStats(0.009, 1, 1, 1, 10**6, 0.0, 0.001, 0.001))
        expect(step).to_contain_text("9.0 ms")
        expect(step.locator(".words")).to_have_text("predicted 1.0 ms")


def test_what_lies_where_is_closed_when_the_server_is_gone(open_page: OpenPage) -> None:
    engine = planned_engine()
    with serving(engine) as url:
        page = open_page(url)
        page.get_by_role("button", name="What lies where").click()
        engine.status = EngineStatus("dead", 0, 0, "it died")
        expect(page.locator("#state")).to_have_text("not ready")
        engine.status = EngineStatus("ready", 48, 48)
        toggle = page.get_by_role("button", name="What lies where")
        expect(toggle).to_have_attribute("aria-expanded", "false")
        expect(page.get_by_role("region", name="What lies where")).to_have_count(0)


def test_the_machine_of_the_model_that_was_chosen(open_page: OpenPage) -> None:
    with serving(Fakes().pool("a", "b")) as url:
        page = open_page(url)
        state = page.locator("#state")
        expect(state).to_have_text("ready")
        with page.expect_request("**/v1/plan?model=b"):
            page.locator("#model-choice").select_option("b")
        expect(state).to_have_text("not loaded; a question loads it")
        say(page, "Hello")
        wait_until_done(page)
        expect(state).to_have_text("ready")
        with page.expect_request("**/v1/engine/stats?model=b"):
            pass


def test_several_machines(open_page: OpenPage) -> None:
    """What each has and takes, also before anything is computed; who is away, and for how long."""
    engine = planned_engine()
    own = NodeStatus(0, "", "ready", "", (0, 30), 30, 5 << 30, 6 << 30, 30, True, 0, 0.0, 0, None, 0.075)
    other = NodeStatus(
        1, "10.0.0.2:5", "ready", "", (30, 48), 18, 3 << 30, 4 << 30, 18, True, 0, 0.0, 0, None, 0.025
    )
    engine.model.nodes = (own, other)
    with serving(engine) as url:
        page = open_page(url)
        first, second = (page.locator(".reading", has_text=f"Machine {rank}") for rank in (0, 1))
        expect(page.locator("#caption")).to_have_text(re.compile("^Machine 0: 48 layers"))
        expect(first).to_contain_text("75%")
        expect(first).to_contain_text("of a step, 75 ms; layers 1 to 30, 5.00 GiB of 6.00 GiB")
        expect(second).to_contain_text("25%")
        expect(second).to_contain_text("layers 31 to 48, 3.00 GiB of 4.00 GiB")
        engine.model.nodes = replace(own, num_steps=10, busy_s=0.5), replace(other, num_steps=10, busy_s=0.5)
        expect(second).to_contain_text("50%")
        engine.model.nodes = own, replace(other, state="away", away_s=12.0)
        expect(second).to_contain_text("away, 12.0 s")
        expect(page.locator("#state")).to_have_text("waits for machine 1")
        page.reload()  # probes say 503 meanwhile, and the page is there
        expect(second).to_contain_text("away, 12.0 s")
        engine.model.nodes = own, replace(other, state="loading")
        expect(second).to_contain_text("reading")
        engine.model.nodes = own, replace(other, state="failed", reason="rank 1 has no room")
        expect(second).to_contain_text("rank 1 has no room")
        engine.model.nodes = own, other
        expect(page.locator("#state")).to_have_text("ready")
