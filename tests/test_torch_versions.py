"""Versions of torch that Echelon does not work with are refused with one line, before anything else fails."""

import ast
import importlib
import itertools
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import echelon
from echelon import _torch_versions
from echelon._torch_private.modules import devices_as_on_gpu
from echelon._torch_versions import (
    COMPILED_NAMES,
    FLASH_NAMES,
    FLEX_NAMES,
    FSDP1_NAMES,
    FSDP2_NAMES,
    GLOO_NAMES,
    OLDEST,
    PRIVATE_NAMES,
    REPEATS_NAMES,
    TRIED,
    UnsupportedTorch,
    lacking,
    missing,
    require,
)
from echelon.cli import main
from echelon.doctor import checkup
from echelon.replacements import replaced

ROOT = Path(__file__).parents[1]
OF_FORECASTS = REPEATS_NAMES + COMPILED_NAMES + FLEX_NAMES + FLASH_NAMES
NAMES = PRIVATE_NAMES + GLOO_NAMES + FSDP1_NAMES + FSDP2_NAMES + OF_FORECASTS


def test_this_torch_has_every_private_name():
    assert lacking() == ()
    assert missing(FSDP1_NAMES + FSDP2_NAMES) == ()
    require()


def private_names_used():
    """Returns the private names in the source of `_torch_private`, each without its module or class."""
    found = set()
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src/echelon/_torch_private").glob("*.py")]
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
            modules, names = set(node.module.split(".")), {alias.name for alias in node.names}
            if any(part.startswith("_") for part in modules | names):
                found |= {part for part in modules if part.startswith("_")} | names
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and not is_own(node):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Replacement", "_in_optimizers"):
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {name for name in names if isinstance(name, str) and re.match("_[^_]", name)}
        elif isinstance(node, ast.FunctionDef) and node.name == "_should_skip_dynamo":
            found.add(node.name)  # overridden: torch asks for it
    return found | {"GroupName"}  # the type of a private function's argument


def is_own(node):
    """Whether an attribute is one that `_torch_private` gives to its own objects, or one of Python's `sys`."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "sys")


def test_every_private_name_that_is_used_is_probed():
    probed = {part for name in NAMES for part in name.split(".")}
    assert private_names_used() - probed == set(), "add them to PRIVATE_NAMES in _torch_versions.py"


def test_every_name_that_is_probed_is_used():
    used = private_names_used()
    assert [name for name in NAMES if not used & set(name.split("."))] == []


GONE = "_current_graph_task_id"


@pytest.fixture
def newer_torch(monkeypatch):
    """Takes two private names away from torch, one of which `_torch_private` imports at once."""
    monkeypatch.delattr(torch._C, GONE)
    monkeypatch.delattr(torch._C._distributed_c10d, "_register_work")
    monkeypatch.setattr(torch, "__version__", "9.9.0")


MESSAGE = (
    f"torch 9.9.0 lacks torch._C.{GONE} and torch._C._distributed_c10d._register_work: "
    f"install a version that Echelon works with ({', '.join(TRIED)} were tried): pip install 'torch>=2.11,<2.16'"
)


def test_names_that_a_torch_lacks_are_told(newer_torch):
    assert lacking() == (f"torch._C.{GONE}", "torch._C._distributed_c10d._register_work")


def test_a_torch_without_a_private_name_is_refused_by_one_line(newer_torch):
    with pytest.raises(UnsupportedTorch) as caught:
        echelon.__getattr__("init")
    assert str(caught.value) == MESSAGE


def test_what_needs_private_names_refuses_before_it_fails(newer_torch, monkeypatch):
    monkeypatch.delitem(sys.modules, "echelon._torch_private")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("echelon._torch_private")
    assert str(caught.value) == MESSAGE


def test_what_needs_no_torch_is_there_all_the_same(newer_torch, capsys):
    assert main(["plan", "1f1b", "-r", "2", "-m", "2"]) == 0


def test_without_the_names_of_fsdp1_other_programs_are_foreseen(monkeypatch):
    monkeypatch.delattr("torch.distributed.fsdp._init_utils._get_compute_device")
    with replaced(devices_as_on_gpu()):
        assert torch._C._get_accelerator() == torch.device("cuda")


def test_the_doctor_names_it(newer_torch, capsys):
    assert main(["doctor", "--json"]) == 1
    (finding,) = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["check"] == "torch"]
    assert f"{finding['found']}: {finding['fix']}" == MESSAGE


def test_the_command_line_prints_one_line(monkeypatch, capsys):
    def refuse(environ):
        raise UnsupportedTorch("torch 9.9.0 lacks a name: install another")

    monkeypatch.setattr(checkup, "examine", refuse)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "echelon: torch 9.9.0 lacks a name: install another\n"


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.2+cpu")
    with pytest.raises(UnsupportedTorch, match=r"^torch 2\.10\.2\+cpu is older than 2\.11: install a version"):
        require()


@pytest.mark.parametrize("version", [*TRIED, "2.16.0a0+git1234", "2.13.0+cpu", "3.0"])
def test_a_torch_with_every_name_is_taken(version):
    assert _torch_versions.problem(version, ()) == ""


def test_the_package_asks_for_the_oldest_and_the_docs_name_all_that_were_tried():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, OLDEST))}" in dependencies
    assert ".".join(TRIED[0].split(".")[:2]) == ".".join(map(str, OLDEST))
    named = f"{', '.join(TRIED[:-1])} and {TRIED[-1]}"
    for page in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "docs/interop.md"):
        assert named in " ".join((ROOT / page).read_text(encoding="utf-8").split()), page
