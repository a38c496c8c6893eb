"""Script that runs as each rank of a simulated world, as `python script.py` would run it."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from echelon.call_site import is_foreign
from echelon.errors import LaunchError, fails
from echelon.group.group import ProcessGroup
from echelon.launch.output import Console
from echelon.launch.run import Program
from echelon.simulation.process.environment import Attribute, Attributes
from echelon.simulation.process.logs import Logs
from echelon.simulation.process.modules import CodeOnce, LocalModules
from echelon.simulation.process.state import ProgramWithStates, State
from echelon.simulation.scheduler import Ended
from echelon.simulation.script.output import CallingRank, RankOutput

_OF_PROJECTS = ("pyproject.toml", "setup.py")
"""Files in the folder of a project."""


class Script(ProgramWithStates):
    """Script or module, once for a simulation: the function that each rank runs.

    `installed` must be entered around the simulation.
    """

    def __init__(self, program: Program, console: Console) -> None:
        """Checks the program.

        Raises:
            LaunchError: there is no such script or module.
        """
        program.check()
        self._program = program
        self._folders, self._path = _places(program)
        self._rank = CallingRank()
        self._modules = LocalModules(
            self._folders, self._path, None if program.is_module else _project_of(program.name)
        )
        self._output = RankOutput(console, self._rank)
        self.has_begun = False
        """Whether a rank has begun."""
        self.errors: dict[int, BaseException] = {}
        """Exceptions with which ranks have failed."""

    def check_output(self) -> None:
        """Raises OSError if the output cannot be written, BrokenPipeError if its reader has gone."""
        if self._output.broken is not None:
            raise self._output.broken

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the process is ready for the script. Afterwards it is as before."""
        with ExitStack() as stack:
            stack.enter_context(self._modules.found())
            stack.enter_context(self._output.installed())
            yield

    def states(self) -> Sequence[State]:  # noqa: D102
        # print, since programs replace it so that rank 0 alone prints.
        names = ((sys, "stdout"), (sys, "stderr"), (sys, "stdin"), (builtins, "print"))
        attributes = [Attribute(owner, name) for owner, name in names]
        attributes.append(Attribute(sys, "path", lambda _: list(self._path)))
        return [self._rank, self._modules, Attributes(attributes), Logs()]

    def __call__(self, group: ProcessGroup) -> None:
        """Runs the script as the calling rank."""
        self.has_begun = True
        with self._rank.belongs(group.rank):
            try:
                self._run()
            except Ended:
                raise
            except BaseException as error:
                if fails(error):
                    self.errors[group.rank] = error
                    self._call_hook(error)
                raise
            finally:
                self._output.finish(group.rank)

    def _call_hook(self, error: BaseException) -> None:
        """Calls the `sys.excepthook` that the program itself has set. The error is reported all the same."""
        code = getattr(sys.excepthook, "__code__", None)
        # torch sets one that marks lines with the rank.
        if isinstance(error, SystemExit) or code is None or is_foreign(code.co_filename):
            return
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:
            traceback.print_exc()

    def _run(self) -> None:
        # A list of its own for each rank, which its program may change.
        sys.argv = [self._program.name, *self._program.args]
        try:
            _run_module(self._program.name) if self._program.is_module else self._run_file()
        except SystemExit as error:
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # as Python does
            raise

    def _run_file(self) -> None:
        path = os.path.abspath(self._program.name)
        loader = CodeOnce("__main__", path, self._modules.codes)
        if path not in self._modules.codes:
            # Compiled here: the loader would write the result into a cache, which Python does for no script.
            try:
                self._modules.codes[path] = loader.source_to_code(loader.get_data(path), path)
            except SyntaxError as error:
                error.filename = error.filename or path  # Python names none for a file with null characters
                raise
        _execute(self._modules.codes[path], path, loader, spec=None)


def _run_module(name: str) -> None:
    spec = _spec_of(name)
    if spec.submodule_search_locations is not None:
        spec = _spec_of(f"{name}.__main__")
    loader = spec.loader
    code = loader.get_code(spec.name) if isinstance(loader, importlib.abc.InspectLoader) else None
    if code is None or spec.origin is None:
        raise ImportError(f"module {spec.name} has no code that could be run", name=spec.name)
    sys.argv[0] = spec.origin
    _execute(code, spec.origin, loader, spec)


def _spec_of(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    return spec


def _execute(code: types.CodeType, path: str, loader: object, spec: ModuleSpec | None) -> None:
    """Runs code as the module `__main__` of the calling rank."""
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __loader__=loader,
        __spec__=spec,
        __package__=None if spec is None else spec.parent,
        __cached__=None if spec is None else spec.cached,
        __builtins__=builtins,
    )
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _places(program: Program) -> tuple[list[str], list[str]]:
    """Returns the folders of the program's own modules, and its `sys.path`."""
    search = [path for path in sys.path[1 if _begins_with_command() else 0 :] if path]
    if not program.is_module:
        folder = os.path.dirname(os.path.realpath(program.name))
        folders, path = [folder], [folder, *search]
    else:
        path = [os.getcwd(), *search]
        top = PathFinder.find_spec(program.name.partition(".")[0], path)
        if top is None:
            raise LaunchError(f"no module is called {program.name!r}: check its name, and that it lies in sys.path")
        folders = [os.getcwd()]
        if top.origin is not None:
            folders.append(_root_of(top))
    # Folders that the user has named are the user's, too.
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*folders, *(os.path.abspath(folder) for folder in named if folder)], path


def _root_of(spec: ModuleSpec) -> str:
    folder = os.path.dirname(os.path.abspath(spec.origin or ""))
    return os.path.dirname(folder) if spec.submodule_search_locations else folder


def _project_of(script: str) -> str | None:
    """Returns the folder of the project in which a script lies. None without one.

    The packages of the project may lie beside the script's folder, as with `pip install -e`.
    """
    folders = [Path(script).resolve().parent, *Path(script).resolve().parents]
    return next((str(folder) for folder in folders if any((folder / name).is_file() for name in _OF_PROJECTS)), None)


def _begins_with_command() -> bool:
    """Whether the first folder of `sys.path` is the command's: `echelon` lies in it, or `python -m` added it."""
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    added = os.getcwd() if is_module else os.path.dirname(os.path.abspath(sys.argv[0]))
    return not sys.flags.safe_path and sys.path[:1] == [added]
