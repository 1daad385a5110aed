"""What apply would do, worked out from facts alone, and shown as a diff."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ops.node.change import Change, CommandChange, FileChange, ValueChange
from ops.node.errors import NodeError
from ops.node.facts import Facts
from ops.node.running_value import is_same_value


@dataclass(frozen=True, slots=True)
class Plan:
    """Changes in the order in which they are made; none if all is right."""

    changes: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to change."""
        return not self.changes

    @property
    def needs(self) -> tuple[str, ...]:
        """What a person has to do afterwards, with the files that it is for."""
        return needs_lines(
            (change.path, change.needs) for change in self.changes if isinstance(change, FileChange)
        )

    def lines(self, facts: Facts) -> list[str]:
        """For a person: reason, then diff or values, for every change."""
        lines: list[str] = []
        for change in self.changes:
            lines.append(f"# {change.reason}")
            match change:
                case FileChange():
                    lines.extend(_diff(facts, change))
                case ValueChange():
                    old = facts.text(change.path)
                    shown = "nothing" if old is None else " ".join(old.split())
                    lines.append(f"{change.path}: {shown} -> {change.value}")
                case CommandChange():
                    touches = ", ".join(change.touches)
                    lines.append(f"run: {' '.join(change.command)} (writes {touches})")
        return lines


def plan_of(facts: Facts, changes: Sequence[Change]) -> Plan:
    """The plan for ``changes``, without those that are in force already.

    NodeError if two of them want the same file or value to differ: a defect of our checks.
    """
    wanted: dict[str, str] = {}
    kept: list[Change] = []
    for change in changes:
        match change:
            case FileChange(path=path, text=text):
                is_there = facts.text(path) == text
            case ValueChange(path=path, value=text):
                running = facts.text(path)
                is_there = running is not None and is_same_value(running, text)
            case CommandChange():
                kept.append(change)
                continue
        if wanted.setdefault(path, text) != text:
            raise NodeError(f"two checks want {path} to differ; report this as a defect")
        if not is_there and change not in kept:
            kept.append(change)
    return Plan(tuple(kept))


def needs_lines(needs: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """One line for each thing to do, with all files that wait for it."""
    paths_by_need: dict[str, list[str]] = {}
    for path, need in needs:
        if need and path not in paths_by_need.setdefault(need, []):
            paths_by_need[need].append(path)
    return tuple(f"{need} (for {', '.join(paths)})" for need, paths in paths_by_need.items())


def _diff(facts: Facts, change: FileChange) -> Iterator[str]:
    old = facts.text(change.path)
    yield from difflib.unified_diff(
        [] if old is None else old.splitlines(),
        change.text.splitlines(),
        "/dev/null" if old is None else change.path,
        change.path,
        lineterm="",
    )
