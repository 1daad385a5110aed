import json
import os
from pathlib import Path

from ops.child import Child
from ops.cluster import ChildSpec
from ops.run_folder import make_run_folder, write_ready_file


def test_only_the_newest_folders_are_kept(tmp_path: Path) -> None:
    for day in range(10, 25):
        (tmp_path / "runs" / f"202001{day}-000000-1").mkdir(parents=True)
    made = make_run_folder(tmp_path)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 10
    assert names[-1] == made.name
    assert names[0] == "20200116-000000-1"


async def test_ready_file_is_whole(tmp_path: Path) -> None:
    spec = ChildSpec(name="router", command=("x",), env={}, ready_url="http://r", stop_rank=0)
    child = Child(spec, tmp_path / "router.log", 0)
    write_ready_file(tmp_path / "ready.json", "http://u", tmp_path, [child])
    assert json.loads((tmp_path / "ready.json").read_text("utf-8")) == {
        "url": "http://u",
        "pid": os.getpid(),
        "run_dir": str(tmp_path),
        "processes": [
            {
                "name": "router",
                "pid": None,
                "ready_url": "http://r",
                "log": str(tmp_path / "router.log"),
            }
        ],
    }
    assert os.listdir(tmp_path) == ["ready.json"]
