"""docs/operations.md names metrics, settings, log events, files and scripts that exist."""

import re
from pathlib import Path

import pytest

import ops
from decode_svc.config import DecodeConfig
from kvproto.errors import ErrorCode
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from svckit import lifecycle
from svckit.setting import settings_of

ROOT = Path(ops.__file__).parent.parent
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE))
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)).splitlines()
# Names of settings begin so; max_mtu is a word of ibv_devinfo.
_SETTING = r"(?:max_(?!mtu)|min_|kv_|drain_|ack_|mapped_|lease_|advertise_|block_)[a-z_]+( = .*)?"
SERVICES = ("decode_svc", "prefill_svc", "router_svc")
SYMPTOMS = (
    *("Empty or wrong data from prefill", "Jittery latency", "CPU at 95 %"),
    *("Occasional time-outs", "Decode stuck on the first token", "Prefill throughput low"),
    "Memory grows with the chunks",
)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_has_what_decides_and_a_cure(symptom: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| **{symptom}** |")]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) == 4
    assert all(cells)
    assert "`" in cells[1], "it names no command and no metric that decides"


def test_every_metric_is_one_of_the_metrics_page() -> None:
    named = {name for text in CODE for name in re.findall(r"\b(?:pd|gen_ai)_[a-z_]+\b", text)}
    defined = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert len(named) > 15
    assert [name for name in sorted(named) if f"`{name}`" not in defined] == []


def test_every_setting_exists() -> None:
    settings = {
        name
        for config in (RouterConfig, PrefillConfig, DecodeConfig)
        for name in settings_of(config)
    }
    named = {text.partition(" ")[0] for text in CODE if re.fullmatch(_SETTING, text)}
    assert len(named) > 10
    assert named <= settings


def test_every_event_is_logged_by_a_service() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for name in SERVICES for path in (ROOT / name).glob("*.py")
    )
    events = (
        *("sequence lost its worker", "worker refused", "handoff failed", "prefill worker lost"),
        *("path chosen", "prompt refused", "carrier is not used", "worker gone"),
        *("blocks in quarantine", "worker not reachable"),
    )
    for event in events:
        assert event in PAGE
        assert f'"{event}' in source, event


def test_every_wire_code_exists() -> None:
    for name in ("digest_mismatch", "checksum_mismatch", "incompatible", "prompt_too_long"):
        assert f"`{name}`" in PAGE
        assert name.upper() in ErrorCode.__members__
    assert 'code="deadline_exceeded"' in PAGE
    assert "DEADLINE_EXCEEDED" in ErrorCode.__members__


def test_the_exit_codes_are_those_of_the_lifecycle() -> None:
    codes = re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE)
    assert codes == [
        str(lifecycle.EXIT_OK),
        str(lifecycle.EXIT_SERVICE_ERROR),
        str(lifecycle.EXIT_DRAIN_DEADLINE),
        str(lifecycle.EXIT_DEFECT),
        "130, 143",
    ]


def test_every_script_and_file_exists() -> None:
    named = {
        word
        for text in (*SHELL, *CODE)
        for word in re.findall(r"\b(?:deploy|ops|docs)/[\w@./-]+\w", text)
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("ops/runbooks/")])
def test_every_runbook_has_the_verb_that_is_shown(line: str) -> None:
    script, verb = line.split()[:2]
    text = (ROOT / script).read_text(encoding="utf-8")
    assert re.search(rf"run_verb '(?:[a-z|]+\|)?{verb}[|']", text) or f'"${{1:-}}" = {verb}' in text
