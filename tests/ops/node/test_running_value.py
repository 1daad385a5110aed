import subprocess
import sys
from pathlib import Path

import pytest

from ops.node.running_value import is_same_value, restore_value, write_value

# In namespaces of its own: changes real values of the kernel, and puts them back.
PROGRAM = """
import sys
from pathlib import Path
from ops.node.apply import apply_plan
from ops.node.change import ValueChange
from ops.node.plan import Plan
from ops.node.rollback import roll_back
from ops.node.root_folder import RootFolder
wanted = {
    "/proc/sys/net/ipv4/tcp_rmem": "4096 131072 268435456",
    "/proc/sys/net/ipv4/tcp_mtu_probing": "2",
    "/proc/sys/net/ipv4/neigh/lo/base_reachable_time_ms": "1000",
}
before = {path: Path(path).read_bytes() for path in wanted}
root = RootFolder()
plan = Plan(tuple(ValueChange(path, value, "x") for path, value in wanted.items()))
apply_plan(root, plan, lambda _: None)
for path, value in wanted.items():
    assert Path(path).read_text(encoding="utf-8").split() == value.split(), path
roll_back(root, lambda _: None)
assert before == {path: Path(path).read_bytes() for path in wanted}
print("as before")
"""


@pytest.mark.parametrize(
    ("shown", "wanted", "expected"),
    [
        ("268435456\n", "268435456", True),
        ("4096\t131072\t268435456\n", "4096 131072 268435456", True),
        ("always [madvise] never\n", "madvise", True),
        ("always [madvise] never\n", "always", False),
        ("always [madvise] never\n", "always [madvise] never", True),
        ("1\n", "10", False),
        ("", "1", False),
    ],
)
def test_is_same_value(shown: str, wanted: str, expected: bool) -> None:
    assert is_same_value(shown, wanted) is expected


@pytest.mark.parametrize("shown", [b"1\n", b"always [madvise] never\n", b"", b"\xff[x]\n"])
def test_a_plain_file_comes_back_byte_for_byte(shown: bytes, tmp_path: Path) -> None:
    place = tmp_path / "value"
    place.write_bytes(shown)
    write_value(place, b"never")
    assert place.read_bytes() == b"never"
    restore_value(place, shown)
    assert place.read_bytes() == shown


def test_a_choice_of_the_kernel_takes_only_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for /sys: it takes a word and shows the list with that word in brackets."""
    place = tmp_path / "choice"
    words = [b"always", b"madvise", b"never"]

    def kernel(there: Path, value: bytes) -> None:
        if value not in words:
            raise OSError(22, "Invalid argument")
        shown = [b"[" + word + b"]" if word == value else word for word in words]
        there.write_bytes(b" ".join(shown) + b"\n")

    monkeypatch.setattr("ops.node.running_value.write_value", kernel)
    kernel(place, b"madvise")
    before = place.read_bytes()
    kernel(place, b"never")
    restore_value(place, before)
    assert place.read_bytes() == before


def test_real_values_of_the_kernel(program_env: dict[str, str]) -> None:
    script = (
        "mount -t tmpfs none /var/lib && "
        "test -w /proc/sys/net/ipv4/neigh/lo/base_reachable_time_ms || exit 77; "
        'exec "$0" -c "$1"'
    )
    try:
        result = subprocess.run(
            [
                *("unshare", "--net", "--mount", "sh", "-c", script),
                *(sys.executable, PROGRAM),
            ],
            capture_output=True,
            encoding="utf-8",
            env=program_env,
            timeout=50,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if result.returncode == 77 or "unshare:" in result.stderr or "mount:" in result.stderr:
        pytest.skip("namespaces cannot be made here")
    assert result.stdout == "as before\n", result.stderr
