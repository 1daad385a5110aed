"""The Kubernetes files: what they may touch on the host, and that they name what exists."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import ops

KUBERNETES = Path(ops.__file__).parent.parent / "deploy" / "kubernetes"
RUNBOOKS = Path(ops.__file__).parent / "runbooks"


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file by kind."""
    text = (KUBERNETES / name).read_text(encoding="utf-8")
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


def pod(name: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = documents(name)[kind]["spec"]["template"]["spec"]
    return found


PODS = [("node-check.yaml", "DaemonSet"), ("node-apply.yaml", "Job")]


@pytest.mark.parametrize(("name", "kind"), PODS)
def test_a_pod_shares_the_network_and_nothing_else_of_the_host(name: str, kind: str) -> None:
    spec = pod(name, kind)
    assert spec["hostNetwork"] is True
    assert spec["hostPID"] is False
    assert "hostIPC" not in spec
    assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("name", "kind"), PODS)
def test_a_pod_is_bounded_and_cannot_write_its_own_image(name: str, kind: str) -> None:
    (container,) = pod(name, kind)["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    for part in ("requests", "limits"):
        assert set(container["resources"][part]) == {"cpu", "memory"}


@pytest.mark.parametrize(("name", "kind"), PODS)
def test_mounts_and_volumes_belong_together(name: str, kind: str) -> None:
    spec = pod(name, kind)
    (container,) = spec["containers"]
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in spec["volumes"])
    host = next(volume for volume in spec["volumes"] if volume["name"] == "host")
    assert host["hostPath"] == {"path": "/", "type": "Directory"}


@pytest.mark.parametrize(("name", "kind"), PODS)
def test_the_shell_in_it_can_be_parsed(name: str, kind: str) -> None:
    (container,) = pod(name, kind)["containers"]
    ended = subprocess.run(
        ["bash", "-n"], input=container["args"][0].encode(), capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_the_check_cannot_change_the_host() -> None:
    (container,) = pod("node-check.yaml", "DaemonSet")["containers"]
    security = container["securityContext"]
    assert security["privileged"] is False
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    host = next(mount for mount in container["volumeMounts"] if mount["name"] == "host")
    assert host["readOnly"] is True
    assert "pdctl node check --root /host" in container["args"][0]


def test_the_check_selects_its_own_pods_and_shows_its_verdict() -> None:
    spec = documents("node-check.yaml")["DaemonSet"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (container,) = spec["template"]["spec"]["containers"]
    probe = container["readinessProbe"]["exec"]["command"]
    assert probe == ["test", "-e", "/verdict/good"]
    assert "touch /verdict/good" in container["args"][0]


def test_the_job_changes_nothing_as_it_stands_and_never_tries_again() -> None:
    job = documents("node-apply.yaml")["Job"]["spec"]
    assert job["backoffLimit"] == 0
    spec = job["template"]["spec"]
    assert spec["restartPolicy"] == "Never"
    (container,) = spec["containers"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert variables["VERB"] == "plan"
    assert variables["ROOT"] == "/host"
    for concern in variables["CONCERNS"].split():
        text = (RUNBOOKS / f"{concern}.sh").read_text(encoding="utf-8")
        assert "check|plan|apply|verify|rollback" in text
