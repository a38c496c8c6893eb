"""Build hook that compiles the native library into the wheel, or beside the sources of an editable installation."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles the library. A failure is a warning: without it ranks use TCP."""

    def dependencies(self) -> list[str]:
        """Returns the compiler to fetch, where the system has none."""
        build = self._build()
        return [build["ZIG"]] if build["is_wanted"]() and build["system_compiler"]() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles before the files of the wheel are collected."""
        del version
        build = self._build()
        if not build["is_wanted"]():
            return
        try:
            made = build["build"]()
        except build["BuildError"] as error:
            self.app.display_warning(f"no native library, so ranks of one host will use TCP: {error}")
            return
        build_data["artifacts"].append(str(Path(made).relative_to(self.root)))
        build_data["pure_python"] = False
        # Any Python, but this machine: nothing of a Python's own layout is in the library.
        build_data["tag"] = f"py3-none-{build['platform_tag']()}"

    def _build(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root, "native", "build.py")))
