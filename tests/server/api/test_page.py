"""The page and its files are served to anyone, under a strict policy; its view of the engine is not."""

from __future__ import annotations

import logging
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock.async_engine import EngineStatus
from penstock.metrics import StepStats, Traffic
from penstock_server.api.page import read_files

from ..conftest import MakeClient

ROOT = Path(__file__).parents[3]
UI = ROOT / "server" / "penstock_server" / "ui"
STATS = "/v1/engine/stats"


def linked(path: Path) -> set[Path]:
    """The files that a file of the page asks for, by any of the ways in which it can."""
    patterns = {
        ".html": r'(?:href|src)="([^"#]+)"',
        ".js": r'(?:from |import\(|new URL\()"(\.{0,2}[\w/]+[^"]+)"(?!, document)',
        ".css": r'url\("([^"]+)"\)',
    }
    base = UI.parent if path.suffix == ".html" else path.parent
    return {base / name for name in re.findall(patterns.get(path.suffix, "(?!)"), path.read_text())}


def test_all_that_the_page_asks_for_is_served(client: TestClient) -> None:
    seen, waiting = set(), {UI / "index.html"}
    while waiting:
        path = waiting.pop().resolve()
        seen.add(path)
        assert client.get(f"/ui/{path.relative_to(UI)}").content == path.read_bytes(), path
        if path.suffix in (".html", ".js", ".css"):
            waiting |= {each.resolve() for each in linked(path)} - seen
    assert len(seen) > 20
    unused = {path for path in UI.rglob("*") if path.is_file()} - seen
    assert {path.suffix for path in unused} <= {".txt"}, "files that nothing asks for"
    assert client.get("/").content == (UI / "index.html").read_bytes()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/ui/main.js", "text/javascript"),
        ("/ui/style.css", "text/css"),
        ("/ui/icon.svg", "image/svg+xml"),
        ("/ui/vendor/barlow-semi-condensed-500.woff2", "font/woff2"),
        ("/ui/vendor/katex.css", "text/css"),
        ("/ui/vendor/KaTeX_Main-Regular.woff2", "font/woff2"),
    ],
)
def test_types_and_policies(client: TestClient, path: str, kind: str) -> None:
    answer = client.get(path)
    assert answer.headers["content-type"].partition(";")[0] == kind
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'self';" in policy
    assert "unsafe" not in policy and "http" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.head(path).headers["content-length"] == str(len(answer.content))


def test_nothing_comes_from_elsewhere() -> None:
    """But for the comments of what others wrote, no file names another host, and none has inline code."""
    for path in UI.glob("*.*"):
        hosts = set(re.findall(r"https?://([\w.]+)", path.read_text()))
        assert hosts <= {"www.w3.org"}, path
    html = (UI / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


def test_a_browser_asks_again_and_gets_only_what_changed(client: TestClient) -> None:
    first = client.get("/ui/main.js")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for sent in (etag, f"W/{etag}", f'"other", {etag}'):
        again = client.get("/ui/main.js", headers={"If-None-Match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.get("/ui/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/ui/style.css").headers["etag"] != etag


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/", "/ui/../app.py", "/ui/%2e%2e/app.py"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_without_the_page_its_paths_are_like_any_other(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(), ui=False)
    for path in ("/", "/ui/main.js"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert client.get("/v1/models").status_code == 200


def test_the_page_needs_no_key_and_the_engines_figures_do(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(), api_key=("secret",))
    assert client.get("/").status_code == client.get("/ui/main.js").status_code == 200
    assert client.get("/ui").status_code == 404
    assert client.get("/uid").status_code == client.get(STATS).status_code == 401
    assert client.get(STATS, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_page_is_no_part_of_the_api(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert STATS in paths and "/" not in paths and not any(path.startswith("/ui") for path in paths)


def test_stats(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    client, metrics = make_client(engine), engine.model.metrics
    idle = client.get(STATS).json()
    assert idle["current_layer"] is None and idle["last_step"] is None and idle["links"] == {}
    metrics.record(StepStats(0.5, 7, 2, 2, 1000, 0.1, 0.3, 0.4))
    engine.model.streamer.current_layer, metrics.num_waiting = 3, 5
    metrics.links["disk"] = Traffic(4000, 0.25)
    now = client.get(STATS).json()
    assert now["time_s"] > idle["time_s"]
    assert (now["current_layer"], now["num_waiting"], now["num_steps"]) == (3, 5, 1)
    assert now["last_step"]["predicted_s"] == 0.4 and now["last_step"]["num_tokens"] == 7
    assert now["links"] == {"disk": {"num_bytes": 4000, "busy_s": 0.25}}


def test_no_stats_before_there_is_an_engine(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    engine.status = EngineStatus("loading", 3, 12)
    answer = make_client(engine).get(STATS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")


def test_who_watches_does_not_fill_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock_server.middleware.request_context")
    client.get(STATS)
    client.get("/v1/models")
    # The test's own client may log as well.
    told = " ".join(record.getMessage() for record in caplog.records if record.name.startswith("penstock"))
    assert STATS not in told and "/v1/models" in told


def test_the_package_brings_all_files() -> None:
    """What pyproject.toml says goes into a wheel is what the folder has."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = UI.parent
    packed = {
        path for pattern in settings["package-data"]["penstock_server"] for path in package.glob(pattern)
    }
    assert {path for path in UI.rglob("*") if path.is_file()} <= packed
    assert set(read_files(files("penstock_server") / "ui")) == {
        str(path.relative_to(UI)) for path in UI.rglob("*") if path.is_file()
    }


def test_other_peoples_work_is_named_with_version_and_licence() -> None:
    notes = (UI / "vendor" / "README.txt").read_text()
    for name in ("marked", "dompurify"):
        version = re.search(r"(\d+\.\d+\.\d+)", (UI / "vendor" / f"{name}.js").read_text()[:300])
        assert version and re.search(rf"^{name}\.js .* {re.escape(version[1])} ", notes, re.MULTILINE)
        assert (UI / "vendor" / f"{name}.LICENSE.txt").exists()
    version = re.search(r'version:"(\d+\.\d+\.\d+)"', (UI / "vendor" / "katex.js").read_text())
    assert version and f" {version[1]} " in notes and (UI / "vendor" / "katex.LICENSE.txt").exists()
