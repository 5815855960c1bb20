"""The server's rooms: the door to the engine, what loads without torch, sizes, and tests beside their files.
test_architecture.py has their levels."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from import_graph import ImportGraph

ROOT = Path(__file__).parent.parent
SERVER, TESTS = ROOT / "server" / "penstock_server", ROOT / "tests" / "server"
FILES = sorted(SERVER.rglob("*.py"))
GRAPH = ImportGraph(ROOT / "engine" / "penstock", SERVER)

#: Rooms that may name modules of the engine: the facade, and commands, which are tools over files and plans.
OPEN_ROOMS = ("facade", "commands")
#: What all others may import of it: the names of the package, errors, the config.
OUTSIDE = {
    "penstock",
    "penstock.errors",
    "penstock.config",
    "penstock.goes_with",
    "penstock.kernel_tuning",
    "penstock.metrics",
    "penstock.nodes_config",
}
#: Parts of an engine that only the facade may touch.
INSIDE = {"streamer", "scheduler", "executor", "chooser", "grammars", "block_manager", "meter"}
#: What commands may ask an `engine` of their own; facade/inside.py tells them everything else.
ASKED = {
    *(
        "generate",
        "add",
        "step",
        "abort",
        "close",
        "has_work",
        "tokenizer",
        "config",
        "plan",
        "max_model_len",
        "default_sampling",
        "forms",
        "spec",
    ),
    *("loaded", "wait_until_ready", "wait_until_ended"),  # a ServedEngine
}
#: The APIs of others: each is a translation in front of the chat request, and nobody but the application
#: knows them.
FOREIGN_ROOMS = ("anthropic_api", "ollama_api", "pooling_api")
#: What reads requests and settings, and what --help needs: no torch, whose import takes seconds.
TORCH_FREE_ROOMS = ("settings", "protocol", "tools", "prompts", "middleware")
TORCH_FREE = ("cli", "commands.command_line", "serving.listener")

server_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SERVER)))


def room_of(path: Path) -> str:
    """ "" of the files that lie in no room."""
    return path.relative_to(SERVER).parts[0] if path.parent != SERVER else ""


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@server_file
def test_the_engine_has_one_door(path: Path) -> None:
    if room_of(path) in OPEN_ROOMS:
        return
    found = {node.module or "" for node in nodes(path) if isinstance(node, ast.ImportFrom)}
    assert {name for name in found if name.split(".")[0] == "penstock"} <= OUTSIDE
    assert not any(
        alias.name.split(".")[0] == "penstock"
        for node in nodes(path)
        if isinstance(node, ast.Import)
        for alias in node.names
    )


@server_file
def test_nobody_reaches_into_the_engine(path: Path) -> None:
    if path == SERVER / "facade" / "inside.py":
        return
    assert not {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)} & INSIDE


@pytest.mark.parametrize("path", sorted((SERVER / "commands").glob("*.py")), ids=lambda path: path.name)
def test_commands_ask_an_engine_for_its_outside(path: Path) -> None:
    found = {
        node.attr
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "engine"
    }
    assert found <= ASKED


@pytest.mark.inner
def test_the_engine_is_asked_in_one_place() -> None:
    """AsyncEngine.submit() by the facade, and that by what runs answers; a request is made once."""

    def callers(name: str) -> list[str]:
        return [
            str(path.relative_to(SERVER))
            for path in FILES
            if room_of(path) != "commands"  # which ask an engine of their own
            for node in nodes(path)
            if isinstance(node, ast.Call) and name in ast.unparse(node.func).split(".")
        ]

    assert sorted(set(callers("submit"))) == ["answers/answers.py", "facade/loaded_engine.py"]
    assert [path for path in callers("GenerationRequest") if "inside" not in path] == ["answers/answers.py"]


@server_file
def test_foreign_apis_are_translations(path: Path) -> None:
    """They know neither the engine's requests nor each other, and only api/app.py knows them."""
    found = {node.module or "" for node in nodes(path) if isinstance(node, ast.ImportFrom)}
    known = {name.split(".")[1] for name in found if name.startswith("penstock_server.")} & {*FOREIGN_ROOMS}
    assert known <= {room_of(path)} or path == SERVER / "api" / "app.py"
    if room_of(path) in FOREIGN_ROOMS:
        names = {node.id for node in nodes(path) if isinstance(node, ast.Name)}
        assert not names & {"GenerationRequest", "SamplingParams"}


@pytest.mark.parametrize(
    "module",
    [
        *TORCH_FREE,
        *(
            f"{room_of(path)}.{path.stem}"
            for path in FILES
            if room_of(path) in TORCH_FREE_ROOMS and path.stem != "__init__"
        ),
    ],
)
def test_what_loads_without_torch(module: str) -> None:
    """By no detour either."""
    assert GRAPH.way(f"penstock_server.{module}", "torch") == []


@server_file
def test_nothing_of_the_engine_is_told_by_asdict(path: Path) -> None:
    """Names of the API are types of the server's own; `penstock bench` has its own measurements."""
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes(path)}
    assert "asdict" not in names or path == SERVER / "commands" / "bench_report.py"


@pytest.mark.parametrize("path", sorted(TESTS.glob("*/**/test_*.py")), ids=lambda path: path.name)
def test_tests_lie_as_their_files_do(path: Path) -> None:
    assert (SERVER / path.parent.relative_to(TESTS) / path.name.removeprefix("test_")).is_file()
