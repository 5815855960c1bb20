"""What pip installs: one name everywhere, extras that exist, wheels for any Python, and the workflow that
publishes them. Nothing is built here."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock_server
from penstock.kernels.cpu_builds import _library_path, compiled_builds

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
TEXTS = [
    path
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    if (path := ROOT / name).suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".txt")
    or path.name == "Makefile"
]


def said(pattern: str) -> list[tuple[str, str]]:
    """(file, first group) of what the repository's texts say."""
    return [
        (path.name, found)
        for path in TEXTS
        if path.is_file() and path != Path(__file__)
        for found in re.findall(pattern, path.read_text())
    ]


def test_the_name_is_said_as_it_is() -> None:
    assert PROJECT["name"] == "penstock-llm"
    client = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text())["project"]["name"]
    installed = [name for _, name in said(r"pip install '?(penstock[\w-]*)")]
    assert set(installed) == {PROJECT["name"], client}


def test_every_extra_that_is_advised_exists() -> None:
    extras = said(r"penstock(?:-llm)?\\?\[([a-z,]+)\\?\]")
    assert len(extras) > 5
    for file, names in extras:
        assert set(names.split(",")) <= PROJECT["optional-dependencies"].keys(), file
    assert not said(r"(?<![\w.])(penstock\\?\[(?:cpm|nvrtc|otel|events))")


def test_the_version_is_that_of_the_distribution() -> None:
    try:
        version = metadata.version(PROJECT["name"])
    except metadata.PackageNotFoundError:
        pytest.skip("penstock-llm is not installed")
    assert penstock_server.__version__ == version


@pytest.mark.skipif(not compiled_builds(), reason="no kernels were compiled here")
def test_kernels_call_nothing_of_pythons() -> None:
    """One wheel serves every Python from requires-python on (setup.py names it py3-none)."""
    for name in compiled_builds():
        path = _library_path(name)
        assert path is not None and not re.search(rb"\0_?Py[A-Z_]\w+\0", path.read_bytes()), path


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    return loaded


def test_only_publishing_may_ask_for_a_token() -> None:
    jobs = workflow()["jobs"]
    assert workflow()["permissions"] == {"contents": "read"}
    asking = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert asking == {"publish"} and set(jobs["publish"]["needs"]) == jobs.keys() - asking
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_a_published_wheel_has_every_kernel_and_is_tried() -> None:
    build = PYPROJECT["tool"]["cibuildwheel"]
    assert build["environment"]["PENSTOCK_ALL_KERNELS"] == "1"
    assert "PENSTOCK_ALL_KERNELS" in (ROOT / "setup.py").read_text()
    assert build["test-command"].startswith("penstock ")
    oldest = PROJECT["requires-python"].removeprefix(">=").replace(".", "")
    assert build["build"] == f"cp{oldest}-*"


def test_make_removes_the_former_names_before_it_installs() -> None:
    """Uninstalling them afterwards would take the command `penstock` away."""
    plan = subprocess.run(
        ["make", "-n", "VENV=/nowhere", "install"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    removal = plan.index("pip uninstall -qq --yes penstock penstock-client")
    assert removal < plan.index("-e '.[")
