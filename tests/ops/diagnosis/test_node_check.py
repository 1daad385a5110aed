import threading

from ops.diagnosis.node_check import check_node
from ops.node.finding import Finding, Verdict

FOUND = Finding("sysctl", "s", Verdict.FAIL, "1", "2", "r", "src")


async def test_findings_are_passed_on() -> None:
    assert await check_node(lambda: [FOUND], timeout_s=30) == (FOUND,)


async def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> list[Finding]:
        raise OSError("no /sys")

    [finding] = await check_node(fails, timeout_s=30)
    assert finding.verdict is Verdict.UNKNOWN
    assert "OSError: no /sys" in finding.reason


async def test_a_check_that_hangs_is_left_behind() -> None:
    release, ended = threading.Event(), threading.Event()

    def hangs() -> list[Finding]:
        release.wait()
        ended.set()
        return [FOUND]

    [finding] = await check_node(hangs, timeout_s=0.05)
    assert finding.verdict is Verdict.UNKNOWN
    assert "longer than 0.05 s" in finding.reason
    release.set()
    assert ended.wait(30)
