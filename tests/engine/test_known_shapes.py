"""Names of known shapes; their numbers are compared with transformers in test_shapes.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import ConfigError
from penstock.model.known_shapes import REPOSITORIES, SHAPES, find_shape


def test_a_shape_is_found_by_its_name() -> None:
    assert find_shape("SOLAR-10.7b") is SHAPES["solar-10.7b"]


def test_unknown_shapes_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-5' is not known; known shapes: cpm-1, cpm-2, "):
        find_shape("gpt-5")
    with pytest.raises(ConfigError, match="'cpm-bee' is not planned: Penstock lacks biases.*see cpm-ant"):
        find_shape("cpm-bee")


def test_repositories_are_those_of_shapes() -> None:
    assert set(SHAPES) - set(REPOSITORIES) == {"cpm-2"} and not set(REPOSITORIES) - set(SHAPES)
    assert len(set(REPOSITORIES.values())) == len(REPOSITORIES)


def test_names_are_known_without_torch() -> None:
    """The command line has them in its help, which shall not take seconds."""
    program = "import sys, penstock.model.known_shapes as k; assert k.SHAPES and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
