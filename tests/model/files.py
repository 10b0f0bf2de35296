"""The model's directory: names, their values since the last sync, and what a crash may bring back."""

from __future__ import annotations

# None: no such file. A data file or index: EMPTY, WRITTEN or DURABLE. A manifest: its save, and one of these.
Value = str | None
EMPTY, WRITTEN, DURABLE = "empty", "written", "durable"
MANIFEST, REMOVAL = "manifest", "removal"
OLD = "old"  # the save of a run that ended long ago

# (name, its values since the last sync of the directory): the last value is the visible one
Directory = tuple[tuple[str, tuple[Value, ...]], ...]


class Files:
    """A directory that a step reads and changes."""

    def __init__(self, directory: Directory) -> None:
        self._names = dict(directory)

    def frozen(self) -> Directory:
        return tuple(sorted((name, values) for name, values in self._names.items() if values != (None,)))

    def values(self, name: str) -> tuple[Value, ...]:
        return self._names.get(name, (None,))

    def get(self, name: str) -> Value:
        return self.values(name)[-1]

    def put(self, name: str, value: Value) -> None:
        """Creates, replaces or unlinks a file."""
        values = self.values(name)
        if value != values[-1]:
            self._names[name] = (*values, value)

    def write(self, name: str, content: str, *, sync: bool) -> None:
        """Changes the content of a file; its name may be durable or not."""
        values = self.values(name)
        if values[-1] is not None:  # else it was unlinked or renamed: the bytes are lost
            end = DURABLE if sync else WRITTEN
            self._names[name] = (*values[:-1], f"{content}{end}")

    def rename(self, old: str, new: str) -> None:
        value = self.get(old)
        self.put(old, None)
        self.put(new, value)

    def sync(self) -> None:
        self._names = {name: values[-1:] for name, values in self._names.items()}

    def listed(self) -> list[str]:
        return sorted(name for name in self._names if self.get(name) is not None)


def save_of(value: Value) -> str | None:
    """Returns the save that a manifest of this content names, None if it cannot be read."""
    save, _, state = (value or "").partition(" ")
    return save if state in (WRITTEN, DURABLE) else None
