"""Imports go one way, and what is pure stays pure: read from the source, nothing is run."""

import ast
from pathlib import Path

import pytest

import echelon

ROOT = Path(echelon.__file__).parent

LAYERS = (
    (
        *("arguments", "errors", "exits", "files", "flights", "places", "trace", "wording", "world_size"),
        *("_torch_private", "_torch_versions"),
    ),
    ("backends",),
    ("collectives",),
    ("calls",),
    ("group", "mesh", "functional"),
    ("launch",),
    ("data_parallel",),
    ("pipeline",),
    ("simulation", "testing"),
    ("bench", "doctor"),
    ("cli", "interop", "__init__", "__main__"),
)
"""From the bottom to the top: a module imports from its own layer and those below."""

EXCEPTIONS = {
    ("trace", "pipeline"): "a timeline draws itself; the drawing is imported when it is asked for",
}
"""(importer, imported) by their place in LAYERS, each with its reason, and only inside of functions."""

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

PURE = (
    "_torch_versions",
    "arguments",
    "errors",
    "exits",
    "files",
    "trace",
    "wording",
    "bench.decide",
    "bench.figures",
    "bench.request",
    "bench.sizes",
    "bench.table",
    "backends.wire",
    "backends.shared.arena",
    "backends.shared.layout",
    "backends.shared.mail",
    "backends.shared.protocol",
    "collectives.plan",
    "collectives.check",
    "collectives.cost",
    "collectives.draw",
    "collectives.goal",
    "collectives.provenance",
    "collectives.select",
    "collectives.tuning",
    "collectives.algorithms",
    "data_parallel.buckets",
    "doctor.engine",
    "doctor.finding",
    "doctor.host",
    "pipeline",
)
"""Modules, or packages with all that is in them."""

NOT_PURE = {
    f"pipeline.{name}"
    for name in (
        "agreement",
        "autocast",
        "batch",
        "buffers",
        "by_hand",
        "carving",
        "clock",
        "cut",
        "deferred",
        "entry",
        "failures",
        "graph_cut",
        "idle_optimizer",
        "interpreter",
        "junctions",
        "loss",
        "measure",
        "meter",
        "microbatch",
        "nested",
        "outbox",
        "outcome",
        "randomness",
        "pipeline",
        "probe",
        "repeated",
        "replicas",
        "runtime",
        "same_buffers",
        "saved",
        "separate_uses",
        "sharded",
        "stage",
        "ties",
        "traced_stage",
        "tracing",
        "transfer",
        "weights",
    )
}
"""What of the pure packages runs instead of plans."""


def modules():
    """Returns the source of every module by its name inside the package, such as "backends.wire"."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


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
        for name in imports(MODULES[module], late=late):
            imported = module_of(name)
            if imported is None or layer_of(imported) <= layer_of(module):
                continue
            pair = (module.split(".")[0], imported.split(".")[0])
            assert late, f"{module} imports {imported}, which is above it"
            assert pair in EXCEPTIONS, f"{module} imports {imported}, which is above it, inside a function"


def is_pure(module):
    return module not in NOT_PURE and any(module == name or module.startswith(f"{name}.") for name in PURE)


def test_there_are_pure_modules():
    for name in PURE:
        assert any(is_pure(module) and (module == name or module.startswith(f"{name}.")) for module in MODULES), name


@pytest.mark.parametrize("module", sorted(filter(is_pure, MODULES)))
def test_what_is_pure_imports_only_what_is(module):
    for name in imports(MODULES[module], late=False):
        assert name.split(".")[0] not in IMPURE, f"{module} is pure, and imports {name}"
        imported = module_of(name)
        if imported not in (None, "collectives"):  # that package is empty but for its docstring
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
    assert module_of("echelon.timeline.figure.draw") == "pipeline.draw"
    assert module_of("echelon.backends.formats.wire.Frame") == "backends.wire"
    assert module_of("torch.nn") is None
