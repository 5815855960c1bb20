"""The web page with short and long conversations: what a send and a streamed answer cost the browser.

    PYTHONPATH=engine:server:tests python tests/bench/long_conversations.py

Opens conversations of 20 and of 2,000 messages (Markdown with tables, code, formulas) in a headless
Chromium, over the application with a fake engine that streams an answer in pieces. Chromium's own
counters tell the time in scripts and the time of all tasks of the page's thread (scripts, style, layout,
painting), from the key that sends until the answer is complete. The times must not grow with the
conversation; the request has all messages, so that some microseconds for each remain. Needs the extra
`browser` and Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from end_to_end.browser import CHROMIUM, FLAGS, serving
from fakes import FakeAsyncEngine, FakeModel

PARAGRAPH = (
    "A penstock is a pipe with **pressure** in it, see `pipe()` and \\(p = \\rho g h\\).\n\n"
    "| part | is |\n|:--|--:|\n| pipe | 3 m |\n\n```python\nfor layer in layers:\n    run(layer)\n```\n\n"
    "- water\n- turns\n\n\\[ P = \\eta \\rho g h Q \\]\n"
)


def conversation(num_messages: int) -> dict[str, Any]:
    nodes, parent = {}, None
    for index in range(num_messages):
        role = "assistant" if index % 2 else "user"
        content = f"{index}. {PARAGRAPH}" if index % 2 else f"Question {index}?"
        figures = {"finish": "stop", "promptTokens": 100 * index, "outputTokens": 100}
        nodes[f"m{index}"] = {
            "id": f"m{index}", "parent": parent, "role": role, "content": content, "figures": figures
        }  # fmt: skip
        parent = f"m{index}"
    return {"mode": "chat", "title": f"{num_messages} messages", "nodes": nodes, "leaf": parent}


class Pause:
    """Between pieces, so that they do not all come with one frame."""

    async def wait(self) -> None:
        await asyncio.sleep(0.01)


class Opened:
    """A page with a conversation, and the browser's counters."""

    def __init__(self, browser: Any, url: str, num_messages: int) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 800})
        self.page.goto(url)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "export.json"
            file.write_text(json.dumps({"conversations": [conversation(num_messages)]}))
            self.page.locator("input[accept*=json]").set_input_files(file)
            self.page.get_by_role("button", name=f"{num_messages} messages", exact=True).click()
        self.page.locator(".message .katex").last.wait_for()
        self._session = self.page.context.new_cdp_session(self.page)
        self._session.send("Performance.enable")

    def counters(self) -> dict[str, float]:
        found = self._session.send("Performance.getMetrics")["metrics"]
        return {each["name"]: each["value"] for each in found}

    def send(self) -> dict[str, float]:
        """Milliseconds by kind, of a send and its answer."""
        self.page.wait_for_timeout(500)
        before = self.counters()
        self.page.locator("#prompt").fill("And now?")
        self.page.keyboard.press("Enter")
        self.page.locator("#stop").wait_for()
        self.page.locator("#send").wait_for()
        after = self.counters()
        return {
            "script": 1000 * (after["ScriptDuration"] - before["ScriptDuration"]),
            "layout": 1000 * (after["LayoutDuration"] - before["LayoutDuration"]),
            "task": 1000 * (after["TaskDuration"] - before["TaskDuration"]),
        }


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, nargs="+", default=[20, 2000])
    parser.add_argument("--pieces", type=int, default=200, help="of the streamed answer")
    parser.add_argument("--rounds", type=int, default=5, help="sends; the median counts")
    args = parser.parse_args()
    size = len(2 * PARAGRAPH) // args.pieces + 1
    pieces = [(2 * PARAGRAPH)[at : at + size] for at in range(0, len(2 * PARAGRAPH), size)]
    script = [item for piece in pieces for item in (piece, Pause())]
    engine = FakeAsyncEngine(lambda prompt, params: script, FakeModel(max_model_len=10**8))
    with serving(engine) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        pages = {number: Opened(browser, url, number) for number in args.messages}
        # By turns, so that what else the machine does meets all.
        rounds = [{number: page.send() for number, page in pages.items()} for _ in range(args.rounds + 1)][1:]
        medians = {
            number: {
                kind: statistics.median(each[number][kind] for each in rounds) for kind in rounds[0][number]
            }
            for number in pages
        }
        first = medians[args.messages[0]]
        print(f"{'messages':>9} {'script':>10} {'layout':>10} {'all tasks':>10}   script, of the first")
        for number, found in medians.items():
            print(
                f"{number:9,} {found['script']:7.0f} ms {found['layout']:7.0f} ms {found['task']:7.0f} ms"
                f"   {found['script'] / first['script']:.2f}"
            )
        browser.close()


if __name__ == "__main__":
    main()
