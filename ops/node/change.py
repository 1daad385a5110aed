"""What would be changed: whole files of our own and values of the running kernel."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that shall have ``text``, whole. Ours, or one that only one owner may have.

    Attributes:
        path: absolute, on the machine that is changed.
        text: what it shall hold (UTF-8, ends with a newline).
        reason: one sentence for the plan.
        mode: permissions of a new file; an existing one keeps its own.
        needs: what makes it count, for a person to do ("reboot", "systemctl daemon-reload"), or ""
            for nothing. Never done unasked.
    """

    path: str
    text: str
    reason: str
    mode: int = 0o644
    needs: str = ""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value below /proc/sys or /sys that shall be ``value`` now; a file makes it last.

    Attributes:
        path: absolute path of the value's file.
        value: what to write, without a newline.
        reason: one sentence for the plan.
    """

    path: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class CommandChange:
    """A command that makes a change which cannot be written as a text, such as locale-gen.

    Attributes:
        command: run without a shell, in the changed root.
        touches: the files that it writes; they are saved before and put back by rollback.
        reason: one sentence for the plan.
    """

    command: tuple[str, ...]
    touches: tuple[str, ...]
    reason: str


Change = FileChange | ValueChange | CommandChange
