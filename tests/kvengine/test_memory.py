"""Available memory: the host's, or the cgroup's if that is less."""

from pathlib import Path

from kvengine.memory import available_nbytes


def _write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="ascii")
    return folder


def test_the_host_without_a_limit(tmp_path: Path) -> None:
    proc = _write(tmp_path / "proc", meminfo="MemTotal: 9000 kB\nMemAvailable:  2000 kB\n")
    cgroup = _write(tmp_path / "cgroup", memory_max="max\n", memory_current="5\n")
    assert available_nbytes(proc, cgroup) == 2000 * 1024


def test_the_cgroup_if_it_is_tighter(tmp_path: Path) -> None:
    proc = _write(tmp_path / "proc", meminfo="MemAvailable:  2000 kB\n")
    cgroup = _write(tmp_path / "cgroup", memory_max="5000\n", memory_current="1500\n")
    assert available_nbytes(proc, cgroup) == 3500


def test_more_in_use_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    proc = _write(tmp_path / "proc", meminfo="MemAvailable:  2000 kB\n")
    cgroup = _write(tmp_path / "cgroup", memory_max="1000\n", memory_current="1500\n")
    assert available_nbytes(proc, cgroup) == 0


def test_nothing_known_is_nothing_available(tmp_path: Path) -> None:
    assert available_nbytes(tmp_path / "no", tmp_path / "no") == 0


def test_this_machine_knows() -> None:
    assert available_nbytes() > 0
