"""The package as a whole: what it exports, and who may import the HTTP library."""

import ast
from pathlib import Path

import penstock_client

PACKAGE = Path(penstock_client.__file__).parent


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def test_everything_promised_exists():
    assert [name for name in penstock_client.__all__ if not hasattr(penstock_client, name)] == []
    assert len(set(penstock_client.__all__)) == len(penstock_client.__all__)


def test_one_file_alone_imports_the_http_library():
    libraries = ("httpx2", "httpcore2", "httpx", "http", "urllib3", "requests", "aiohttp", "socket")
    importers = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for module in imported_modules(path)
        if module.split(".")[0] in libraries
    }
    assert importers == {"http_library.py"}


def test_nothing_else_of_penstock_is_imported():
    roots = {module.split(".")[0] for path in PACKAGE.rglob("*.py") for module in imported_modules(path)}
    assert {root for root in roots if root.startswith("penstock")} == {"penstock_client"}


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()
