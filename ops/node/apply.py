"""Make planned changes in a root, each noted in the journal before it is made."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ops.node.change import CommandChange, FileChange, ValueChange
from ops.node.errors import NodeError
from ops.node.facts import Facts
from ops.node.formats.os_release import read_distribution
from ops.node.journal import (
    JOURNAL_FOLDER,
    CommandStep,
    FileStep,
    FolderStep,
    Journal,
    ValueStep,
    has_journal,
)
from ops.node.plan import Plan
from ops.node.rollback import put_back
from ops.node.root_folder import RootFolder
from ops.node.running_value import is_same_value, write_value
from ops.node.saved_file import digest_of, put_bytes, save_copy, state_of, sync_folder

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_FOLDER_MODE: Final = 0o755


def check_can_apply(root: RootFolder, facts: Facts, plan: Plan) -> None:
    """Raise NodeError, before anything is changed, if ``plan`` cannot be applied in ``root``.

    In this order: the distribution is unknown; the user is not root; an apply was interrupted; a
    place cannot be written.
    """
    distribution = read_distribution(facts)
    if not distribution.family:
        raise NodeError(
            f"{root.path} holds {distribution.label}; apply knows where files belong on Debian, "
            "Ubuntu, CentOS, RHEL and Rocky only. The plan shows what to change by hand."
        )
    check_privilege(root)
    if has_journal(root):
        with Journal(root, is_made=False) as journal:
            if not journal.at_start.is_applied:
                raise NodeError(
                    "an apply or rollback was interrupted here; first run: pdctl node rollback"
                )
    for place in _places(root, plan):
        _check_writable(place)


def check_privilege(root: RootFolder) -> None:
    """Raise NodeError unless this user may change ``root``."""
    if root.is_this_machine and os.geteuid() != 0:
        raise NodeError("changing this machine needs root; run it again with sudo")


def apply_plan(root: RootFolder, plan: Plan, report: Callable[[str], None]) -> None:
    """Make all changes, or none: if one fails, those before it are put back.

    NodeError: somebody else is at work, a change failed (the sentence says which).
    """
    with root.locked(), Journal(root, is_made=True) as journal:
        first_number = journal.take_number()
        try:
            _make_all(root, plan, journal, report)
            journal.add_applied(_boot_id(root))
        except BaseException as exc:
            # Also for Ctrl-C: half of a plan is worse than none of it.
            report("putting back what was changed")
            text = journal.read()
            put_back(root, journal, [s for s in text.open_steps if s.number > first_number], report)
            if not journal.read().open_steps:
                journal.delete()
            else:
                journal.add_applied(_boot_id(root))
            if isinstance(exc, OSError):
                raise NodeError(f"a change failed, and all is as it was: {exc}") from exc
            if isinstance(exc, NodeError):
                raise NodeError(f"{exc}. All is as it was.") from exc
            raise


def _make_all(
    root: RootFolder, plan: Plan, journal: Journal, report: Callable[[str], None]
) -> None:
    for change in plan.changes:
        match change:
            case FileChange():
                _make_file(root, change, journal, report)
            case ValueChange():
                _make_value(root, change, journal, report)
            case CommandChange():
                _make_by_command(root, change, journal, report)


def _make_file(
    root: RootFolder, change: FileChange, journal: Journal, report: Callable[[str], None]
) -> None:
    place = root.place(change.path)
    for folder in _missing_folders(place):
        journal.add(FolderStep(journal.take_number(), root.shown(folder)))
        folder.mkdir(_FOLDER_MODE)
        folder.chmod(_FOLDER_MODE)
        sync_folder(folder.parent)
    content = change.text.encode()
    old = state_of(place)
    number = journal.take_number()
    if old.is_there:
        save_copy(place, journal.original(number))
    journal.add(FileStep(number, root.shown(place), old, digest_of(content), change.needs))
    if old.is_there:
        put_bytes(place, content, mode=old.mode, owner=(old.uid, old.gid))
    else:
        put_bytes(place, content, mode=change.mode, owner=None)
    report(f"{'changed' if old.is_there else 'made'} {change.path}")


def _make_value(
    root: RootFolder, change: ValueChange, journal: Journal, report: Callable[[str], None]
) -> None:
    place = root.place(change.path)
    old = place.read_bytes()
    journal.add(ValueStep(journal.take_number(), root.shown(place), old, change.value))
    write_value(place, change.value.encode())
    shown = place.read_text(encoding="utf-8", errors="replace")
    if not is_same_value(shown, change.value):
        raise NodeError(
            f"{change.path} shows {' '.join(shown.split())!r} after {change.value!r} was written"
        )
    report(f"set {change.path} to {change.value}")


def _make_by_command(
    root: RootFolder, change: CommandChange, journal: Journal, report: Callable[[str], None]
) -> None:
    number = journal.take_number()
    touched = []
    places = [root.place(path) for path in change.touches]
    for index, place in enumerate(places):
        state = state_of(place)
        if state.is_there:
            save_copy(place, journal.original(number, index))
        touched.append((root.shown(place), state))
    journal.add(CommandStep(number, change.command, tuple(touched)))
    root.run(change.command)
    journal.add_command_end(number, {root.shown(place): state_of(place).digest for place in places})
    report(f"ran {' '.join(change.command)}")


def _boot_id(root: RootFolder) -> str:
    try:
        return root.place(BOOT_ID).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _missing_folders(place: Path) -> Iterator[Path]:
    for folder in reversed(place.parents):
        if not folder.exists():
            yield folder


def _places(root: RootFolder, plan: Plan) -> Iterator[Path]:
    yield root.place(JOURNAL_FOLDER)
    for change in plan.changes:
        paths = change.touches if isinstance(change, CommandChange) else (change.path,)
        for path in paths:
            place = root.place(path)
            # A file is replaced in its folder; a value is written where it is.
            yield place if isinstance(change, ValueChange) else place.parent


def _check_writable(place: Path) -> None:
    there = place
    while not there.exists():
        there = there.parent
    if os.access(there, os.W_OK):
        return
    try:
        is_read_only = bool(os.statvfs(there).f_flag & os.ST_RDONLY)
    except OSError:
        is_read_only = False
    if is_read_only:
        raise NodeError(
            f"{there} is on a read-only file system (an immutable image, or a container); nothing "
            "was changed. Apply on the host itself, or make it writable first."
        )
    raise NodeError(f"{there} cannot be written by this user; nothing was changed. Use sudo.")
