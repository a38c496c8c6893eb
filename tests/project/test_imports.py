"""Imports go one way, and what is pure stays pure: read from the source, nothing is run."""

import ast
from functools import cache
from pathlib import Path

import pytest

import echelon

ROOT = Path(echelon.__file__).parent

LAYERS = (
    (
        *("arguments", "call_site", "cores", "errors", "garbage", "hashing", "hint", "long_work", "operation_records"),
        "purposes",
        *("replacements", "temporary"),
        *("wording", "_names_of_others", "_native", "_torch_private", "_torch_versions", "timeline"),
    ),
    ("backends",),
    ("collectives",),
    ("group",),
    ("mesh", "functional"),
    ("launch",),
    ("interop",),
    ("amp", "data", "data_parallel", "logging"),
    ("pipeline",),
    ("checkpoint",),
    ("simulation", "testing"),
    ("foresight",),
    ("bench", "doctor"),
    ("cli", "pytest_plugin", "__init__", "__main__"),
)
"""From the bottom to the top: a module imports from its own layer and those below."""

IMPURE = {
    "torch",
    "numpy",
    "socket",
    "select",
    "selectors",
    "asyncio",
    "threading",
    "multiprocessing",
    "time",
    "signal",
}


def modules():
    """Returns the source of every module by its name inside the package, such as "backends.wire"."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path.read_text()
    return found


MODULES = modules()


@cache
def tree_of(module):
    return ast.parse(MODULES[module])


def imports(tree, *, late):
    """Yields the full names that a module imports: at once, or (late) inside of functions."""

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import) and inside == late:
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and inside == late:
                assert child.level == 0, "imports are absolute"
                for alias in child.names:
                    yield f"{child.module}.{alias.name}"
            yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return list(visit(tree, False))


def module_of(name):
    """Returns the module of this package that an imported name is in; None if it is another package's."""
    if name.split(".")[0] != "echelon":
        return None
    inner = name.removeprefix("echelon").removeprefix(".")
    while inner and inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner or "__init__"


def layer_of(module):
    top = module.split(".")[0]
    found = [number for number, names in enumerate(LAYERS) if top in names]
    assert found, f"{module} is in no layer: add it to LAYERS"
    return found[0]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module):
    for late in (False, True):
        for name in imports(tree_of(module), late=late):
            imported = module_of(name)
            if imported is not None:
                assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}, which is above it"


def test_no_file_imports_itself_by_way_of_others():
    graph = {
        module: {module_of(name) for name in imports(tree_of(module), late=False)} - {None, module}
        for module in MODULES
    }
    assert find_cycle(graph) == []


def find_cycle(graph):
    """Returns modules that import each other in a cycle; [] if there is none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        cycle = next(filter(None, map(visit, sorted(graph[module]))), [])
        path.pop()
        done.add(module)
        return cycle

    return next(filter(None, map(visit, sorted(graph))), [])


@pytest.mark.parametrize("module", ["cli.app", "launch.run"])
def test_commands_start_without_torch(module):
    """To import it takes seconds; the launcher of a job needs none of it."""
    reached, left = set(), [module]
    while left:
        found = imports(tree_of(left.pop()), late=False)
        assert not [name for name in found if name.split(".")[0] == "torch"], found
        new = {module_of(name) for name in found} - {None} - reached
        reached |= new
        left += new


def is_pure(module):
    """Whether the docstring of a module, or of a folder around it, ends with the word "Pure."."""
    while module:
        if MODULES.get(module, "").removeprefix('"""').partition('"""')[0].rstrip().endswith("Pure."):
            return True
        module = module.rpartition(".")[0]
    return False


def test_what_plans_is_pure():
    for folder in (
        *("timeline", "pipeline.plan", "pipeline.schedules", "pipeline.search", "collectives.plans"),
        *("backends.formats", "data_parallel.layout"),
    ):
        assert is_pure(folder), folder


@pytest.mark.parametrize("module", sorted(filter(is_pure, MODULES)))
def test_what_is_pure_imports_only_what_is(module):
    for name in imports(tree_of(module), late=False):
        assert name.split(".")[0] not in IMPURE, f"{module} is pure, and imports {name}"
        imported = module_of(name)
        if imported is not None:
            assert is_pure(imported), f"{module} is pure, and imports {imported}, which is not"


def test_this_test_sees_what_it_looks_for():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "import torch.nn\n"
        "if TYPE_CHECKING:\n    import socket\n"
        "def late():\n    from echelon.timeline.figure import draw\n"
    )
    assert imports(tree, late=False) == ["typing.TYPE_CHECKING", "torch.nn"]
    assert imports(tree, late=True) == ["echelon.timeline.figure.draw"]
    assert module_of("echelon.timeline.figure.draw") == "timeline.figure"
    assert module_of("echelon.backends.formats.wire.Frame") == "backends.formats.wire"
    assert module_of("torch.nn") is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
