"""The chart of docker/, rendered and checked by Helm itself, as a library: the package helm-python-sdk.
Kubernetes' own schemas judge what comes out. Both packages are the extra `chart`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="needs the extra chart: make test EXTRAS=dev,nvrtc,chart")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parent.parent / "docker" / "chart"
Manifests = dict[str, dict[str, Any]]
KUBERNETES = "1.31"
#: Values that bring every template to light.
FULL: dict[str, Any] = {
    "apiKeys": ["one", "two"], "hubToken": "hf_x", "replicaCount": 2, "gpu": {"enabled": True},
    "models": {"existingClaim": "models"}, "settings": {"max-num-seqs": 8}, "metrics": {"annotations": True},
    "autoscaling": {"enabled": True}, "persistence": {"accessModes": ["ReadWriteMany"]},
    "extraEnv": [{"name": "HF_ENDPOINT", "value": "https://hub.example"}],
    "extraVolumes": [{"name": "adapters", "configMap": {"name": "adapters"}}],
    "extraVolumeMounts": [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}],
    "ingress": {
        "enabled": True, "className": "nginx", "hosts": ["a.example", "b.example"],
        "annotations": {"x": "y"}, "tls": [{"secretName": "tls", "hosts": ["a.example"]}],
    },
}  # fmt: skip


def rendered(values: dict[str, Any]) -> Manifests:
    """The manifests by kind, and the notes under "notes"; each manifest is valid by Kubernetes' schema."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="demo", namespace="llm")
    found: Manifests = {}
    for path, text in files.items():
        if path.endswith("NOTES.txt"):
            found["notes"] = {"text": text}
            continue
        for manifest in filter(None, yaml.safe_load_all(text)):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
            found[manifest["kind"]] = manifest
    return found


def container(manifests: Manifests) -> dict[str, Any]:
    [only] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environment(manifests: Manifests) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container(manifests)["env"]}


def test_helm_finds_no_fault() -> None:
    assert helm.lint(str(CHART))["errors"] == []


def test_the_least_values_make_a_server_without_keys() -> None:
    manifests = rendered({})
    assert manifests.keys() == {
        "notes",
        "Deployment",
        "PodDisruptionBudget",
        "PersistentVolumeClaim",
        "Service",
    }
    assert environment(manifests).keys() == {"PENSTOCK_SHUTDOWN_TIMEOUT"}
    assert "There is no API key" in manifests["notes"]["text"]


def test_all_values_arrive() -> None:
    manifests = rendered(FULL)
    assert {"HorizontalPodAutoscaler", "Ingress", "Secret"} <= manifests.keys()
    given = environment(manifests)
    assert given["HF_ENDPOINT"] == "https://hub.example" and given["PENSTOCK_MAX_NUM_SEQS"] == "8"
    assert container(manifests)["image"] == "penstock:cu130"
    assert {"name": "adapters", "mountPath": "/adapters", "readOnly": True} in container(manifests)[
        "volumeMounts"
    ]
    assert FULL["extraVolumes"][0] in manifests["Deployment"]["spec"]["template"]["spec"]["volumes"]


def test_the_ingress_leads_to_the_service() -> None:
    manifests = rendered(FULL)
    ingress, service = manifests["Ingress"], manifests["Service"]
    assert ingress["spec"]["ingressClassName"] == "nginx" and ingress["spec"]["tls"] == FULL["ingress"]["tls"]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == FULL["ingress"]["hosts"]
    for rule in ingress["spec"]["rules"]:
        [path] = rule["http"]["paths"]
        target = path["backend"]["service"]
        assert target["name"] == service["metadata"]["name"]
        assert target["port"]["name"] == service["spec"]["ports"][0]["name"]


@pytest.mark.parametrize(
    ("values", "secret", "asks_for_keys"),
    [
        ({"hubToken": "hf_x"}, {"hf-token": "hf_x"}, False),
        ({"apiKeys": ["one", "two"]}, {"api-keys": "one\ntwo"}, True),
        ({"existingSecret": "mine"}, None, True),
        ({"existingSecret": "mine", "existingSecretHasKeys": False}, None, False),
    ],
)
def test_keys_and_the_hubs_token_need_not_come_together(
    values: dict[str, Any], secret: dict[str, str] | None, asks_for_keys: bool
) -> None:
    manifests = rendered(values)
    data = manifests.get("Secret", {}).get("data")
    decoded = data and {name: base64.b64decode(text).decode() for name, text in data.items()}
    assert decoded == secret
    assert "HF_TOKEN" in environment(manifests)
    assert ("PENSTOCK_API_KEY_FILE" in environment(manifests)) == asks_for_keys
    volumes = {volume["name"] for volume in manifests["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert ("secret" in volumes) == asks_for_keys
    assert ("There is no API key" in manifests["notes"]["text"]) != asks_for_keys


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicaCount": 2}, "ReadWriteOnce"),
        ({"ingress": {"enabled": True}}, "hosts"),
        ({"modle": "x"}, "modle"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        rendered(values)
