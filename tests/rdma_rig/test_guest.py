import os
import shutil
import subprocess
from io import BytesIO
from pathlib import Path

import pytest

from tests.rdma.network import DEVICES
from tests.rdma.rig import guest
from tests.rdma.rig.guest import NOT_RUN, TIMED_OUT, Command, Ending, Guest

_FOLDER = Path(guest.__file__).parent
# In place of a kernel: it finds the control folder and the output as the guest would.
_PREAMBLE = """\
#!/bin/sh
for argument; do
    case $argument in
    rig_control=*) control=${argument#*=} ;;
    con0=null,fd:*) output=/proc/self/fd/${argument#*:} ;;
    esac
done
echo "kernel says hello"
"""

needs_taskset = pytest.mark.skipif(not shutil.which("taskset"), reason="taskset is not installed")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    folder = tmp_path / "it's here"
    folder.mkdir()
    return Command(("printf", "%s|", "two words", "it's", "$HOME"), folder, {"NAME": "a 'b' $c"})


def _run(tmp_path: Path, body: str, command: Command, timeout_s: float = 30) -> tuple[Ending, str]:
    kernel = tmp_path / "kernel"
    kernel.write_text(_PREAMBLE + body, encoding="utf-8")
    kernel.chmod(0o755)
    output = BytesIO()
    ending = Guest(kernel, 1 << 30).run(command, output, timeout_s=timeout_s)
    return ending, output.getvalue().decode()


def test_the_command_keeps_its_words_folder_and_environment(command: Command) -> None:
    text = guest.command_text(command)
    result = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert result.stdout == "two words|it's|$HOME|"
    shown = guest.command_text(
        Command(("sh", "-c", 'pwd; echo "$NAME"'), command.folder, command.env)
    )
    result = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    assert result.stdout == f"{command.folder}\na 'b' $c\n"


@pytest.mark.parametrize("shares", [[], ["/some where", "/b"]])
def test_the_settings_are_shell_text(shares: list[str]) -> None:
    text = guest.settings_text([Path(share) for share in shares])
    script = f'mkdir() {{ :; }}; mount() {{ echo "$4|"; }}; {text}\nmount_shares; echo $mtu'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [*(f"{share}|" for share in shares), "4200"]


@pytest.mark.parametrize("name", sorted(path.name for path in _FOLDER.glob("*.sh")))
def test_the_scripts_are_shell_text(name: str) -> None:
    subprocess.run(["sh", "-n", str(_FOLDER / name)], check=True)


def test_network_and_topology_agree_on_the_devices() -> None:
    texts = [(_FOLDER / name).read_text(encoding="utf-8") for name in ("pair.sh", "pair.routes")]
    assert all(device in text for device in DEVICES for text in texts)


def test_the_kernel_starts_init_and_writes_to_our_descriptor(tmp_path: Path) -> None:
    words = Guest(Path("/k"), 3 << 30).kernel_command(tmp_path, 7, 1)
    assert words[:5] == ["taskset", "-c", "1", "/k", "mem=3072M"]
    assert f"init={tmp_path}/init.sh" in words
    assert "con0=null,fd:7" in words


@needs_taskset
def test_output_and_status_come_out(tmp_path: Path, command: Command) -> None:
    body = "echo 0.6 >$control/booted; sh $control/command.sh >$output; echo 3 >$control/status\n"
    ending, output = _run(tmp_path, body, command)
    assert output == "two words|it's|$HOME|"
    assert ending == Ending(3, 0.6, "kernel says hello")


@needs_taskset
def test_much_output_comes_out_whole(tmp_path: Path, command: Command) -> None:
    body = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done >$output\n"
    _, output = _run(tmp_path, body, command)
    assert output.splitlines() == [f"line {i}" for i in range(20000)]


@needs_taskset
def test_a_guest_that_dies_has_no_status(tmp_path: Path, command: Command) -> None:
    ending, _ = _run(tmp_path, "echo panic; kill -9 $$\n", command)
    assert ending == Ending(NOT_RUN, None, "kernel says hello\npanic")


@needs_taskset
def test_a_guest_that_hangs_is_stopped_with_all_its_processes(
    tmp_path: Path, command: Command
) -> None:
    body = f"sleep 1000 & echo $! >{tmp_path}/pid; echo before >$output; wait\n"
    ending, output = _run(tmp_path, body, command, timeout_s=1)
    assert ending.status == TIMED_OUT
    assert output == "before\n"
    # The output ended, so nobody holds it any more; the process may still be a zombie of init's.
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@needs_taskset
def test_our_own_output_stays_blocking(tmp_path: Path, command: Command) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb") as output:
        kernel = tmp_path / "kernel"
        kernel.write_text(_PREAMBLE + "echo hello >$output\n", encoding="utf-8")
        kernel.chmod(0o755)
        Guest(kernel, 1 << 30).run(command, output, timeout_s=30)
        assert os.get_blocking(output.fileno())
        output.close()
        assert reader.read() == b"hello\n"


def test_a_kernel_that_cannot_be_started_is_an_error(tmp_path: Path, command: Command) -> None:
    class Unstartable(Guest):
        def kernel_command(self, control: Path, output_fd: int, cpu: int) -> list[str]:
            return ["/nowhere/kernel"]

    with pytest.raises(FileNotFoundError):
        Unstartable(tmp_path, 1 << 30).run(command, BytesIO(), timeout_s=1)


def test_one_of_our_cpus_is_chosen() -> None:
    assert guest.one_cpu() in os.sched_getaffinity(0)
