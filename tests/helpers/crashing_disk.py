"""A disk in memory that remembers its calls, and becomes the disk after a crash between any two of them.

Bytes that were not synced are lost, torn or there. So is each change of names in a folder that was not synced.
"""

import errno
import os
import random

from echelon.checkpoint.files.fs import FileSystem, Input, Output, exchange_by_renames

_SECTOR = 512


class File:
    def __init__(self, data=b""):
        self.data = bytearray(data)
        self.synced = bytes(data)
        self.pending = []  # (position, bytes), since the last sync

    def after_crash(self, rng, fate, seen):
        data = bytearray(self.synced)
        for position, new in self.pending:
            if fate(rng):
                kept = new
            elif rng.random() < 0.5:
                continue
            else:  # some sectors of it; those before the last one that arrived are zeros
                kept = b"".join(
                    new[at : at + _SECTOR] if rng.random() < 0.5 else bytes(len(new[at : at + _SECTOR]))
                    for at in range(0, len(new), _SECTOR)
                )
                kept = kept[: rng.randrange(len(kept) + 1)]
            if len(data) < position + len(kept):
                data.extend(bytes(position + len(kept) - len(data)))
            data[position : position + len(kept)] = kept
        return File(data)


class Folder:
    def __init__(self, names=()):
        self.names = dict(names)
        self.synced = dict(names)
        self.pending = []  # {name: file or folder or None}, since the last sync

    def after_crash(self, rng, fate, seen):
        names = dict(self.synced)
        for changes in self.pending:
            if fate(rng):
                names |= changes
        kept = {}
        for name, node in names.items():
            if node is not None:
                if id(node) not in seen:
                    seen[id(node)] = node.after_crash(rng, fate, seen)
                kept[name] = seen[id(node)]
        return Folder(kept)


FATES = {
    "all lost": lambda _: False,
    "all kept": lambda _: True,
    "some": lambda rng: rng.random() < 0.5,
    "most": lambda rng: rng.random() < 0.9,
}


class CrashingDisk(FileSystem):
    """File system in memory. `log` has its calls, which `replayed` repeats up to a number of them."""

    def __init__(self, root=None, exchanges=True):
        self.root = root or Folder()
        self.exchanges = exchanges  # NFS does not
        self.log = []

    def mark(self, value):
        """Notes something between two calls."""
        self._did("mark", value)

    def replayed(self, count):
        """Returns a disk after the first `count` calls, and the last mark among them."""
        disk, last = CrashingDisk(), None
        for name, *arguments in self.log[:count]:
            if name == "mark":
                last = arguments[0]
            else:
                getattr(disk, "_" + name)(*arguments)
        return disk, last

    def crashed(self, seed):
        """Returns this disk as a crash now leaves it, one of many ways by the seed."""
        rng = random.Random(seed)
        fate = rng.choice(list(FATES.values()))
        return CrashingDisk(self.root.after_crash(rng, fate, {}))

    # The file system

    def create(self, path):
        self._do("new", path)
        return _Output(self, path)

    def open(self, path):
        node = self._node(path)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return _Input(node)

    def lock(self, path):
        return _Lock(path)

    def make_folder(self, path):
        self._do("mkdir", path)

    def is_folder(self, path):
        try:
            return isinstance(self._node(path), Folder)
        except OSError:
            return False

    def list_folder(self, path):
        node = self._node(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return list(node.names)

    def sync_folder(self, path):
        self._do("sync_names", path)

    def rename(self, old, new):
        self._do("move", old, new)

    def exchange(self, one, other):
        if self.exchanges:
            self._do("swap", one, other)
        else:
            exchange_by_renames(self, one, other)

    def remove(self, path):
        self._do("unlink", path)

    def remove_folder(self, path):
        self._do("rmdir", path)

    # Calls as they are logged

    def _do(self, name, *arguments):
        getattr(self, "_" + name)(*arguments)
        self._did(name, *arguments)

    def _did(self, *call):
        self.log.append(call)

    def _new(self, path):
        self._add(path, File())

    def _mkdir(self, path):
        self._add(path, Folder())

    def _append(self, path, data):
        file = self._node(path)
        file.pending.append((len(file.data), data))
        file.data += data

    def _sync(self, path):
        file = self._node(path)
        file.synced, file.pending = bytes(file.data), []

    def _sync_names(self, path):
        folder = self._node(path)
        folder.synced, folder.pending = dict(folder.names), []

    def _move(self, old, new):
        folder, source = self._parent(old)
        other, target = self._parent(new)
        assert folder is other, "only names in one folder change at once"
        if target in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        self._set(folder, {source: None, target: folder.names[source]})

    def _swap(self, one, other):
        folder, first = self._parent(one)
        _, second = self._parent(other)
        self._set(folder, {first: folder.names[second], second: folder.names[first]})

    def _unlink(self, path):
        folder, name = self._parent(path)
        assert isinstance(folder.names[name], File)
        self._set(folder, {name: None})

    def _rmdir(self, path):
        folder, name = self._parent(path)
        assert not folder.names[name].names, f"{path} is not empty"
        self._set(folder, {name: None})

    def _add(self, path, node):
        folder, name = self._parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._set(folder, {name: node})

    def _set(self, folder, changes):
        folder.pending.append(changes)
        folder.names = {name: node for name, node in (folder.names | changes).items() if node is not None}

    def _parent(self, path):
        before, _, name = path.rpartition("/")
        return self._node(before), name

    def _node(self, path):
        node = self.root
        for name in path.strip("/").split("/") if path.strip("/") else ():
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.names[name]
        return node


class _Output(Output):
    def __init__(self, disk, path):
        self._disk, self._path = disk, path

    def write(self, data):
        self._disk._do("append", self._path, bytes(data))

    def sync(self):
        self._disk._do("sync", self._path)

    def close(self):
        pass


class _Input(Input):
    def __init__(self, file):
        self._data = bytes(file.data)
        self.size = len(self._data)

    def read_into(self, position, out):
        data = self._data[position : position + len(out)]
        out[: len(data)] = data
        return len(data)

    def prefetch(self, position, size):
        pass

    def close(self):
        pass


class _Lock:
    def __init__(self, path):
        self.path = path

    def try_take(self):
        return True

    def close(self):
        pass
