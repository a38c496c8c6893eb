"""Wheels for two kinds of machine and an sdist are made on this one, and work where they are installed."""

import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
wheels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wheels)


def run(*command, **settings):
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=True, **settings
    ).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with the distributions."""
    dist = tmp_path_factory.mktemp("dist")
    try:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(dist), "hatchling")
    except subprocess.SubprocessError as error:
        pytest.skip(f"hatchling cannot be fetched: {error}")
    run(sys.executable, str(ROOT / "tools" / "wheels.py"), "--to", str(dist))
    return dist


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_two_wheels_and_an_sdist_are_made(made):
    version = wheels.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert sorted(path.name for path in made.glob("echelon-*")) == [
        f"echelon-{version}-py3-none-manylinux_2_17_aarch64.whl",
        f"echelon-{version}-py3-none-manylinux_2_17_x86_64.whl",
        f"echelon-{version}.tar.gz",
    ]


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_sdist_builds_again(made, tmp_path):
    (sdist,) = made.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(sdist))
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(next(made.glob(f"*_{platform.machine()}.whl"))) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_wheel_for_this_machine_works_in_a_fresh_environment(made, tmp_path):
    """Torch is the one of this environment: a path is added once the wheel is installed."""
    (wheel,) = made.glob(f"*_{platform.machine()}.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ECHELON_", "PYTHON"))}
    environ["HOME"] = str(tmp_path)
    # In its own folder: the sources of this one are not to be found.
    settings = {"cwd": tmp_path, "env": environ}
    run(str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel), **settings)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (site / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    where = run(str(binaries / "python"), "-c", "import echelon; print(echelon.__file__)", **settings)
    assert where.startswith(str(site)), where
    assert "ranks of this host share memory" in run(str(binaries / "echelon"), "doctor", **settings)
    table = run(
        *(str(binaries / "echelon"), "bench", "all_reduce", "--backend", "shm", "-n", "2", "-b", "8", "-e", "8"),
        *("--turns", "1", "--iterations", "10"),
        **settings,
    )
    assert "float32" in table


@pytest.fixture
def bare(tmp_path):
    """A clone of the project, and an environment with Python and pip whose PATH has no compiler."""
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / "clone" / name)
    venv.create(tmp_path / "venv", with_pip=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ECHELON_", "PYTHON"))}
    environ.pop("CC", None)
    return {
        "cwd": tmp_path / "clone",
        "env": {**environ, "PATH": str(tmp_path / "venv" / "bin"), "HOME": str(tmp_path)},
    }


def install(bare, *options):
    """Installs the clone as `make` does, without what it depends on. Returns what pip printed."""
    return run(f"{bare['env']['PATH']}/python", "-m", "pip", "install", "-v", "--no-deps", *options, "-e", ".", **bare)


def library_of(bare):
    return bare["cwd"] / "src" / "echelon" / "_native" / "library" / f"core-{platform.machine()}.so"


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_clone_without_compilers_gets_one_from_a_wheel(made, bare):
    del made  # it skips where nothing can be fetched
    install(bare)
    assert library_of(bare).read_bytes()[:4] == b"\x7fELF"


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_clone_without_any_compiler_is_installed_and_warns(made, bare):
    """As where `ziglang` is not to be had. `test_library` has such a rank use TCP."""
    python = f"{bare['env']['PATH']}/python"
    run(python, "-m", "pip", "install", "--quiet", "hatchling", "editables", **bare)
    assert "no native library, so ranks of one host will use TCP" in install(bare, "--no-build-isolation")
    assert not library_of(bare).exists()
    (site,) = (bare["cwd"].parent / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    said = run(python, "-c", "from echelon import _native; print(_native.__file__, _native.OBSTACLE)", **bare)
    assert said.startswith(str(bare["cwd"]))
    assert "the native library was not built: install Echelon again, with a C compiler" in said


def make_wheel(folder, tag="py3-none-manylinux_2_17_aarch64", library="core-aarch64.so", machine=183, inner=None):
    path = folder / f"echelon-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(f"echelon/_native/library/{library}", b"\x7fELF" + bytes(14) + struct.pack("<H", machine))
        files.writestr("echelon-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {inner or tag}\n")
    return path


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"tag": "py3-none-linux_aarch64"}, "its name does not end with"),
        ({"inner": "py3-none-any"}, "its WHEEL has not the tag"),
        ({"library": "core-x86_64.so"}, "its libraries are"),
        ({"machine": 62}, "its library is no ELF file for aarch64"),
    ],
)
def test_a_wheel_that_is_not_for_its_machine_is_refused(tmp_path, change, problem):
    found = wheels.problems(make_wheel(tmp_path, **change), "aarch64")
    assert bool(found) == (problem is not None)
    assert problem is None or problem in found[0]
