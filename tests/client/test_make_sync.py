"""The blocking half of the client is what make_sync.py makes of the other half."""

import importlib.util
import shutil
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "clients" / "python"


def test_the_blocking_half_is_made(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_sync", CLIENT / "make_sync.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    package = CLIENT / "penstock_client"
    shutil.copytree(package / "_async", tmp_path / "_async")
    script.make(tmp_path)
    made = {path.name: path.read_text() for path in (tmp_path / "_sync").glob("*.py")}
    assert len(made) > 3
    assert made == {path.name: path.read_text() for path in (package / "_sync").glob("*.py")}
