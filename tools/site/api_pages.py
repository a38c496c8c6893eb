"""Pages of the API reference: each public name once, its text made from the docstring by mkdocstrings.

Public is a name in the `__all__` of a public module: the package, the modules that it imports late, and the modules in
`TITLES`. A name that the package itself lists stands under that short name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Module:
    """Module of the package with its public names."""

    name: str
    docstring: str
    public: tuple[str, ...]
    imported: dict[str, str]
    """Modules that names are imported from, also under TYPE_CHECKING."""


TITLES = {
    "echelon": "Ranks and groups",
    "echelon.errors": "Errors",
    "echelon.data_parallel": "Data parallelism",
    "echelon.pipeline": "Pipelines",
    "echelon.pipeline.schedules": "Schedules",
    "echelon.checkpoint": "Checkpoints",
    "echelon.simulation": "Simulated ranks",
    "echelon.foresight.run": "Foresee",
    "echelon.functional": "Calls with gradients",
    "echelon.testing": "Testing",
    "echelon.collectives.plans.algorithms": "Algorithms of collectives",
    "echelon.interop.torch_distributed": "Under torch.distributed",
    "echelon.amp": "Mixed precision",
    "echelon.data": "Data",
    "echelon.logging": "Logging",
}
"""Titles of the pages, in their order."""
OF_PACKAGE = ("echelon.errors", "echelon.foresight.run")
"""Modules whose names are for users only if `echelon` has them, too."""
ALSO = {
    "echelon": ("echelon.backends.work.Work",),
    "echelon.pipeline": (
        "echelon.timeline.timeline.Timeline",
        "echelon.pipeline.plan.partition.Partition",
        "echelon.pipeline.plan.partition.partition",
    ),
    "echelon.pipeline.schedules": (
        "echelon.pipeline.plan.cost.transfer_time",
        "echelon.pipeline.plan.fuse.exact_stages",
        "echelon.pipeline.plan.fuse.is_exact",
        "echelon.pipeline.plan.program.Program",
        "echelon.pipeline.plan.program.check_program",
        "echelon.pipeline.plan.program.lower",
        "echelon.pipeline.schedules.recommendation.table",
    ),
    "echelon.collectives.plans.algorithms": (
        "echelon.collectives.plans.plan.Copy",
        "echelon.collectives.plans.plan.Plan",
        "echelon.collectives.plans.plan.Recv",
        "echelon.collectives.plans.plan.Reduce",
        "echelon.collectives.plans.plan.Send",
        "echelon.collectives.plans.select.Rule",
        "echelon.collectives.plans.check.check",
        "echelon.collectives.plans.check.goal_of",
        "echelon.collectives.plans.cost.LinkCosts",
        "echelon.collectives.plans.cost.simulate",
    ),
    "echelon.testing": (
        "echelon.backends.base.Backend",
        "echelon.backends.control.ControlPlane",
        "echelon.backends.delivery.ANY",
        "echelon.backends.delivery.Receive",
        "echelon.backends.formats.wire.Tag",
        "echelon.backends.formats.wire.as_sent",
        "echelon.backends.matching.Mailbox",
        "echelon.backends.messages.Messages",
        "echelon.backends.modes.normal_mode",
    ),
}
"""Names in no `__all__` that users meet, by the page on which they stand."""
MEMBERS = {
    "echelon.backends.work.Work": ("wait", "is_completed", "result", "exception"),
    "echelon.backends.delivery.Receive": ("work", "complete"),
    "echelon.backends.matching.Mailbox": ("post", "take", "withdraw", "fail_peer", "fail_context", "fail_all"),
    "echelon.interop.torch_distributed.EchelonProcessGroup": (
        "group",
        "set_timeout",
        "shutdown",
        "abort",
        "monitored_barrier",
    ),
}
"""Members that are shown of a class that has others for Echelon's own use."""
FIRST = (
    "init",
    "ProcessGroup",
    "spawn",
    "DistributedDataParallel",
    "DDP",
    "Pipeline",
    "split",
    "build",
    "recommend",
    "Store",
    "simulate",
    "explore",
    "foresee",
    "check_backend",
    "simulated",
)
"""Names that users call first. They begin their pages, in this order."""


def modules() -> dict[str, Module]:
    """Returns the public modules in the order of their pages."""
    package = _module("echelon")
    late = _tuple(_tree("echelon"), "_SUBMODULES")
    names = [*TITLES, *(f"echelon.{name}" for name in late)]
    return {name: package if name == "echelon" else _module(name) for name in dict.fromkeys(names)}


def public_names(tree: ast.Module) -> tuple[str, ...]:
    """Returns the names that a module makes public: its `__all__`, else its classes and functions."""
    listed = _tuple(tree, "__all__")
    defined = (node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return listed or tuple(name for name in defined if not name.startswith("_"))


def _module(name: str) -> Module:
    tree = _tree(name)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}
    return Module(name, ast.get_docstring(tree) or "", public_names(tree), imported)


def _tree(name: str) -> ast.Module:
    path = SOURCES.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _tuple(tree: ast.Module, name: str) -> tuple[str, ...]:
    """Returns the words that a module assigns to a name. None of them if it does not assign it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return tuple(ast.literal_eval(node.value))
    return ()


def contents() -> dict[str, list[str]]:
    """Returns the full names that stand on each page, by the page's module. Every public name stands on one."""
    found = modules()
    package = found["echelon"]
    on_page: dict[str, list[str]] = {name: [] for name in found}
    for name in package.public:
        home = package.imported.get(name, "echelon")
        on_page[home if home in on_page else "echelon"].append(f"echelon.{name}")
    for module in found.values():
        if module is not package and module.name not in OF_PACKAGE:
            short = {full.rpartition(".")[2] for full in on_page[module.name]}
            names = (name for name in module.public if name not in short and f"{module.name}.{name}" not in found)
            on_page[module.name] += [f"{module.name}.{name}" for name in names]
    for page, names in ALSO.items():
        on_page[page] += names
    return on_page


def title(module: str) -> str:
    """Returns the title of a module's page."""
    return TITLES[module]


def page_name(module: str) -> str:
    """Returns the file name of a module's page."""
    return f"reference/{module.removesuffix('.run').replace('.', '_')}.md"


def pages() -> dict[str, str]:
    """Returns the text of each page of the reference by its file name."""
    found, on_page = modules(), contents()
    made = {}
    for module, names in on_page.items():
        docstring = found[module].docstring
        if module not in ("echelon", "echelon.foresight.run"):
            docstring = f"`import {module}`\n\n{docstring}"
        entries = "\n".join(_entry(name) for name in _sorted(names))
        made[page_name(module)] = f"# {title(module)}\n\n{docstring}\n\n{entries}"
    made["reference/index.md"] = _index(on_page)
    return made


def _entry(name: str) -> str:
    members = "".join(f"        - {member}\n" for member in MEMBERS.get(name, ()))
    return f"::: {name}\n" + (f"    options:\n      members:\n{members}" if members else "")


def _sorted(names: list[str]) -> list[str]:
    """Returns the names that users call first before all others, then functions, then classes."""

    def place(name: str) -> tuple[int, bool, str]:
        short = name.rpartition(".")[2]
        return FIRST.index(short) if short in FIRST else len(FIRST), short[0].isupper(), short.lower()

    return sorted(names, key=place)


def _index(on_page: dict[str, list[str]]) -> str:
    lines = [
        "# API reference",
        "",
        "Every public name, with its shapes, units and errors. The text is that of the docstrings. "
        "[The commands](commands.md) have a page of their own.",
        "",
        "| page | names |",
        "|---|---|",
    ]
    for module, names in on_page.items():
        page = page_name(module).removeprefix("reference/")
        links = ", ".join(f"[`{name.rpartition('.')[2]}`]({page}#{name})" for name in _sorted(names))
        lines.append(f"| [{title(module)}]({page}) | {links} |")
    return "\n".join(lines) + "\n"
