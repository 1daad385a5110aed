"""A throw-away root for the runbooks, a folder of stand-in tools, and a way to compare trees."""

import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ops

RUNBOOKS = Path(ops.__file__).parent / "runbooks"
# All that a runbook may rely on: POSIX tools, coreutils and util-linux of every distribution.
BASIC_TOOLS = (
    *("awk", "basename", "bash", "cat", "chmod", "cmp", "cp", "cut", "date", "diff", "dirname"),
    *("df", "env", "find", "flock", "grep", "head", "id", "ls", "mkdir", "mv", "printf"),
    *("readlink", "rm", "rmdir", "sed", "sh", "sha256sum", "sleep", "sort", "sync", "tac", "tail"),
    *("timeout", "touch", "tr", "uniq", "wc"),
)
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\n'
UBUNTU = 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n'
CENTOS_7 = 'ID="centos"\nID_LIKE="rhel fedora"\nVERSION_ID="7"\n'
ROCKY_9 = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'
DISTRIBUTIONS = {"debian": DEBIAN, "ubuntu": UBUNTU, "centos7": CENTOS_7, "rocky9": ROCKY_9}


@dataclass
class Tree:
    """A root, ``path / "root"``, and the only tools that a runbook finds, ``path / "bin"``."""

    path: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.path / "root"
        self.bin = self.path / "bin"
        self.bin.mkdir(parents=True)
        for name in BASIC_TOOLS:
            real = shutil.which(name)
            if real is not None:
                (self.bin / name).symlink_to(real)
        for folder in ("etc", "var/lib", "proc", "sys"):
            (self.root / folder).mkdir(parents=True)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Make a file below the root, with its folders."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(mode)

    def text(self, path: str) -> str:
        """The content of a file below the root."""
        return (self.root / path.lstrip("/")).read_text(encoding="utf-8")

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link below the root."""
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def tool(self, name: str, script: str) -> None:
        """A stand-in for a tool; runbooks ask tools about a root only if ROOT_TOOLS=yes."""
        target = self.bin / name
        target.unlink(missing_ok=True)
        target.write_text(f"#!{shutil.which('sh')}\n{script}\n", encoding="utf-8")
        target.chmod(0o755)
        self.variables["ROOT_TOOLS"] = "yes"

    def printing(self, name: str, output: str) -> None:
        """A stand-in that prints ``output`` whatever it is asked."""
        self.tool(name, f"cat <<'END'\n{output.rstrip()}\nEND")

    def run(
        self, runbook: str, *arguments: str, answer: str = "", root: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a runbook on the root, with nothing of this process's environment."""
        env = {"PATH": str(self.bin), "ROOT": str(root or self.root), **self.variables}
        return subprocess.run(
            [str(self.bin / "bash"), str(RUNBOOKS / runbook), *arguments],
            input=answer,
            capture_output=True,
            encoding="utf-8",
            timeout=30,
            env=env,
            check=False,
        )

    def findings(self, runbook: str, *arguments: str) -> dict[str, str]:
        """What ``check`` prints: the verdict by subject; asserts that nothing went to stderr."""
        ended = self.run(runbook, "check", *arguments)
        assert ended.stderr == ""
        verdicts = verdicts_in(ended.stdout)
        assert ended.returncode == (1 if "FAIL" in verdicts.values() else 0)
        return verdicts

    def snapshot(self) -> Mapping[str, tuple[str, int, bytes]]:
        """Everything below the root: kind, mode and content by path."""
        entries = {}
        for folder, names, files in os.walk(self.root):
            for name in (*names, *files):
                path = Path(folder) / name
                status = path.lstat()
                kind = stat.filemode(status.st_mode)[0]
                content = b""
                if kind == "l":
                    content = os.fsencode(os.readlink(path))
                elif kind == "-":
                    content = path.read_bytes()
                entries[str(path.relative_to(self.root))] = (
                    kind,
                    stat.S_IMODE(status.st_mode),
                    content,
                )
        return entries


def verdicts_in(output: str) -> dict[str, str]:
    """The verdict of each ``VERDICT check subject: …`` line, by subject."""
    verdicts = {}
    for line in output.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in {"OK", "WARN", "FAIL", "UNKNOWN"}:
            subject = rest.partition(" ")[2].partition(": ")[0]
            verdicts[subject] = verdict
    return verdicts
