"""What was changed and how it was before: written, and on the disk, before each change.

    /var/lib/pdserve/node/journal.jsonl    one line a step
    /var/lib/pdserve/node/originals/N      the bytes that step N replaces

A line that a kill tore is the last one, and its change had not begun. The folder comes and goes in
one step: it is made beside its place under ``STAGING_NAME`` and renamed, and the same backwards.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.node.errors import NodeError
from ops.node.root_folder import RootFolder
from ops.node.saved_file import FileState, state_from, sync_folder

JOURNAL_FOLDER: Final = "/var/lib/pdserve/node"
JOURNAL_FILE: Final = f"{JOURNAL_FOLDER}/journal.jsonl"
JOURNAL_VERSION: Final = 1
STAGING_NAME: Final = ".pdserve-node-journal"
_FILE_NAME: Final = "journal.jsonl"
_ORIGINALS: Final = "originals"


@dataclass(frozen=True, slots=True)
class FolderStep:
    """A folder that was made."""

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class FileStep:
    """A file that got a new content.

    Attributes:
        path: where it lies, links followed.
        old: what was there.
        new_digest: what was put there.
        needs: what makes it count, as in ``FileChange``.
    """

    number: int
    path: str
    old: FileState
    new_digest: str
    needs: str


@dataclass(frozen=True, slots=True)
class ValueStep:
    """A running value that was changed; ``old`` is all that its file showed."""

    number: int
    path: str
    old: bytes
    value: str


@dataclass(frozen=True, slots=True)
class CommandStep:
    """A command that was run; ``touched`` are the files it writes, as they were."""

    number: int
    command: tuple[str, ...]
    touched: tuple[tuple[str, FileState], ...]


Step = FolderStep | FileStep | ValueStep | CommandStep


@dataclass(frozen=True, slots=True)
class JournalText:
    """A journal as read.

    Attributes:
        made_folders: folders that were made for the journal itself.
        steps: in the order of the changes.
        after_command: digests of the touched files after each command that ended, by number.
        undone: steps that rollback has put back.
        is_applied: the last apply came to its end, and no rollback was begun after it.
        boot_id: the boot in which the last apply ended; "" if it is not known.
    """

    made_folders: tuple[str, ...]
    steps: tuple[Step, ...]
    after_command: Mapping[int, Mapping[str, str]]
    undone: frozenset[int]
    is_applied: bool
    boot_id: str

    @property
    def open_steps(self) -> tuple[Step, ...]:
        """Steps that have not been put back."""
        return tuple(step for step in self.steps if step.number not in self.undone)


def parse_journal(text: str, where: str) -> JournalText:
    """The journal in ``text``; NodeError, naming ``where``, if it is damaged or of another version.

    An unfinished last line is no damage.
    """
    steps: list[Step] = []
    made_folders: tuple[str, ...] = ()
    after_command: dict[int, dict[str, str]] = {}
    undone: set[int] = set()
    is_applied, boot_id = False, ""
    for line in text.split("\n")[:-1]:
        try:
            entry = json.loads(line)
            match entry["kind"]:
                case "journal":
                    if entry["version"] != JOURNAL_VERSION:
                        raise NodeError(
                            f"{where} is of version {entry['version']!r}, this program knows "
                            f"{JOURNAL_VERSION}; roll back with the program that wrote it"
                        )
                    made_folders = tuple(map(str, entry["made_folders"]))
                case "applied":
                    is_applied, boot_id = True, str(entry["boot_id"])
                case "rollback":
                    is_applied = False
                case "ended":
                    after_command[int(entry["number"])] = dict(entry["digests"])
                case "undone":
                    undone.add(int(entry["number"]))
                case _:
                    steps.append(_step_from(entry))
                    is_applied = False
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise NodeError(
                f"{where} is damaged ({exc!r}); the originals beside it are whole, put them back "
                "by hand"
            ) from exc
    return JournalText(
        made_folders, tuple(steps), after_command, frozenset(undone), is_applied, boot_id
    )


def _step_from(entry: Any) -> Step:
    number = int(entry["number"])
    match entry["kind"]:
        case "folder":
            return FolderStep(number, str(entry["path"]))
        case "file":
            return FileStep(
                number,
                str(entry["path"]),
                state_from(entry["old"]),
                str(entry["new_digest"]),
                str(entry["needs"]),
            )
        case "value":
            old = str(entry["old"]).encode("utf-8", errors="surrogateescape")
            return ValueStep(number, str(entry["path"]), old, str(entry["value"]))
        case "command":
            touched = ((str(path), state_from(state)) for path, state in entry["touched"])
            return CommandStep(number, tuple(map(str, entry["command"])), tuple(touched))
    raise ValueError(f"kind {entry['kind']!r}")


def _entry_of(step: Step) -> dict[str, Any]:
    match step:
        case FolderStep():
            return {"kind": "folder", "path": step.path}
        case FileStep():
            return {
                "kind": "file",
                "path": step.path,
                "old": step.old.as_dict(),
                "new_digest": step.new_digest,
                "needs": step.needs,
            }
        case ValueStep():
            old = step.old.decode("utf-8", errors="surrogateescape")
            return {"kind": "value", "path": step.path, "old": old, "value": step.value}
        case CommandStep():
            touched = [[path, state.as_dict()] for path, state in step.touched]
            return {"kind": "command", "command": list(step.command), "touched": touched}


class Journal:
    """The journal of one root, open for more lines.

    Args:
        root: whose changes it holds.
        is_made: make it if there is none; else NodeError if there is none.
    """

    def __init__(self, root: RootFolder, *, is_made: bool) -> None:
        self._root = root
        self._folder = root.place(JOURNAL_FOLDER)
        if not (self._folder / _FILE_NAME).exists():
            if not is_made:
                raise NodeError(f"there is no journal in {self._folder}: nothing to take back")
            try:
                self._make()
            except OSError as exc:
                raise NodeError(f"the journal {self._folder} cannot be made: {exc}") from exc
        self._file = (self._folder / _FILE_NAME).open("r+b", buffering=0)
        content = self._file.read() or b""
        # A torn last line is cut off, so that the next one stands alone.
        self._file.seek(content.rfind(b"\n") + 1)
        self._file.truncate()
        where = str(self._folder / _FILE_NAME)
        try:
            self._text = parse_journal(content.decode("utf-8", errors="replace"), where)
        except NodeError:
            self._file.close()
            raise
        self._next_number = 1 + max((step.number for step in self._text.steps), default=0)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def at_start(self) -> JournalText:
        """What it held when it was opened."""
        return self._text

    def read(self) -> JournalText:
        """What it holds now."""
        text = (self._folder / _FILE_NAME).read_text(encoding="utf-8")
        return parse_journal(text, str(self._folder / _FILE_NAME))

    def take_number(self) -> int:
        """The number of the next step; its originals can be saved under it before it is added."""
        self._next_number += 1
        return self._next_number - 1

    def original(self, number: int, index: int = 0) -> Path:
        """Where the bytes that step ``number`` replaces are kept, one for each file it touches."""
        return self._folder / _ORIGINALS / (f"{number}" if index == 0 else f"{number}.{index}")

    def add(self, step: Step) -> None:
        """On the disk when this returns; only then may the change be made."""
        self._write({**_entry_of(step), "number": step.number})

    def add_command_end(self, number: int, digests: Mapping[str, str]) -> None:
        """What a command left in the files it touches."""
        self._write({"kind": "ended", "number": number, "digests": dict(digests)})

    def add_undone(self, number: int) -> None:
        """A step has been put back."""
        self._write({"kind": "undone", "number": number})

    def add_applied(self, boot_id: str) -> None:
        """All changes of an apply are made."""
        self._write({"kind": "applied", "boot_id": boot_id})

    def add_rollback(self) -> None:
        """A rollback begins."""
        self._write({"kind": "rollback"})

    def delete(self) -> None:
        """Remove the journal, and the folders made for it unless something else is in them."""
        self._file.close()
        gone = self._folder
        for path in reversed(self._text.made_folders):
            folder = self._root.place(path)
            if folder == gone.parent and os.listdir(folder) == [gone.name]:
                gone = folder
        staging = gone.with_name(STAGING_NAME)
        os.rename(gone, staging)
        sync_folder(staging.parent)
        shutil.rmtree(staging)
        sync_folder(staging.parent)

    def _write(self, entry: Mapping[str, Any]) -> None:
        """A line is there whole or not at all, also when the disk is full."""
        start = self._file.tell()
        try:
            self._append(json.dumps(entry).encode() + b"\n")
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise

    def _append(self, line: bytes) -> None:
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        os.fsync(self._file.fileno())

    def _make(self) -> None:
        """The folder with the first line in it appears at once, or not at all."""
        remove_staging(self._root)
        missing = list(_missing_folders(self._folder))
        if not missing:
            raise NodeError(
                f"{self._folder} is there and holds no journal; look into it and move it away"
            )
        top = missing[0]
        staging = top.with_name(STAGING_NAME)
        bottom = staging / self._folder.relative_to(top)
        (bottom / _ORIGINALS).mkdir(parents=True, exist_ok=True)
        for folder in (bottom, bottom / _ORIGINALS):
            folder.chmod(0o700)
        header = {
            "kind": "journal",
            "version": JOURNAL_VERSION,
            "made_folders": [self._root.shown(folder) for folder in missing],
        }
        new = bottom / f".{_FILE_NAME}.new"
        with new.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, bottom / _FILE_NAME)
        for folder in (bottom, *bottom.parents):
            sync_folder(folder)
            if folder == staging:
                break
        os.rename(staging, top)
        sync_folder(top.parent)


def remove_staging(root: RootFolder) -> bool:
    """Remove what a kill left of a journal that was not there yet or not there any more.

    True if there was something.
    """
    is_found = False
    folder = root.place(JOURNAL_FOLDER)
    for parent in folder.parents:
        staging = parent / STAGING_NAME
        if staging.is_dir() and not staging.is_symlink():
            shutil.rmtree(staging)
            is_found = True
        if parent == root.path:
            break
    return is_found


def has_journal(root: RootFolder) -> bool:
    """True if changes were made in this root and not taken back; NodeError if it is not shown."""
    try:
        return (root.place(JOURNAL_FOLDER) / _FILE_NAME).exists()
    except OSError as exc:
        raise NodeError(f"the journal cannot be looked at: {exc}; use sudo") from exc


def _missing_folders(folder: Path) -> Iterator[Path]:
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileNotFoundError):
            path.lstat()
            continue
        yield path
