"""Which module leads to which when it is imported, and by what detours. Read from the source by ast: nothing
of it is run.

An import within a function does not count, and one for the type checker neither: they load nothing.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path


class ImportGraph:
    def __init__(self, *packages: Path) -> None:
        """packages: folders that hold an __init__.py."""
        self._files: dict[str, Path] = {}
        for package in packages:
            for path in package.rglob("*.py"):
                parts = path.relative_to(package.parent).with_suffix("").parts
                self._files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._homes = {name: dict(_homes(path)) for name, path in self._files.items() if "." not in name}

    @cache  # noqa: B019  a graph lives as long as the tests
    def direct(self, module: str) -> frozenset[str]:
        """What importing `module` imports itself: modules of the packages by their whole names, of others the
        first part; and the packages that it lies in."""
        path = self._files.get(module)
        if path is None:
            return frozenset()
        found = {
            name for node in _run_at_import(ast.parse(path.read_text()).body) for name in self._named(node)
        }
        parents = module.split(".")[:-1]
        found |= {".".join(parents[:length]) for length in range(1, len(parents) + 1)}
        return frozenset(found - {module})

    def _named(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (self._known(alias.name) for alias in node.names)
            return
        module = node.module or ""
        for alias in node.names:
            whole = f"{module}.{alias.name}"
            home = self._homes.get(module, {}).get(alias.name, module)
            yield whole if whole in self._files else self._known(home)

    def _known(self, name: str) -> str:
        return name if name in self._files else name.partition(".")[0]

    def way(self, module: str, target: str) -> list[str]:
        """The shortest way by which importing `module` imports `target`; [] if it does not."""
        before: dict[str, str] = {}
        pending = deque([module])
        while pending:
            here = pending.popleft()
            for name in sorted(self.direct(here) - before.keys() - {module}):
                before[name] = here
                if name == target:
                    return _back(before, module, target)
                pending.append(name)
        return []


def _run_at_import(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _run_at_import(node.orelse)
            case _:
                inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
                yield from _run_at_import(inner)


def _homes(init: Path) -> Iterator[tuple[str, str]]:
    """Of a package whose names are imported when they are asked for: name -> module, from its _HOMES."""
    for node in ast.parse(init.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_HOMES")], value=ast.Dict() as homes):
                yield from ast.literal_eval(homes).items()


def _back(before: dict[str, str], module: str, target: str) -> list[str]:
    way = [target]
    while way[-1] != module:
        way.append(before[way[-1]])
    return way[::-1]
