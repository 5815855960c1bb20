"""docker/kubernetes: what the files say is what the server does. The guide says how the files were compared
with the published schemas, which are not here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fakes import FakeAsyncEngine, one_model
from penstock_server.api.app import create_app
from penstock_server.commands.command_line import build_parser
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import make_settings
from penstock_server.telemetry.metrics import RequestMetrics

from .conftest import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
LWS = {"LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "penstock-0.penstock.llm"}


def manifests(name: str) -> dict[str, Any]:
    """By kind; each file has one of a kind."""
    found = [*yaml.safe_load_all((FOLDER / name).read_text())]
    by_kind = {manifest["kind"]: manifest for manifest in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture
def gateway() -> dict[str, Any]:
    return manifests("inference-gateway.yaml")


@pytest.fixture
def group() -> dict[str, Any]:
    found: dict[str, Any] = manifests("leaderworkerset.yaml")["LeaderWorkerSet"]["spec"][
        "leaderWorkerTemplate"
    ]
    return found


def picker_config(gateway: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(gateway["ConfigMap"]["data"]["picker.yaml"])
    return config


def test_the_picker_finds_its_metrics(gateway: dict[str, Any]) -> None:
    """The picker (Go's text parser) takes gauges by name, and numbers from labels of cache_config_info."""
    fake: Any = FakeAsyncEngine()
    fake.model.metrics.num_running, fake.model.metrics.num_waiting = 3, 2
    fake.model.metrics.kv_blocks_used, fake.model.metrics.kv_blocks_total = 5, 20
    fake.model.adapters.by_name = {"poet": None, "clerk": None}
    text = RequestMetrics(one_model(fake)).render().decode()
    [extractor] = [
        each for each in picker_config(gateway)["plugins"] if each["type"] == "core-metrics-extractor"
    ]
    [specs] = extractor["parameters"]["engineConfigs"]
    assert extractor["parameters"]["defaultEngine"] == specs.pop("name")
    samples = {}
    for spec, name in specs.items():
        assert re.search(rf"^# TYPE {name} gauge$", text, re.M), name
        found = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
        [samples[spec]] = found  # of several, the picker would take one by chance
    assert samples["queuedRequestsSpec"].value == 2 and samples["runningRequestsSpec"].value == 3
    assert samples["kvUsageSpec"].value == 0.25
    labels = samples["cacheInfoSpec"].labels
    assert int(labels["block_size"]) == 16 and int(labels["num_gpu_blocks"]) == 20
    adapters = samples["loraSpec"].labels
    assert adapters["running_lora_adapters"] == "clerk,poet" and adapters["waiting_lora_adapters"] == ""
    assert int(adapters["max_lora"]) == 2


def test_without_adapters_there_is_no_series_of_them() -> None:
    """As with vLLM, which the picker knows."""
    fake: Any = FakeAsyncEngine()
    assert b"lora_requests_info" not in RequestMetrics(one_model(fake)).render()


def test_the_pool_has_the_pods_of_the_chart(gateway: dict[str, Any]) -> None:
    pool = gateway["InferencePool"]["spec"]
    names = (ROOT / "docker/chart/templates/_names.tpl").read_text()
    assert pool["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/instance": "llm",
    }
    assert all(label in names for label in pool["selector"]["matchLabels"])
    assert "helm install llm " in (FOLDER / "README.md").read_text()
    assert pool["targetPorts"] == [{"number": Settings.port}]


def test_the_parts_of_the_gateway_find_each_other(gateway: dict[str, Any]) -> None:
    pool, deployment = gateway["InferencePool"], gateway["Deployment"]
    [rule] = gateway["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert gateway["InferenceObjective"]["spec"]["poolRef"]["name"] == pool["metadata"]["name"]
    picker, service = pool["spec"]["endpointPickerRef"], gateway["Service"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] == service["spec"]["ports"][0]["port"]
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    [container] = template["spec"]["containers"]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    assert f"--config-file=/config/{[*gateway['ConfigMap']['data']][0]}" in container["args"]
    account = gateway["ServiceAccount"]["metadata"]["name"]
    assert template["spec"]["serviceAccountName"] == account
    assert [subject["name"] for subject in gateway["RoleBinding"]["subjects"]] == [account]
    config = picker_config(gateway)
    named = {each["type"] for each in config["plugins"]}
    [profile] = config["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} <= named


def understood(pod: dict[str, Any], rank: int) -> Settings:
    """The settings of a pod of the group. Raises ConfigError or SystemExit for what `penstock` refuses."""
    [container] = pod["spec"]["containers"]
    values = {entry["name"]: entry.get("value", "0123456789abcdef") for entry in container["env"]}
    words = build_parser().parse_args(container["args"])
    return make_settings(vars(words), values | LWS | {"LWS_WORKER_INDEX": str(rank)})


def test_the_pods_of_a_group_know_their_ranks(group: dict[str, Any]) -> None:
    leader, worker = understood(group["leaderTemplate"], 0), understood(group["workerTemplate"], 2)
    assert (leader.nodes, leader.rank) == (group["size"], 0) == (3, 0)
    assert worker.rank == 2 and worker.leader.startswith(LWS["LWS_LEADER_ADDRESS"])
    assert leader.model == worker.model and leader.nodes_secret == worker.nodes_secret
    assert leader.nodes_listen.endswith(f":{port_of(group, 'nodes')}") and leader.port == port_of(
        group, "http"
    )


def port_of(group: dict[str, Any], name: str) -> int:
    [container] = group["leaderTemplate"]["spec"]["containers"]
    [port] = [each["containerPort"] for each in container["ports"] if each["name"] == name]
    assert isinstance(port, int)
    return port


def test_the_leader_is_asked_on_routes_that_there_are(group: dict[str, Any]) -> None:
    fake: Any = FakeAsyncEngine()
    routes = create_app(ServedEngine(fake), Settings(model="tiny")).openapi()["paths"]
    [container] = group["leaderTemplate"]["spec"]["containers"]
    probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    assert {probe["path"] for probe in probes.values()} <= set(routes)
    assert probes["livenessProbe"]["path"] == "/health/live"
    assert probes["startupProbe"]["path"] == probes["readinessProbe"]["path"] == "/health/ready"
    labels = group["leaderTemplate"]["metadata"]["labels"]
    service = manifests("leaderworkerset.yaml")["Service"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not any(
        pod["spec"]["enableServiceLinks"] for pod in (group["leaderTemplate"], group["workerTemplate"])
    )
