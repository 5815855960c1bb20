"""The table of well-known models: what it says, and that the documentation has it."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.memory.hardware import HardwareProfile
from penstock.model.known_shapes import REPOSITORIES, SHAPES
from penstock_server import cli
from penstock_server.commands.planning.footprints import footprint_of
from penstock_server.commands.planning.model_table import (
    GIB,
    MACHINES,
    NO_ROOM,
    _least_ram,
    with_defaults,
)
from penstock_server.facade.needs import estimated_plan

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main(["plan", "--table"]) == 0
    return output.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


@pytest.mark.slow
@pytest.mark.slow
def test_every_model_has_its_line(lines: list[str]) -> None:
    rows = [cells(line) for line in lines[2:]]
    assert [row[1] for row in rows] == list(SHAPES)
    assert {row[0] for row in rows} >= set(REPOSITORIES.values())
    assert {len(row) for row in rows} == {len(cells(lines[0]))} == {4 + len(MACHINES)}
    # A byte for each parameter; scales, norms and GPT-2's positions have four.
    sizes = {row[1]: row[2] for row in rows}
    assert sizes["cpm-1"] == "2.7 GB" and sizes["solar-10.7b"] == "10.7 GB" and sizes["cpm-2"] == "11.1 GB"


@pytest.mark.slow
def test_a_faster_machine_is_faster_and_more_sequences_get_more(lines: list[str]) -> None:
    for line in lines[2:]:
        rates = [cell.split(" / ") for cell in cells(line)[4:] if cell != NO_ROOM]
        assert rates, line
        for alone, together in rates:
            assert float(together) >= float(alone) > 0
        assert [float(alone) for alone, _ in rates] == sorted(float(alone) for alone, _ in rates)


def test_the_least_ram_is_what_serves() -> None:
    """Found by the planner: a tenth of a GiB less is refused, and the tenth is enough for a sequence of the
    usual length. Mixtures need no room for all experts."""
    config = with_defaults(EngineConfig())
    endless = HardwareProfile(4, 1 << 50, 1 << 50, 0.0, 0.0)
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "lfm2-1.2b", "llama-3-8b"):
        size = footprint_of(SHAPES[name], config)
        least = float(_least_ram(size, config).removesuffix(" GiB"))
        plan = estimated_plan(size, endless, replace(config, host_memory_bytes=int(least * GIB)))
        assert plan.num_kv_tokens >= 2048 and plan.host_used_bytes <= int(least * GIB)
        with pytest.raises(CapacityError):
            less = int((least - 0.1) * GIB)
            estimated_plan(size, endless, replace(config, host_memory_bytes=less))
        assert least < 6


@pytest.mark.slow
def test_a_card_makes_each_model_faster(lines: list[str]) -> None:
    """The table's machines have the same processor."""
    for name in ("lfm2-1.2b", "tinyllama-1.1b"):
        (row,) = (cells(line) for line in lines if f"| {name} |" in line)
        assert len(set(row[4:])) == len(MACHINES)


def rows_of(page: str) -> list[str]:
    names = "|".join(map(re.escape, SHAPES))
    return re.findall(rf"^\|.*\| (?:{names}) \|.*\|$", (ROOT / page).read_text(), re.MULTILINE)


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_prints(lines: list[str]) -> None:
    page = "docs/which-model.md"
    assert rows_of(page) == lines[2:], f"put the lines of `penstock plan --table` into {page}"
    assert "\n".join(lines) in (ROOT / page).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_has_some_of_its_rows(name: str, lines: list[str]) -> None:
    rows = rows_of(name)
    assert len(rows) == 6 and not set(rows) - set(lines)


def test_the_table_is_of_all_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--table", "--card", "T4", "owner/name"]) == 2
    assert "leave out MODEL and --card" in capsys.readouterr().err
