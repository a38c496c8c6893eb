"""Build hook that compiles the native library into the wheel, or beside the sources of an editable installation."""

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles the library. A failure is a warning: without it ranks use TCP.

    A wheel that others install is asked for by ECHELON_WHEEL_MACHINE: `tools/wheels.py` sets it. There a failure is an
    error, and the compiler is the one of the wheel `ziglang`, whose target and processor are pinned.
    """

    def dependencies(self) -> list[str]:
        """Returns the compiler to fetch, where it is needed."""
        build = self._build()
        if os.environ.get("ECHELON_WHEEL_MACHINE"):
            return [build["ZIG"]]
        return [build["ZIG"]] if build["is_wanted"]() and build["needs_zig"]() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles before the files of the wheel are collected."""
        del version
        build = self._build()
        machine = os.environ.get("ECHELON_WHEEL_MACHINE")
        if machine:
            made, tag = build["build_for"](machine), build["pinned_tag"](machine)
        elif build["is_wanted"]():
            try:
                made, tag = build["build"](), build["platform_tag"]()
            except build["BuildError"] as error:
                self.app.display_warning(f"no native library, so ranks of one host will use TCP: {error}")
                return
        else:
            return
        build_data["artifacts"].append(str(Path(made).relative_to(self.root)))
        build_data["pure_python"] = False
        # Any Python, but one kind of machine: nothing of a Python's own layout is in the library.
        build_data["tag"] = f"py3-none-{tag}"

    def _build(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root, "native", "build.py")))
