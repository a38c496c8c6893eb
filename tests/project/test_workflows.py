"""The workflows and forms fit their schemas, run targets that exist, and cover what the project supports."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from echelon._torch_versions import TRIED

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PARSED = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")],
    "vendor.github-issue-config": [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_fit_their_schema(schema):
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_matrix_covers_every_supported_version():
    jobs = PARSED["ci"]["jobs"]
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == found == ["3.11", "3.12", "3.13", "3.14"]
    assert jobs["test"]["strategy"]["matrix"]["machine"] == ["x86-64", "arm64"]
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == list(TRIED)


@pytest.mark.parametrize(("workflow", "job"), [("ci", "test"), ("ci", "packages"), ("release", "build")])
def test_both_kinds_of_machine_are_tried(workflow, job):
    tried = PARSED[workflow]["jobs"][job]
    machines = {each["machine"]: each["runner"] for each in tried["strategy"]["matrix"]["include"]}
    assert machines == {"x86-64": "ubuntu-24.04", "arm64": "ubuntu-24.04-arm"}
    assert tried["runs-on"] == "${{ matrix.runner }}"


def steps():
    for name, workflow in PARSED.items():
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                yield name, step


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name, step in steps():
        command = step.get("run", "")
        if (made := re.match(r"make PYTHON=python ([a-z]+)", command)) and (made[1] != "docs" or "docs:" in makefile):
            assert re.search(rf"^{made[1]}:", makefile, re.MULTILINE), (name, command)
        for script in re.findall(r"python (\S+\.py)", command):
            assert (ROOT / script).exists(), script


def test_a_workflow_runs_every_target_of_tests_that_needs_no_gpu_or_hours():
    commands = " ".join(step.get("run", "") for _, step in steps())
    assert {"lint", "test", "slow", "compat", "docs"} <= set(re.findall(r"make PYTHON=python ([a-z]+)", commands))


def test_actions_have_a_version_and_jobs_few_rights():
    for name, step in steps():
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1")), (name, step)
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in PARSED.values())
    publish = PARSED["release"]["jobs"]["publish"]
    assert (publish["environment"], publish["permissions"]) == ("pypi", {"id-token": "write"})
    assert "password" not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.fixture
def publish(tmp_path):
    """Runs the commands of the docs workflow for a branch or tag on a small site, which is pushed to `origin`."""
    for package in ("mike", "mkdocs"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed: pip install -e ".[docs]"')
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    (clone / "docs").mkdir(parents=True)
    (clone / "docs" / "index.md").write_text("# Small\n")
    (clone / "mkdocs.yml").write_text("site_name: small\nplugins: [mike]\n")
    (tmp_path / "bin").mkdir()
    for name in ("mike", "mkdocs"):
        start = "from mike.driver import main; main()" if name == "mike" else "from mkdocs.__main__ import cli; cli()"
        (tmp_path / "bin" / name).write_text(f"#!{sys.executable}\n{start}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        **{"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "GITHUB_PATH": str(tmp_path / "path")},
        **{"HOME": str(tmp_path), "NO_MKDOCS_2_WARNING": "1"},
    }

    def shell(code, **variables):
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", code]  # as the steps of a workflow
        done = subprocess.run(
            command, cwd=clone, env=environ | variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    author = "-c user.name=x -c user.email=x"
    shell(f"git init -q --bare {origin}; git init -q; git {author} commit -q --allow-empty -m a")
    shell(f"git remote add origin {origin}")

    def push(kind, name):
        for step in PARSED["docs"]["jobs"]["publish"]["steps"]:
            if "make" not in step.get("run", "make") and step.get("if", kind) in (kind, f"github.ref_type == '{kind}'"):
                shell(step["run"], GITHUB_REF_NAME=name)
        versions = json.loads(shell(f"git -C {origin} show gh-pages:versions.json"))
        first = re.search(r"url=([^/]*)/", shell(f"git -C {origin} show gh-pages:index.html"))[1]
        return {version["version"]: version["aliases"] for version in versions}, first

    return push


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_tags_become_versions_of_the_site_and_main_its_version_dev(publish):
    assert publish("branch", "main") == ({"dev": []}, "dev")
    assert publish("tag", "v0.2.0") == ({"dev": [], "0.2.0": ["latest"]}, "latest")
    assert publish("branch", "main") == ({"dev": [], "0.2.0": ["latest"]}, "latest")
    assert publish("tag", "v0.10.0") == ({"dev": [], "0.10.0": ["latest"], "0.2.0": []}, "latest")
