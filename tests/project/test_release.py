"""A release is refused while something is missing, and the links of the package follow from one setting."""

import importlib.metadata
import importlib.util
import sys
import tomllib
import types
from pathlib import Path

import pytest

import echelon
from echelon import _torch_versions

ROOT = Path(__file__).parents[2]


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load("tools/release.py", "release")


@pytest.fixture
def metadata(monkeypatch):
    """The hook, which hatchling loads: it is no dependency of the tests."""
    plugin = types.ModuleType("hatchling.metadata.plugin.interface")
    plugin.MetadataHookInterface = type("MetadataHookInterface", (), {})
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    return load("hatch_metadata.py", "hatch_metadata")


def make_project(folder, repository="https://example.org/echelon", heading="## 1.2.0, 2026-12-01", cited="1.2.0"):
    (folder / "pyproject.toml").write_text(
        f'[project]\nversion = "1.2.0"\n[tool.echelon]\nrepository = "{repository}"\n'
    )
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    (folder / "CITATION.cff").write_text(f"title: x\nversion: {cited}\n")
    return folder


def test_a_complete_project_can_be_released(tmp_path):
    assert release.problems(make_project(tmp_path), "v1.2.0") == []


@pytest.mark.parametrize(
    ("change", "tag", "problem"),
    [
        ({"repository": ""}, None, "repository in pyproject.toml is empty: set the address"),
        ({}, "v1.3.0", "the tag is v1.3.0 and the version 1.2.0: tag it v1.2.0"),
        ({"heading": "## 1.1.0"}, None, "CHANGELOG.md has no entry for 1.2.0"),
        ({"heading": "## 1.2.0, unreleased"}, None, "CHANGELOG.md says that 1.2.0 is unreleased: write its date"),
        ({"cited": "1.1.0"}, None, "CITATION.cff is of another version"),
    ],
)
def test_a_release_is_refused(tmp_path, change, tag, problem):
    (found,) = release.problems(make_project(tmp_path, **change), tag)
    assert problem in found


def test_this_project_is_refused_while_it_has_no_address(capsys):
    if tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["echelon"]["repository"]:
        pytest.skip("the repository has an address")
    assert release.main([]) == 1
    assert "repository in pyproject.toml is empty" in capsys.readouterr().err


def test_the_commands_of_a_readme():
    block = "pip install .  # it\n$ echelon run -n 2 \\\n  a.py  # two\nmake demo\npython a.py\n"
    fails = "$ echelon simulate -n 3 hang.py\nechelon: DeadlockError\n  rank 1\n$ echelon checkpoint ls runs/gpt\n"
    text = f"```sh\n{block}```\n```python\necholon = 3\n```\n```console\n{fails}```\n"
    expected = [("echelon run -n 2 a.py", 0), ("python a.py", 0), ("echelon simulate -n 3 hang.py", 1)]
    assert release.commands(text) == [(words.split(), status) for words, status in expected]
    assert release.commands((ROOT / "README.md").read_text())


def test_links_are_made_from_the_setting(metadata):
    assert metadata.urls_of("") == {}
    assert metadata.urls_of("https://example.org/e")["Issues"] == "https://example.org/e/issues"
    page = "[a](docs/a.md#b) ![p](p.png) [c](https://c.org) [d](#d)"
    assert metadata.with_whole_links(page, "", "1.0") == page
    assert metadata.with_whole_links(page, "https://e.org/e", "1.0") == (
        "[a](https://e.org/e/blob/v1.0/docs/a.md#b) ![p](https://e.org/e/raw/v1.0/p.png) [c](https://c.org) [d](#d)"
    )


def test_the_hook_fills_the_metadata(metadata, tmp_path):
    make_project(tmp_path)
    (tmp_path / "README.md").write_text("[a](docs/a.md)")
    hook = metadata.RepositoryHook()
    hook.root = str(tmp_path)
    found = {"version": "1.2.0"}
    hook.update(found)
    assert found["urls"]["Source"] == "https://example.org/echelon"
    assert found["readme"]["text"] == "[a](https://example.org/echelon/blob/v1.2.0/docs/a.md)"


def test_the_version_is_public():
    assert echelon.__version__ == importlib.metadata.version("echelon")


@pytest.mark.parametrize(("version", "warns"), [("2.10.1", True), ("2.13.0+cpu", False), ("", False)])
def test_a_torch_that_is_too_old_is_warned_of_at_import(monkeypatch, tmp_path, recwarn, version, warns):
    package = tmp_path / "torch"
    package.mkdir()
    if version:
        (package / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _torch_versions.installed() == version
    _torch_versions.warn_if_old()
    assert [str(each.message).partition(": ")[0] for each in recwarn] == ["torch 2.10.1 is older than 2.11"] * warns
