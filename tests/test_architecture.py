"""Who may import whom: a room imports itself and rooms below it. Read from the source by ast."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from import_graph import ImportGraph

ROOT = Path(__file__).parent.parent
#: Lowest first; rooms of one level don't know each other.
LEVELS: list[set[str]] = [
    {"penstock.errors", "penstock.state_layout"},
    {"penstock.goes_with", "penstock.kernel_tuning", "penstock.gguf_file"},
    {"penstock.config", "penstock.nodes_config", "penstock.spec", "penstock.metrics"},
    {"penstock.memory", "penstock.kernels", "penstock.text"},
    {"penstock.cache", "penstock.weights"},
    {"penstock.model"},
    {"penstock.cpm"},  # imported by name alone: model/known_families.py and other tables
    {"penstock.generation", "penstock.unquantized", "penstock.calibration"},
    {"penstock.loader", "penstock.measure", "penstock.calibrate"},
    {"penstock.drafters", "penstock.kv_disk", "penstock.kv_events"},
    {"penstock.nodes"},
    {"penstock.engine_parts"},
    {"penstock.engine", "penstock.request_stream", "penstock.step_watch"},
    {"penstock.engine_thread"},
    {"penstock.async_engine", "penstock.evaluate"},
    {"penstock"},
    {"penstock_server"},  # its version alone
    {"penstock_server.settings", "penstock_server.protocol"},
    {"penstock_server.facade"},
    {"penstock_server.models"},
    {"penstock_server.telemetry", "penstock_server.tools"},
    {"penstock_server.middleware", "penstock_server.prompts"},
    {"penstock_server.answers"},
    {"penstock_server.routing"},
    {"penstock_server.pooling_api"},
    {"penstock_server.anthropic_api", "penstock_server.ollama_api"},
    {"penstock_server.api"},
    {"penstock_server.commands", "penstock_server.serving"},
    {"penstock_server.cli"},
    {"penstock_server.start"},
    {"penstock_server.__main__", "penstock.__main__"},
]
#: Decisions on plain numbers.
PURE = (
    "penstock.config",
    "penstock.goes_with",
    "penstock.kernel_tuning",
    "penstock.spec",
    "penstock.state_layout",
    "penstock.cache.disk.record",
    "penstock.cache.disk.block_order",
    "penstock.cache.disk.piece_numbers",
    "penstock.cache.spill.runs",
    "penstock.memory.planning.splits_in_ram",
    "penstock.memory.planning.budgets",
    "penstock.memory.planning.kv_blocks",
    "penstock.memory.planning.plan",
    "penstock.memory.planning.planner",
    "penstock.memory.planning.cost",
    "penstock.memory.planning.expert_demand",
    "penstock.memory.planning.expert_lanes",
    "penstock.memory.planning.expert_plan",
    "penstock.memory.planning.expert_window",
    "penstock.memory.planning.planned_lanes",
    "penstock.memory.planning.popularity",
    "penstock.memory.planning.product_split",
    "penstock.memory.planning.product_times",
    "penstock.memory.planning.shared_plan",
    "penstock.memory.planning.split_cost",
    "penstock.memory.planning.state_slots",
    "penstock.memory.planning.step_work",
    "penstock.memory.planning.two_lanes",
    "penstock.memory.planning.work",
    "penstock.nodes.cut",
    "penstock.nodes_config",
    "penstock.weights.tiers.expert_policy",
    "penstock.weights.tiers.policies",
    "penstock.weights.tiers.use_counts",
    "penstock.generation.beam_search",
    "penstock.generation.requests.generation_request",
    "penstock.generation.sequence",
    "penstock.step_watch",
    *(
        ".".join(path.relative_to(ROOT / "engine").with_suffix("").parts)
        for folder in ("blocks", "scheduling")
        for path in sorted((ROOT / "engine/penstock/generation" / folder).glob("[!_]*.py"))
    ),
)
OURS = ("penstock", "penstock_server", "penstock_client")


def room_of(module: str) -> str:
    """The room of a dotted module name: "penstock.weights.store" -> "penstock.weights"."""
    return ".".join(module.split(".")[:2])


def level_of(room: str) -> int:
    found = [index for index, rooms in enumerate(LEVELS) if room in rooms]
    assert found, f"{room} is a room that tests/test_architecture.py does not know"
    return found[0]


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path, package: str) -> list[Path]:
    files = sorted((root / package).rglob("*.py"))
    assert files, f"no source under {root / package}"
    return files


ALL = [(path, ROOT / "engine") for path in sources(ROOT / "engine", "penstock")] + [
    (path, ROOT / "server") for path in sources(ROOT / "server", "penstock_server")
]


def test_the_overview_has_the_engines_rooms_in_their_order() -> None:
    """In docs/internals/overview.md `<` stands between two levels."""
    order = re.search(r"^`errors .*?(?=\n\n)", (ROOT / "docs/internals/overview.md").read_text(), re.M | re.S)
    assert order is not None
    told = [set(re.findall(r"\w+", level)) for level in order[0].split("<")]
    own = [{room[len("penstock.") :] for room in level if room.startswith("penstock.")} for level in LEVELS]
    assert told == [level for level in own if level and level != {"__main__"}]


@pytest.mark.parametrize(("path", "root"), ALL, ids=lambda value: str(value.relative_to(ROOT)))
def test_imports_point_downwards(path: Path, root: Path) -> None:
    room = room_of(module_name(path, root))
    for name in imports(path):
        if name.split(".")[0] not in OURS:
            continue
        assert not name.startswith("penstock_client"), f"{path} imports the client"
        other = room_of(name)
        if other != room:
            assert level_of(other) < level_of(room), f"{path}: {room} may not import {other}"


def test_the_client_imports_nothing_of_ours_and_http_in_one_file() -> None:
    http = []
    for path in sources(ROOT / "clients" / "python", "penstock_client"):
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & {"penstock", "penstock_server", "torch"}, path
        if "httpx2" in names:
            http.append(path.name)
    assert http == ["http_library.py"]


@pytest.mark.parametrize("module", PURE)
def test_decisions_import_no_torch(module: str) -> None:
    """Not even by a detour: through another module that does."""
    graph = ImportGraph(ROOT / "engine" / "penstock")
    assert graph.direct(module), "the graph does not know it"
    for library in ("torch", "numpy"):
        assert not graph.way(module, library), " -> ".join(graph.way(module, library))


def test_the_engine_knows_no_feature_by_name() -> None:
    """Its parts are always there: nothing is compared with None but what a step brings, no type is asked for,
    and no room of a feature is imported but for what is told of machines."""
    tree = ast.parse((ROOT / "engine/penstock/engine.py").read_text())
    nodes = list(ast.walk(tree))
    with_none = {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Compare)
        and any(isinstance(each, ast.Constant) and each.value is None for each in node.comparators)
    }
    assert with_none <= {"step is None", "output.error is not None"}
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = {ast.unparse(call) for call in calls if call.func.id in ("isinstance", "hasattr", "getattr")}  # type: ignore[attr-defined]
    assert asked <= {"isinstance(params, SamplingParams)"}
    features = ("drafters", "kv_disk", "kv_events", "nodes")
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    of_features = {name for name in imported if name.split(".")[1:2] and name.split(".")[1] in features}
    assert of_features <= {"penstock.nodes.member"}


#: Classes with more than 12 methods. Less is better: 12 are wanted.
MOST_LARGE_CLASSES = 14


@pytest.mark.inner
def test_large_classes_are_few() -> None:
    """A method is a function of a class that is called by its name: no property, and none of Python's own
    (with two underscores in front)."""

    def is_method(node: ast.stmt) -> bool:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            return False
        return not any("property" in ast.unparse(each) for each in node.decorator_list)

    large = [
        f"{node.name} ({path.name})"
        for path, _ in ALL
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and sum(map(is_method, node.body)) > 12
    ]
    assert len(large) <= MOST_LARGE_CLASSES, large


@pytest.mark.inner
def test_nothing_imports_the_cpm_line() -> None:
    """Tables name its modules, which are imported when a model of the line is opened."""
    own = ROOT / "engine" / "penstock" / "cpm"
    for path, _ in ALL:
        found = [name for name in imports(path) if name.startswith("penstock.cpm")]
        assert not found or own in path.parents, f"{path} imports {found}"


def test_no_drawers() -> None:
    """Names that say nothing about what is inside."""
    names = {path.name for path, _ in ALL}
    assert not names & {"utils.py", "common.py", "helpers.py", "base.py", "manager.py"}


@pytest.mark.parametrize("folder", sorted({path.parent for path, _ in ALL}), ids=lambda path: path.name)
def test_rooms_are_no_halls(folder: Path) -> None:
    """A reader sees what a folder has at one glance."""
    doors = ("__init__.py", "__main__.py")
    names = [path.name for path in folder.glob("*.py") if path.name not in doors]
    assert len(names) <= 25, f"{folder} has {len(names)} files"


@pytest.mark.inner
def test_files_import_each_other_in_no_circle() -> None:
    """Not even late, within functions. What only types name does not count: nothing is loaded for it."""
    files = {module_name(path, root): path for path, root in ALL}
    pending = {name: _loaded(path, files) - {name} for name, path in files.items()}
    while free := {name for name, needs in pending.items() if not needs & pending.keys()}:
        pending = {name: needs for name, needs in pending.items() if name not in free}
    assert not pending, {name: sorted(needs & pending.keys()) for name, needs in pending.items()}


def _loaded(path: Path, files: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, at once or within a function."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    named = {
        alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return {name if name in files else name.rpartition(".")[0] for name in named} & files.keys()
