"""Facts about a machine: files, folders and what commands print, from here or from a dump.

Every check asks a ``Facts`` and nothing else, so the same check runs on this machine, on a dump of
another one and on a tree made by a test. A fact that cannot be had is an answer as well: None for
a file that is not there, ``CommandOutput.missing`` for a tool that is not installed.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from ops.node.errors import NodeError
from ops.node.root_folder import RootFolder

# A file of /proc or /etc that is larger than this is not one that a check wants to read.
MAX_FILE_NBYTES: Final = 1024 * 1024
MAX_OUTPUT_NBYTES: Final = 4 * 1024 * 1024
COMMAND_TIMEOUT_S: Final = 3.0
DUMP_VERSION: Final = 1
NOT_FOUND_EXIT_CODE: Final = 127
TIMED_OUT_EXIT_CODE: Final = 124
_PUBLIC_VARIABLE: Final = re.compile(r"(LANG|LANGUAGE|LC_\w+|PYTHON\w+)=")


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """How a command ended; exit code 127 if it is not installed, 124 if it took too long."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def is_missing(self) -> bool:
        """True if the tool is not installed here (or was not asked when the dump was made)."""
        return self.exit_code == NOT_FOUND_EXIT_CODE

    @property
    def is_ok(self) -> bool:
        """True if it ended with exit code 0."""
        return self.exit_code == 0


class Facts(Protocol):
    """What checks may ask. Paths are absolute and those of the machine that is looked at."""

    def text(self, path: str) -> str | None:
        """The file, decoded as UTF-8 with replacement; None if absent, unreadable or too large."""

    def names(self, path: str) -> tuple[str, ...]:
        """The sorted names in a folder; none if it is absent or unreadable."""

    def link(self, path: str) -> str | None:
        """The target of a symbolic link as written; None if it is none."""

    def run(self, *command: str) -> CommandOutput:
        """What ``command`` prints, in the C.UTF-8 locale; only commands that look."""

    def environment(self, name: str) -> str | None:
        """A variable of the process that looks."""


class LiveFacts:
    """This machine, or the tree of files below ``root`` with commands of this machine.

    Args:
        root: prefix of all paths; a test's tree, or "/".
        runs_commands: False: every command counts as not installed, as in a foreign root.
    """

    def __init__(self, root: Path = Path("/"), *, runs_commands: bool = True) -> None:
        self._root = RootFolder(root)
        self._runs_commands = runs_commands

    def _path(self, path: str) -> Path:
        """Where a path lies; links of another root stay inside it. OSError if they circle."""
        if self._root.is_this_machine:
            return Path(path)
        try:
            return self._root.place(path)
        except NodeError as exc:
            raise OSError(str(exc)) from exc

    def text(self, path: str) -> str | None:
        """See ``Facts.text``."""
        try:
            with self._path(path).open("rb") as file:
                content = file.read(MAX_FILE_NBYTES + 1)
        except OSError:
            return None
        if len(content) > MAX_FILE_NBYTES:
            return None
        return content.decode("utf-8", errors="replace")

    def names(self, path: str) -> tuple[str, ...]:
        """See ``Facts.names``."""
        try:
            return tuple(sorted(os.listdir(self._path(path))))
        except OSError:
            return ()

    def link(self, path: str) -> str | None:
        """See ``Facts.link``."""
        folder, _, name = path.rpartition("/")
        try:
            return os.readlink(self._path(folder or "/") / name)
        except OSError:
            return None

    def run(self, *command: str) -> CommandOutput:
        """See ``Facts.run``."""
        if not self._runs_commands:
            return CommandOutput(NOT_FOUND_EXIT_CODE, "", "")
        env = {**os.environ, "LC_ALL": "C.UTF-8", "LANGUAGE": ""}
        env["PATH"] = f"{env.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                env=env,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CommandOutput(TIMED_OUT_EXIT_CODE, "", f"no end within {COMMAND_TIMEOUT_S:g} s")
        except OSError as exc:
            return CommandOutput(NOT_FOUND_EXIT_CODE, "", str(exc))
        return CommandOutput(ended.returncode, _decoded(ended.stdout), _decoded(ended.stderr))

    def environment(self, name: str) -> str | None:
        """See ``Facts.environment``."""
        return os.environ.get(name)


def _decoded(output: bytes) -> str:
    return output[:MAX_OUTPUT_NBYTES].decode("utf-8", errors="replace")


class RecordedFacts:
    """Facts that were recorded: a dump of a machine, or canned ones of a test."""

    def __init__(
        self,
        *,
        files: Mapping[str, str] | None = None,
        folders: Mapping[str, Sequence[str]] | None = None,
        links: Mapping[str, str] | None = None,
        commands: Mapping[str, CommandOutput] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._files = dict(files or {})
        self._folders = {path: tuple(names) for path, names in (folders or {}).items()}
        self._links = dict(links or {})
        self._commands = dict(commands or {})
        self._variables = dict(variables or {})

    def text(self, path: str) -> str | None:
        """See ``Facts.text``."""
        return self._files.get(path)

    def names(self, path: str) -> tuple[str, ...]:
        """See ``Facts.names``. Files that were recorded below a folder are in it as well."""
        prefix = path.rstrip("/") + "/"
        names = {
            known[len(prefix) :].partition("/")[0]
            for known in (*self._files, *self._folders, *self._links)
            if known.startswith(prefix) and known != prefix
        }
        return tuple(sorted(names.union(self._folders.get(path.rstrip("/"), ()))))

    def link(self, path: str) -> str | None:
        """See ``Facts.link``."""
        return self._links.get(path)

    def run(self, *command: str) -> CommandOutput:
        """See ``Facts.run``: the command line joined by blanks is the key."""
        return self._commands.get(" ".join(command), CommandOutput(NOT_FOUND_EXIT_CODE, "", ""))

    def environment(self, name: str) -> str | None:
        """See ``Facts.environment``."""
        return self._variables.get(name)


class RecordingFacts:
    """Passes questions on and keeps the answers: what ``pdctl node dump`` writes."""

    def __init__(self, source: Facts) -> None:
        self._source = source
        self._files: dict[str, str] = {}
        self._folders: dict[str, list[str]] = {}
        self._links: dict[str, str] = {}
        self._commands: dict[str, CommandOutput] = {}
        self._variables: dict[str, str] = {}

    def text(self, path: str) -> str | None:
        """See ``Facts.text``."""
        content = self._source.text(path)
        if content is not None:
            # Environments hold passwords; a dump is sent around.
            separator = "\0" if path.endswith("/environ") else None
            self._files[path] = content if separator is None else _public(content, separator)
        return content

    def names(self, path: str) -> tuple[str, ...]:
        """See ``Facts.names``."""
        names = self._source.names(path)
        if names:
            self._folders[path.rstrip("/")] = list(names)
        return names

    def link(self, path: str) -> str | None:
        """See ``Facts.link``."""
        target = self._source.link(path)
        if target is not None:
            self._links[path] = target
        return target

    def run(self, *command: str) -> CommandOutput:
        """See ``Facts.run``."""
        output = self._source.run(*command)
        if not output.is_missing:
            kept = output
            if command[-1] == "show-environment":
                kept = replace(output, stdout=_public(output.stdout, "\n"))
            self._commands[" ".join(command)] = kept
        return output

    def environment(self, name: str) -> str | None:
        """See ``Facts.environment``."""
        value = self._source.environment(name)
        if value is not None:
            self._variables[name] = value
        return value

    def as_json(self) -> str:
        """The dump."""
        dump = {
            "dump_version": DUMP_VERSION,
            "files": self._files,
            "folders": self._folders,
            "links": self._links,
            "commands": {line: asdict(output) for line, output in self._commands.items()},
            "variables": self._variables,
        }
        return json.dumps(dump, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _public(variables: str, separator: str) -> str:
    """Only the variables of locale and Python among ``variables``."""
    kept = (line for line in variables.split(separator) if _PUBLIC_VARIABLE.match(line))
    return "".join(line + separator for line in kept)


def read_dump(path: Path) -> RecordedFacts:
    """The facts in a file made by ``pdctl node dump``.

    NodeError, in this order: the file cannot be read; it is not UTF-8 JSON; it is no dump, or one
    of another version; an entry has the wrong type.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise NodeError(f"the dump {path} cannot be read: {exc}") from exc
    try:
        dump = json.loads(content)
    except ValueError as exc:
        raise NodeError(f"{path} is not JSON ({exc}); make it with: pdctl node dump") from exc
    if not isinstance(dump, dict) or "dump_version" not in dump:
        raise NodeError(f"{path} is no dump of a node; make one with: pdctl node dump")
    if dump["dump_version"] != DUMP_VERSION:
        raise NodeError(
            f"{path} is a dump of version {dump['dump_version']!r}, this program reads version "
            f"{DUMP_VERSION}; make it again with this version's: pdctl node dump"
        )
    try:
        return RecordedFacts(
            files=_strings(dump["files"]),
            folders={name: tuple(map(str, names)) for name, names in dump["folders"].items()},
            links=_strings(dump["links"]),
            commands={
                line: CommandOutput(
                    int(output["exit_code"]), str(output["stdout"]), str(output["stderr"])
                )
                for line, output in dump["commands"].items()
            },
            variables=_strings(dump["variables"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise NodeError(f"{path} is a damaged dump ({exc!r}); make it again") from exc


def _strings(entries: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in entries.items()}
