"""The benchmarks, read from their source: the commands of the READMEs exist, and so does each name of the library.

Benchmarks are run by hand, months apart. Without this test a renamed module is noticed only then.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import echelon

LIBRARY = Path(echelon.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))


def path_of(script):
    return str(script.relative_to(BENCHMARKS))


def source_of(module):
    """Returns the file of a module of the library. None if there is none."""
    path = LIBRARY.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def names_in(file):
    """Returns the names that a file defines or imports, with the values of its string constants.

    The latter since a package may import names when they are asked for, from a table of them.
    """
    tree = ast.parse(file.read_text())
    found = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        found.add(getattr(node, "name", ""))
    return found


def imported_by(script):
    """Yields the modules of the library that a script imports, each with the names from it."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "echelon":
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names if alias.name.split(".")[0] == "echelon")


@pytest.mark.parametrize("script", SCRIPTS, ids=path_of)
def test_the_library_has_all_that_a_benchmark_imports(script):
    for module, names in imported_by(script):
        file = source_of(module)
        assert file is not None, f"there is no {module}"
        for name in names:
            assert name in names_in(file) or source_of(f"{module}.{name}"), f"{module} has no {name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=path_of)
def test_the_library_has_all_that_a_benchmark_replaces(script):
    """A setting of a module that is gone could be set, and would change nothing."""
    modules = {name: f"{module}.{name}" for module, names in imported_by(script) for name in names}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            file = source_of(modules.get(ast.unparse(node.value), "echelon.no_module"))
            assert file is None or node.attr in names_in(file), f"{file} has no {node.attr}"


@pytest.mark.parametrize("readme", sorted(BENCHMARKS.rglob("README.md")), ids=path_of)
def test_the_commands_of_a_readme_exist(readme):
    commands = re.findall(r"^ +python (benchmarks/\S+\.py)", readme.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert (BENCHMARKS.parent / command).exists(), command


def test_the_scripts_that_pages_name_exist():
    """A figure without the script that measures it cannot be repeated."""
    pages = [BENCHMARKS.parent / "README.md", *(BENCHMARKS.parent / "docs").rglob("*.md"), *BENCHMARKS.rglob("*.md")]
    named = {
        (page.name, path) for page in pages for path in re.findall(r"benchmarks/[\w/]+\.(?:py|c)\b", page.read_text())
    }
    assert len(named) > 30
    assert [(page, path) for page, path in sorted(named) if not (BENCHMARKS.parent / path).exists()] == []


TURNS = """\
import sys
sys.path.append(sys.argv[1])
import echelon
from harness import in_turns

def measure(group):
    order = []
    acts = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = in_turns(group, acts, rounds=2, repeat=2, warmup=1)
    return "".join(order), [len(times) for times in found.seconds.values()], found.seconds

first, second = echelon.simulate(measure, 2).results
assert first[0] == "aabbcc" "bbccaa" "ccaabb", first[0]
assert first[1] == [2, 2, 2]
assert first[2] == second[2], "all ranks get the time of the slowest"
"""


def test_contestants_take_turns_in_changing_order():
    subprocess.run([sys.executable, "-c", TURNS, str(BENCHMARKS)], check=True, timeout=50)
