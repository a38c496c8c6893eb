"""Files of a recorded program: they are written into a folder of the recording, from which the program reads them back.

Real files stay as they are. A path that the program has written to, or a folder that it has made, is mapped to a path
of the recording.
"""

from __future__ import annotations

import os
from itertools import count


class Overlay:
    """Files of one recorded rank."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        """Paths of the recording, by the paths of the program that are mapped to them."""

    def find(self, path: str) -> str | None:
        """Returns the path to which a path of the program is mapped. None if it is not mapped."""
        if not self._paths:
            return None
        path = os.path.abspath(path)
        parent, rest = path, ""
        while (found := self._paths.get(parent)) is None:
            above, name = os.path.split(parent)
            if above == parent:
                return None
            parent, rest = above, os.path.join(name, rest) if rest else name
        return os.path.join(found, rest) if rest else found

    def origin(self, real: str) -> str | None:
        """Returns the path of the program that is mapped to a path. None if there is none."""
        for path, mapped in self._paths.items():
            if real == mapped or real.startswith(os.path.join(mapped, "")):
                return path + real.removeprefix(mapped)
        return None

    def put(self, path: str, real: str) -> None:
        """Maps a path of the program to another one."""
        self._paths[os.path.abspath(path)] = real

    def drop(self, path: str) -> None:
        """Ends the mapping of a path of the program, and of all paths in it."""
        path = os.path.abspath(path)
        inside = os.path.join(path, "")
        for each in [each for each in self._paths if each == path or each.startswith(inside)]:
            del self._paths[each]

    def names_in(self, folder: str) -> list[str]:
        """Returns the names in a folder of the program that are mapped to other paths."""
        folder = os.path.abspath(folder)
        return [os.path.basename(each) for each in self._paths if os.path.dirname(each) == folder]


class Scratch:
    """Folder of a recording, in which each new file has a folder of its own. Nothing outside of it is ever changed."""

    def __init__(self, folder: str) -> None:
        # Links are followed, as `has` does: the folder of temporary files may be one.
        self._folder = os.path.join(os.path.realpath(folder), "")
        self.temporary = self._folder + "temporary"
        """Folder of the program's temporary files."""
        os.mkdir(self.temporary)
        self._number = count().__next__

    def path_for(self, path: str) -> str:
        """Returns a new path with the name of another one."""
        folder = f"{self._folder}{os.getpid()}.{self._number()}"  # ranks in child processes have the same numbers
        os.mkdir(folder)
        return os.path.join(folder, os.path.basename(os.path.abspath(path)) or "file")

    def has(self, path: str) -> bool:
        """Whether a path lies in the folder, once links are followed."""
        return os.path.realpath(path).startswith(self._folder)
