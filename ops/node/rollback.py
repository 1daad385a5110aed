"""Put everything back that apply changed, last change first; may be run again after a kill."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ops.node.errors import NodeError
from ops.node.journal import (
    CommandStep,
    FileStep,
    FolderStep,
    Journal,
    JournalText,
    Step,
    ValueStep,
    has_journal,
    remove_staging,
)
from ops.node.plan import needs_lines
from ops.node.root_folder import RootFolder
from ops.node.running_value import is_same_value, restore_value
from ops.node.saved_file import FileState, new_place, put_copy, remove, state_of


def roll_back(
    root: RootFolder, report: Callable[[str], None], *, is_forced: bool = False
) -> tuple[str, ...]:
    """Take back all that the journal of ``root`` holds; what a person has to do afterwards.

    Nothing to take back is fine. NodeError, in this order: somebody else is at work; the journal
    is damaged; an original is missing or damaged; a file or value was changed by somebody since,
    unless ``is_forced``; something cannot be written.
    """
    with root.locked():
        if not has_journal(root):
            is_found = remove_staging(root)
            report("removed an unfinished journal" if is_found else "nothing to take back")
            return ()
        with Journal(root, is_made=False) as journal:
            text = journal.at_start
            _check_originals(journal, text)
            changed = foreign_changes(root, text)
            if changed and not is_forced:
                raise NodeError(
                    f"changed by somebody since apply: {', '.join(changed)}. Nothing was taken "
                    "back; --force overwrites that with what was there before apply."
                )
            journal.add_rollback()
            put_back(root, journal, text.open_steps, report)
            journal.delete()
            return needs_lines(
                [(step.path, step.needs) for step in text.steps if isinstance(step, FileStep)]
            )


def planned_lines(root: RootFolder) -> list[str]:
    """What ``roll_back`` would do, for the question before it."""
    if not has_journal(root):
        return []
    with Journal(root, is_made=False) as journal:
        return [_line(step) for step in reversed(journal.at_start.open_steps)]


def put_back(
    root: RootFolder, journal: Journal, steps: Sequence[Step], report: Callable[[str], None]
) -> None:
    """Undo ``steps``, last first, and note each; NodeError if something cannot be written."""
    for step in reversed(steps):
        try:
            said = _undo(root, journal, step)
            journal.add_undone(step.number)
        except OSError as exc:
            raise NodeError(
                f"cannot go on with the rollback: {exc}; when that is mended, run it again"
            ) from exc
        report(said)


def foreign_changes(root: RootFolder, text: JournalText) -> list[str]:
    """Paths that hold neither what apply put there nor what was there before.

    One path can stand in several steps; going back, each must find what the step before it in time
    left.
    """
    contents: dict[str, str] = {}
    values: dict[str, bytes | None] = {}
    changed: list[str] = []

    def expect(path: str, allowed: set[str], old: FileState) -> None:
        if path not in contents:
            contents[path] = state_of(root.place(path)).digest
        if contents[path] not in allowed and path not in changed:
            changed.append(path)
        contents[path] = old.digest

    for step in reversed(text.open_steps):
        match step:
            case FileStep():
                expect(step.path, {step.new_digest, step.old.digest}, step.old)
            case CommandStep():
                # A command that was killed left something unknown, which is nobody else's.
                after = text.after_command.get(step.number)
                for path, old in step.touched:
                    if after is None:
                        contents[path] = old.digest
                    else:
                        expect(path, {after.get(path, ""), old.digest}, old)
            case ValueStep():
                if step.path not in values:
                    values[step.path] = _shown(root.place(step.path))
                shown = values[step.path]
                if shown is not None and not _is_expected(shown, step):
                    changed.append(step.path)
                values[step.path] = step.old
            case FolderStep():
                pass
    return changed


def _is_expected(shown: bytes, step: ValueStep) -> bool:
    # Empty, or only the word that was chosen: a kill in the middle of writing a plain file.
    return (
        shown in (step.old, b"")
        or is_same_value(_text(shown), step.value)
        or is_same_value(_text(step.old), _text(shown))
    )


def _check_originals(journal: Journal, text: JournalText) -> None:
    for step in text.open_steps:
        states: Mapping[int, FileState] = {}
        if isinstance(step, FileStep):
            states = {0: step.old}
        elif isinstance(step, CommandStep):
            states = {index: state for index, (_, state) in enumerate(step.touched)}
        for index, state in states.items():
            saved = journal.original(step.number, index)
            if state.is_there and state_of(saved).digest != state.digest:
                raise NodeError(
                    f"{saved} is not what was saved there; nothing was taken back. Restore it from "
                    "a backup, or put the files back by hand."
                )


def _undo(root: RootFolder, journal: Journal, step: Step) -> str:
    match step:
        case FolderStep():
            return _undo_folder(root.place(step.path), step.path)
        case FileStep():
            _undo_file(root.place(step.path), journal.original(step.number), step.old)
        case CommandStep():
            for index, (path, state) in enumerate(step.touched):
                _undo_file(root.place(path), journal.original(step.number, index), state)
        case ValueStep():
            place = root.place(step.path)
            shown = _shown(place)
            if shown is None:
                return f"{step.path} is gone, so is its value"
            if shown != step.old:
                restore_value(place, step.old)
    return _line(step)


def _line(step: Step) -> str:
    match step:
        case FolderStep():
            return f"remove the folder {step.path}"
        case FileStep():
            return f"{'put back' if step.old.is_there else 'remove'} {step.path}"
        case ValueStep():
            return f"set {step.path} to {' '.join(_text(step.old).split())} again"
        case CommandStep():
            paths = ", ".join(path for path, _ in step.touched)
            return f"put back what {' '.join(step.command)} wrote: {paths}"


def _undo_folder(place: Path, path: str) -> str:
    try:
        if os.listdir(place):
            return f"the folder {path} stays: somebody put something into it"
        place.rmdir()
    except FileNotFoundError:
        pass
    return f"remove the folder {path}"


def _undo_file(place: Path, saved: Path, old: FileState) -> None:
    if not old.is_there:
        remove(place)
        return
    new_place(place).unlink(missing_ok=True)
    if state_of(place) != old:
        put_copy(place, saved, old)


def _shown(place: Path) -> bytes | None:
    try:
        return place.read_bytes()
    except OSError:
        return None


def _text(shown: bytes) -> str:
    return shown.decode("utf-8", errors="replace")
