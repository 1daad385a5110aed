"""The checks of the node beside those of the services, and never longer than they may take."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from ops.node.finding import Finding, Verdict

NodeChecks = Callable[[], Sequence[Finding]]

_SOURCE = "docs/doctor.md"


async def check_node(checks: NodeChecks, *, timeout_s: float) -> tuple[Finding, ...]:
    """What ``checks`` finds; one UNKNOWN if it takes longer than ``timeout_s`` or fails."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Finding, ...]] = loop.create_future()

    def settle(findings: tuple[Finding, ...]) -> None:
        if not done.done():
            done.set_result(findings)

    def run() -> None:
        try:
            findings = tuple(checks())
        except Exception as exc:  # a check that fails must not hide what the others see
            findings = (_unknown(f"the checks failed: {type(exc).__name__}: {exc}"),)
        try:
            loop.call_soon_threadsafe(settle, findings)
        except RuntimeError:
            return  # the doctor did not wait for us

    # A daemon, unlike the threads of an executor: a tool that hangs must not keep the process.
    threading.Thread(target=run, name="node-checks", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await done
    except TimeoutError:
        return (_unknown(f"the checks took longer than {timeout_s:g} s"),)


def _unknown(reason: str) -> Finding:
    cure = "see which one it is with pdctl node check"
    return Finding("node", "checks", Verdict.UNKNOWN, "", "", reason, _SOURCE, cure)
