"""The check of loss and delay: its judgement, and what it makes of the probe's answer."""

import json
from dataclasses import asdict

import pytest

from ops.node.checks.path import check, judge
from ops.node.facts import RecordedFacts
from ops.node.finding import Finding, Verdict
from ops.node.path_quality import PathQuality, parse_path_qualities, summarize
from tests.ops.node.network_facts import PYTHON, edge_box, found, printed, verdicts

PEER = "192.168.1.12"


def quality(
    num_answered: int = 100, *, median_s: float = 0.0002, p99_s: float = 0.0004
) -> PathQuality:
    return PathQuality(PEER, "ICMP echo", 100, num_answered, median_s, p99_s)


def loss_of(measured: PathQuality) -> Finding:
    return found(judge(measured), f"path to {PEER}: loss")


def delay_of(measured: PathQuality) -> Finding:
    return found(judge(measured), f"path to {PEER}: delay")


def test_a_short_path_without_loss_is_right() -> None:
    assert verdicts(judge(quality())) == {Verdict.OK}


@pytest.mark.parametrize(
    ("num_answered", "verdict"),
    [(100, Verdict.OK), (99, Verdict.WARN), (98, Verdict.FAIL), (1, Verdict.FAIL)],
)
def test_loss(num_answered: int, verdict: Verdict) -> None:
    assert loss_of(quality(num_answered)).verdict is verdict


def test_loss_is_told_as_a_share_and_with_the_method() -> None:
    assert loss_of(quality(90)).measured == "10 of 100 lost (10%, ICMP echo)"


def test_a_long_path_is_named() -> None:
    finding = delay_of(quality(median_s=0.02, p99_s=0.021))
    assert (finding.verdict, "far away" in finding.reason) == (Verdict.WARN, True)
    assert finding.measured == "median 20.00 ms, 99th percentile 21.00 ms (ICMP echo)"


def test_a_jittery_path_is_named() -> None:
    finding = delay_of(quality(p99_s=0.03))
    assert (finding.verdict, "Some packets wait long" in finding.reason) == (Verdict.WARN, True)


def test_no_answer_fails_once() -> None:
    (finding,) = judge(PathQuality(PEER, error="Network is unreachable"))
    assert (finding.verdict, finding.measured) == (Verdict.FAIL, "Network is unreachable")


def test_the_probe_is_a_fact() -> None:
    machine = edge_box()
    machine.commands[f"{PYTHON} -m ops.node.path_quality {PEER}"] = printed(
        json.dumps([asdict(quality(97))])
    )
    assert (
        found(check(machine.facts, [PEER, PEER]), f"path to {PEER}: loss").verdict is Verdict.FAIL
    )


def test_without_peers_there_is_nothing() -> None:
    assert check(RecordedFacts()) == []


def test_without_a_probe_it_says_so() -> None:
    (finding,) = check(RecordedFacts(), [PEER])
    assert "could not be run" in finding.measured


def test_figures_of_a_measurement() -> None:
    rtts_s = [0.001 * number for number in range(100, 0, -1)]
    assert summarize("a", "ICMP echo", 100, rtts_s) == PathQuality(
        "a", "ICMP echo", 100, 100, pytest.approx(0.051), pytest.approx(0.1)
    )
    assert summarize("a", "ICMP echo", 7, []).loss == 1
    assert summarize("a", "ICMP echo", 2, [0.5]).p99_rtt_s == 0.5


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '[1, {"peer": "a", "colour": "red"}]'])
def test_answers_of_another_program_are_skipped(text: str) -> None:
    assert parse_path_qualities(text) == []


def test_a_probe_that_takes_too_long_says_so() -> None:
    machine = edge_box()
    machine.commands[f"{PYTHON} -m ops.node.path_quality {PEER}"] = printed(exit_code=124)
    (finding,) = check(machine.facts, [PEER])
    assert finding.measured == "the probe took too long on this machine"
