"""Uses of experts from one start of a model to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_convert import Ids
from test_seams import CONFIG, PROMPTS, open_mixture, write_mixture

from penstock.engine import Engine
from penstock.engine_parts import make_parts
from penstock.generation.requests.generation_request import SamplingParams
from penstock.loader import LoadedModel, begin_reading, plan_on
from penstock.memory import kept_rates, kept_uses
from penstock.memory.host_lane import HostLane
from penstock.spec import UnitKey
from penstock_server.facade.inside import snapshot_of


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = kept_uses.path_of(tmp_path / "cache", tmp_path / "a-model")
    assert kept_uses.read(file) == {}
    uses = {UnitKey("decoder", 1, 3): 2.5, UnitKey("decoder", 0, 0): 1.0, UnitKey("other", 11, 1): 7.25}
    kept_uses.write(file, uses)
    assert kept_uses.read(file) == uses
    assert file != kept_uses.path_of(tmp_path / "cache", tmp_path / "elsewhere" / "a-model")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        assert Path(source).exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    kept_uses.write(tmp_path / "experts" / "uses", {UnitKey("decoder", 0, 0): 1.0})
    kept_rates.write(tmp_path / "rates", {})
    assert [path.name for path in tmp_path.rglob("*")] == ["experts"]


def test_counts_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"format_version": 1, "uses": {"decoder": {"0": [NaN, Infinity, 2.0]}}}')
    assert kept_uses.read(tmp_path / "file") == {UnitKey("decoder", 0, 2): 2.0}


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 9}', '{"format_version": 1, "uses": [1]}'])
def test_a_broken_file_is_no_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    assert kept_uses.read(tmp_path / "file") == {}


def load(folder: Path) -> LoadedModel:
    """The mixture in a folder, with a cache beside it."""
    tokenizer: Any = Ids()
    cache = folder / "cache"
    planned = plan_on(HostLane(), open_mixture(folder / "model"), CONFIG, cache_folder=cache)
    return begin_reading(planned, tokenizer, cache)


def test_experts_that_the_model_lacks_have_no_uses(tmp_path: Path) -> None:
    """The folder may have held another model."""
    write_mixture(tmp_path / "model")
    file = kept_uses.path_of(tmp_path / "cache", tmp_path / "model")
    kept_uses.write(file, {UnitKey("decoder", 99, 0): 5.0, UnitKey("decoder", 0, 99): 5.0})
    with Engine(make_parts(load(tmp_path))) as engine:
        experts = snapshot_of(engine).stats.experts
        assert experts is not None and experts.hot == []


def test_an_engine_goes_on_with_the_uses_of_the_last_one(tmp_path: Path) -> None:
    write_mixture(tmp_path / "model")
    file = kept_uses.path_of(tmp_path / "cache", tmp_path / "model")
    totals = []
    for _ in range(2):
        with Engine(make_parts(load(tmp_path))) as engine:
            engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        totals.append(sum(kept_uses.read(file).values()))
    assert totals[1] == pytest.approx(2 * totals[0], rel=0.1)
