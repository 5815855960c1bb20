"""What docker/ says is what the server does: flags, paths, metrics, times. Nothing is built or started here;
docker/README.md tells how that was tried."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import importlib.util
import json
import re
import shlex
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fakes import FakeAsyncEngine, one_model
from penstock.metrics import Traffic
from penstock_server.api.app import create_app
from penstock_server.commands.command_line import build_parser
from penstock_server.facade.engine import ServedEngine
from penstock_server.serving.serve import _CLOSE_TIMEOUT_S
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import make_settings, read_environment
from penstock_server.telemetry.metrics import RequestMetrics

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
CHART = DOCKER / "chart"
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))


def read_yaml(path: str) -> Any:
    return yaml.safe_load((DOCKER / path).read_text())


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(arguments: list[str], environ: dict[str, str]) -> Settings:
    """As `penstock` would understand it. Raises ConfigError or SystemExit for what it refuses."""
    return make_settings(vars(build_parser().parse_args(arguments)), environ)


@pytest.fixture
def routes() -> set[str]:
    fake: Any = FakeAsyncEngine()
    return set(create_app(ServedEngine(fake), Settings(model="tiny")).openapi()["paths"])


# -- Dockerfile


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of the Dockerfile, continued lines joined."""
    text = "\n".join(line for line in (DOCKER / "Dockerfile").read_text().split("\n") if line[:1] != "#")
    lines = text.replace("\\\n", " ").split("\n")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line)]


def final_stage() -> dict[str, list[str]]:
    """Instructions of the image itself, by name."""
    found = instructions()
    start = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    stage: dict[str, list[str]] = {}
    for name, rest in found[start:]:
        stage.setdefault(name, []).append(rest)
    return stage


def environment(stage: dict[str, list[str]]) -> dict[str, str]:
    words = (word for line in stage["ENV"] for word in shlex.split(line))
    return dict(word.split("=", 1) for word in words)


def test_the_image_serves_where_it_says() -> None:
    stage = final_stage()
    *init, program = ast.literal_eval(stage["ENTRYPOINT"][0])
    assert (init, program) == (["tini", "--"], "penstock")
    environ = environment(stage)
    settings = settings_of(ast.literal_eval(stage["CMD"][0]), environ)
    assert (settings.model, settings.host) == ("demo", "0.0.0.0")
    assert int(stage["EXPOSE"][0]) == settings.port
    # What is written is on the volume.
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert Path(environ[name]).is_relative_to(ast.literal_eval(stage["VOLUME"][0])[0])


def test_the_image_runs_as_nobody_in_particular_and_has_no_compiler() -> None:
    stage = final_stage()
    user, _, group = stage["USER"][-1].partition(":")
    assert int(user) > 0 and int(group) == 0
    assert stage["FROM"] == ["python"]
    base = [rest for name, rest in instructions() if name in ("FROM", "RUN")][:2]
    assert base[0].endswith("AS python")
    assert not re.search(r"\b(gcc|g\+\+|build-essential|python3-dev)\b", base[1])
    assert not any("apt-get" in line or "pip" in line for line in stage["RUN"])


def test_the_dockerfile_names_no_host() -> None:
    for name, rest in instructions():
        assert "://" not in rest
        if name in ("FROM", "ARG") and "BASE" in rest:
            assert "." not in rest.partition("/")[0] or "/" not in rest


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split("\n") if line.startswith("!")]
    copies = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    sources = [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]
    assert "docker/constraints.txt" in sources and len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in kept), source
    health = ast.literal_eval(final_stage()["HEALTHCHECK"][0].partition("CMD ")[2])[-1]
    assert health in [words[-1] for words in copies]


def test_the_packages_of_setuptools_are_copied() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    copied = {rest.split()[0] for name, rest in instructions() if name == "COPY"}
    assert set(packages.values()) <= copied


@pytest.mark.parametrize(
    ("variant", "cuda", "is_good"),
    [
        ("cpu", None, True), ("cpu", "13.0", False), ("cu126", "12.6", True), ("cu126", "13.0", False),
        ("cu126", None, False), ("cu130", "13.0", True), ("cu130", "12.8", False),
    ],
)  # fmt: skip
def test_a_torch_for_something_else_ends_the_build(variant: str, cuda: str | None, is_good: bool) -> None:
    complaint = script("torch_variant").complaint(variant, "2.13.0", cuda)
    assert (complaint is None) == is_good
    assert is_good or variant in complaint


def test_pip_finds_the_torch_of_a_variant_without_being_told() -> None:
    index_arguments = script("torch_variant").index_arguments
    guides = (ROOT / "docs" / "start.md").read_text() + (DOCKER / "GTX1060.md").read_text()
    for variant in ("cpu", "cu126"):
        [option, url] = index_arguments(variant, "").split()
        assert option == "--index-url" and url.endswith(f"/{variant}") and url in guides
    assert index_arguments("cu130", "") == index_arguments("cpu", "pip") == ""
    assert index_arguments("cpu", "https://mirror/x") == "--index-url https://mirror/x"
    with pytest.raises(SystemExit, match="cu128"):
        index_arguments("cu128", "")


def test_the_image_gets_what_the_project_wants_in_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = next(rest for name, rest in instructions() if name == "ARG" and rest.startswith("EXTRAS="))
    extras = extras.partition("=")[2]
    wanted = script("requirements").requirements(project, extras, "cu126")
    assert set(project["dependencies"]) < set(wanted)
    assert any(each.startswith("nvidia-cuda-nvrtc-cu12") for each in wanted)
    assert not any(
        each.startswith("nvidia") for each in script("requirements").requirements(project, extras, "cpu")
    )
    lines = (DOCKER / "constraints.txt").read_text().lower().replace("_", "-").split("\n")
    pinned = {line.partition("==")[0] for line in lines}
    names = {re.match(r"[\w-]+", each)[0].lower().replace("_", "-") for each in wanted}  # type: ignore[index]
    assert names - pinned == {"torch"}
    with pytest.raises(SystemExit, match="typo"):
        script("requirements").requirements(project, "typo", "cpu")


def test_the_health_check_asks_a_route_that_is_alive_while_it_loads(routes: set[str]) -> None:
    live_url = script("healthcheck").live_url
    assert live_url({}) == f"http://127.0.0.1:{Settings.port}/health/live" and "/health/live" in routes
    environ = {"PENSTOCK_PORT": "81", "PENSTOCK_SSL_CERTFILE": "cert.pem"}
    assert live_url(environ) == "https://127.0.0.1:81/health/live"
    assert read_environment(environ).keys() == {"port", "ssl_certfile"}


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/good" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_health_check_believes_the_status(answering: HTTPServer) -> None:
    url = f"http://127.0.0.1:{answering.server_port}"
    complaint = script("healthcheck").complaint
    assert complaint(url + "/good") is None
    assert "503" in complaint(url + "/bad")
    answering.socket.close()
    assert complaint(url + "/good") is not None


def test_what_the_readme_runs_in_a_container_is_understood() -> None:
    text = (DOCKER / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^docker run .*? penstock:\w+ +([a-z][^#\n]*)", text, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        build_parser().parse_args(shlex.split(command))


# -- compose.yaml


def filled(value: Any) -> Any:
    """With the defaults of variables."""
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each) for each in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


@pytest.fixture(params=["penstock", "gpu"])
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    service: dict[str, Any] = filled(read_yaml("compose.yaml"))["services"][request.param]
    return service


def test_compose_gives_settings_that_are_ones(service: dict[str, Any]) -> None:
    # A variable without a value is passed on from outside, if it is set there.
    inside = {name: value for name, value in service["environment"].items() if value is not None}
    settings = settings_of(service["command"], inside)
    assert settings.model == "demo" and settings.open_metrics and not settings.api_key
    passed_on = service["environment"].keys() - inside.keys()
    assert passed_on == {"PENSTOCK_API_KEY", "HF_TOKEN"}
    assert settings_of(service["command"], inside | {"PENSTOCK_API_KEY": "one,two"}).api_key == ("one", "two")
    assert float(service["stop_grace_period"].rstrip("s")) > settings.shutdown_timeout + _CLOSE_TIMEOUT_S


def test_compose_lets_it_write_to_its_volume_alone(service: dict[str, Any]) -> None:
    [volume] = ast.literal_eval(final_stage()["VOLUME"][0])
    assert service["read_only"] and service["tmpfs"] == ["/tmp"]
    assert f"cache:{volume}" in service["volumes"]


def test_compose_builds_variants_that_exist(service: dict[str, Any]) -> None:
    arguments = {rest.partition("=")[0] for name, rest in instructions() if name == "ARG"}
    assert service["build"]["args"].keys() <= arguments
    variant = service["build"]["args"]["VARIANT"]
    assert variant in script("torch_variant").VARIANTS and service["image"] == f"penstock:{variant}"
    assert service["build"]["args"]["BASE"] == instructions()[0][1].partition("=")[2]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_images_of_others_are_named_by_their_digest() -> None:
    images = {service["image"] for service in read_yaml("compose.yaml")["services"].values()}
    for image in images:
        assert image.startswith("penstock:") or re.search(r":v?[\d.]+@sha256:[0-9a-f]{64}$", image), image


def test_prometheus_asks_the_server_and_grafana_finds_the_dashboard(service: dict[str, Any]) -> None:
    [job] = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    [alias] = service["networks"]["default"]["aliases"]
    assert job["static_configs"] == [{"targets": [f"{alias}:{Settings.port}"]}]
    folder = read_yaml("grafana/provisioning/dashboards/penstock.yaml")["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in read_yaml("compose.yaml")["services"]["grafana"]["volumes"]


# -- metrics


@pytest.fixture
def exported() -> dict[str, set[str]]:
    """The labels of each series that the server exports."""
    engine: Any = FakeAsyncEngine()
    engine.model.metrics.links = {"disk": Traffic()}
    metrics = RequestMetrics(one_model(engine))
    metrics.count_rejected("overloaded")
    metrics.http.observe({"type": "http", "method": "GET", "path": "/"}, 200, 1.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/penstock.json").read_text())
    return loaded


def test_the_dashboard_shows_what_is_exported(exported: dict[str, set[str]]) -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    for query in queries:
        series = re.findall(r"([a-z][\w:]*)\{([^}]*)\}", query)
        assert series, query
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))))
        for name, matchers in series:
            assert name in exported, name
            labels = set(re.findall(r"(\w+)!?[=~]", matchers)) - {"instance"}  # Prometheus' own
            assert labels | grouped <= exported[name], query


def test_the_dashboard_shows_what_only_penstock_has() -> None:
    text = json.dumps(dashboard())
    for name in ("floor_seconds", "stall_seconds", "link_bytes", "link_busy_seconds", "resident_layers"):
        assert f"penstock:{name}" in text


def test_the_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


# -- chart


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return loaded


def test_the_values_match_the_schema() -> None:
    values = read_yaml("chart/values.yaml")
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values, schema())
    for wrong in (
        {"modle": "demo"}, {"model": ""}, {"settings": {"port": 9000}}, {"settings": {"api-key": "k"}},
        {"settings": {"--threads": 2}}, {"apiKeys": ["with space"]}, {"startupSeconds": "1h"},
        {"gpu": values["gpu"] | {"variant": "cpu"}}, {"persistence": {"size": "lots"}},
        {"settings": {"ssl-certfile": "/cert"}}, {"existingSecret": "mine", "apiKeys": ["key"]},
        {"existingSecret": "mine", "hubToken": "hf_x"}, {"extraEnv": [{"value": "no name"}]},
        {"ingress": {"enabled": True, "hosts": []}}, {"extraVolumeMounts": [{"name": "no path"}]},
    ):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | wrong, schema())
    jsonschema.validate(values | {"existingSecret": "mine"}, schema())
    jsonschema.validate(values | {"hubToken": "hf_x"}, schema())
    jsonschema.validate(values | {"ingress": {"enabled": True, "hosts": ["llm.example.org"]}}, schema())


def test_settings_that_the_chart_keeps_for_itself_exist() -> None:
    kept = schema()["properties"]["settings"]["propertyNames"]["not"]["enum"]
    assert {name.replace("-", "_") for name in kept} <= Settings.__dataclass_fields__.keys()


def test_the_templates_use_values_that_there_are() -> None:
    used = set(re.findall(r"\.Values((?:\.\w+)+)", TEMPLATES))
    assert len(used) > 30
    values, described = read_yaml("chart/values.yaml"), schema()
    for path in used:
        value, description = values, described
        for key in path[1:].split("."):
            assert key in value, path
            value, description = value[key], description["properties"][key]
    tops = {path.split(".")[1] for path in used}
    assert tops == values.keys(), "a value that no template reads"


def test_the_templates_give_settings_that_are_ones() -> None:
    names = set(re.findall(r"name: (PENSTOCK_[A-Z_]+)$", TEMPLATES, re.MULTILINE))
    assert {"PENSTOCK_SHUTDOWN_TIMEOUT", "PENSTOCK_API_KEY_FILE", "PENSTOCK_OPEN_METRICS"} <= names
    assert {name[len("PENSTOCK_") :].lower() for name in names} <= Settings.__dataclass_fields__.keys()
    # Kubernetes' own variables of a service "penstock-x" are settings that there are not.
    assert "enableServiceLinks: false" in TEMPLATES


def test_probes_ask_routes_that_there_are(routes: set[str]) -> None:
    probes = dict(re.findall(r"(\w+)Probe:\n\s+httpGet: \{ path: (\S+), port: http \}", TEMPLATES))
    assert probes == {"startup": "/health/ready", "liveness": "/health/live", "readiness": "/health/ready"}
    assert set(probes.values()) <= routes
    assert f"containerPort: {Settings.port}" in TEMPLATES


def test_a_pod_has_time_to_drain() -> None:
    [more] = re.findall(r"terminationGracePeriodSeconds: \{\{ add \.Values\.shutdownTimeout (\d+)", TEMPLATES)
    [pause] = re.findall(r'preStop: .*"sleep", "(\d+)"', TEMPLATES)
    assert int(more) > int(pause) + _CLOSE_TIMEOUT_S


def test_pods_are_counted_by_a_metric_that_is_exported(exported: dict[str, set[str]]) -> None:
    [name] = re.findall(r'metric: \{ name: "(.*)" \}', TEMPLATES)
    assert name in exported


# -- systemd


class Unit(configparser.RawConfigParser):
    """A unit file; of keys that come twice, all values."""

    def __init__(self) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def test_the_unit_starts_and_stops_what_the_server_is() -> None:
    text = (DOCKER / "penstock.service").read_text()
    unit = Unit()
    unit.read_string(text)
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "penstock"
    assert vars(build_parser().parse_args(arguments))["config"] == Path("/etc/penstock/penstock.toml")
    assert (service["Type"], service["TimeoutStartSec"]) == ("notify", "infinity")
    assert int(service["TimeoutStopSec"]) > Settings.shutdown_timeout + _CLOSE_TIMEOUT_S
    environ = dict(
        word.split("=", 1) for line in re.findall("^Environment=(.*)", text, re.M) for word in line.split()
    )
    read_environment(environ)
    # The default of --cache-dir is a folder that the unit may write to.
    assert f"{environ['XDG_CACHE_HOME']}/penstock" == f"/var/cache/{service['CacheDirectory']}"
