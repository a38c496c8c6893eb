"""The tutorials run, block by block, and print what they show; so do the pages for users of other libraries."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.pages import FORECAST_OF, LONG_WORK, blocks_of, outputs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "coming_from").glob("*.md")])
QUICK = ("choose_a_schedule",)  # starts no processes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=() if page.stem in QUICK else pytest.mark.slow) for page in PAGES],
)
def test_every_block_prints_what_the_page_shows(page, tmp_path):
    if page.stem == "foresee_a_cluster" and not version("torch").startswith(FORECAST_OF):
        pytest.skip(f"shows a forecast by torch {FORECAST_OF}")
    text = page.read_text(encoding="utf-8")
    ran = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and of libraries, which pages do not show
        for block, printed in outputs(text, tmp_path, page.stem):
            assert printed == block.expected, block.code
            ran += 1
    assert ran == len(list(blocks_of(text)))
    assert "```python" not in text or ran


def test_no_block_of_a_page_is_left_out():
    """A block of Python that no test runs would rot: other code is marked as diff, sh, yaml or text."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marked = text.count("\n```python\n") + text.count('\n```py title="') + text.count("\n```console\n")
        assert marked == len(list(blocks_of(text))), page.name
        assert "\n```py\n" not in text, page.name


def test_the_notebooks_are_made_from_the_pages(monkeypatch):
    """Their outputs are those of the pages, which the first test compares with a run."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import notebooks

    assert len(notebooks.NAMES) == 3
    for name in notebooks.NAMES:
        path = DOCS / "tutorials" / f"{name}.ipynb"
        made = notebooks.notebook(path.with_suffix(".md").read_text(encoding="utf-8"))
        assert json.loads(path.read_text(encoding="utf-8")) == made, f"{name}: run python tools/notebooks.py"
        assert all(cell["outputs"] or cell["execution_count"] for cell in made["cells"] if cell["cell_type"] == "code")


def executed(path, folder):
    """Returns the cells of code of a notebook, with the outputs that they have in a kernel of Jupyter."""
    for package in ("nbclient", "ipykernel"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -c constraints.txt 'echelon[docs]'")
    notebook = Path(shutil.copy(path, folder))
    # The interpreter of the tests, wherever its scripts are.
    command = folder / "bin" / "echelon"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m echelon "$@"\n')
    command.chmod(0o755)
    # No kernels, settings and history of this user.
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    own = {name: str(folder / name.lower()) for name in names}
    environ = {**os.environ, **own, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    execute = [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", "--timeout=300"]
    ended = subprocess.run(
        [*execute, str(notebook)], cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return cells_of_code(notebook)


def cells_of_code(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cell):
    """Returns the standard output of a cell by the rules of pages: without warnings, and lines on long work."""
    streams = [output for output in cell["outputs"] if output.get("name") == "stdout"]
    text = "".join(part for output in streams for part in output["text"])
    return LONG_WORK.sub("", text.replace("\r\n", "\n"))  # a pseudo-terminal adds the carriage return


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted((DOCS / "tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_cell_prints_in_jupyter_what_the_notebook_shows(path, tmp_path):
    """IPython runs commands under a pseudo-terminal, where each turn of a spinner was a line of the cell."""
    own = tmp_path / "train.py"
    own.write_text("the reader's own")
    cells = executed(path, tmp_path)
    assert own.read_text() == "the reader's own"
    for cell, shown in zip(cells, cells_of_code(path), strict=True):
        assert printed(cell) == printed(shown), "".join(shown["source"])
    drawn = [output["data"] for cell in cells for output in cell["outputs"] if output["output_type"] != "stream"]
    assert len(drawn) == (path.stem == "choose_a_schedule"), "a timeline"
    assert all("".join(data["text/html"]).startswith("<iframe srcdoc=") for data in drawn)
