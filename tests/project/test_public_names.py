import ast
import inspect
import subprocess
import sys

import echelon
from echelon import errors


def test_every_public_name_is_there():
    for name in echelon.__all__:
        assert getattr(echelon, name).__name__ == {"DDP": "DistributedDataParallel"}.get(name, name)
    assert set(echelon.__all__) <= set(dir(echelon))


def test_every_error_is_public():
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined <= set(echelon.__all__)


def test_type_checkers_see_the_names_that_are_imported_late():
    tree = ast.parse(inspect.getsource(echelon))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: node.module for node in block.body for alias in node.names}
    assert seen == echelon._WHERE | dict.fromkeys(echelon._SUBMODULES, "echelon")


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(echelon, "no_such_name")


def test_modules_are_imported_when_they_are_used():
    """In a new interpreter: the tests have imported all of them."""
    code = (
        "import sys, echelon\n"
        "assert not [name for name in echelon._SUBMODULES if f'echelon.{name}' in sys.modules]\n"
        "assert set(echelon._SUBMODULES) <= set(dir(echelon))\n"
        "echelon.pipeline.schedules.build('gpipe', num_ranks=2, num_microbatches=2)\n"
        "assert 'torch' not in sys.modules, 'a schedule needs no torch'\n"
        "import echelon.launch.worker\n"
        "echelon.init().close()\n"
        "echelon.simulate(lambda group: group.barrier(), 2)\n"
        "slow = {'sympy', 'torch.distributed.tensor', 'torch.distributed.fsdp', 'torch._dynamo'}\n"
        "assert not slow & set(sys.modules), 'ranks that do not use them would start later'\n"
        "print(echelon.testing.RankPool, echelon.functional.all_reduce, echelon.simulation.PRESETS)\n"
        "assert 'pytest' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == 0, ended.stderr


def test_importing_the_package_does_not_import_torch():
    code = "import sys, echelon; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    imported = set(ended.stdout.split())
    assert "echelon.errors" in imported
    assert "torch" not in imported


def test_docstrings_of_groups_name_every_argument():
    for name, method in inspect.getmembers(echelon.ProcessGroup, inspect.isfunction):
        if not name.startswith("_"):
            left_out = [each for each in inspect.signature(method).parameters if each not in inspect.getdoc(method)]
            assert set(left_out) <= {"self"}, name
