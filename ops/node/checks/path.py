"""Path: what share of packets is lost on the way to each peer, and how long they take.

RoCE takes a lost packet hard: the sender goes back and sends everything after it again. A long way
costs a handoff its round trips.
"""

from collections.abc import Sequence
from typing import Final

from ops.node.facts import TIMED_OUT_EXIT_CODE, Facts
from ops.node.finding import Finding, Verdict
from ops.node.interpreter import interpreter
from ops.node.path_quality import PROGRAM, PathQuality, parse_path_qualities

CHECK: Final = "path"

# One lost of a hundred may be a neighbour entry that was being made; more is not.
MAX_TOLERATED_LOSS: Final = 0.01
# A LAN answers in well under a millisecond; this much is another site, a queue or a slow CPU.
MAX_RTT_S: Final = 0.002
# How much longer than usual a packet may take before the path counts as jittery.
MAX_JITTER_S: Final = 0.005

_SOURCE: Final = "RFC 2680, RFC 2681"


def check(facts: Facts, peers: Sequence[str] = ()) -> list[Finding]:
    """Loss and delay to each peer; nothing without peers."""
    if not peers:
        return []
    asked = list(dict.fromkeys(peers))
    output = facts.run(interpreter(facts), "-m", PROGRAM, *asked)
    found = {quality.peer: quality for quality in parse_path_qualities(output.stdout)}
    nothing = (
        "the probe took too long on this machine"
        if output.exit_code == TIMED_OUT_EXIT_CODE
        else "the probe could not be run here, or the dump has no probe of it"
    )
    return [
        finding
        for peer in asked
        for finding in judge(found.get(peer) or PathQuality(peer, error=nothing))
    ]


def judge(quality: PathQuality) -> list[Finding]:
    """One finding for loss and one for delay; one if nothing was answered."""
    subject = f"path to {quality.peer}"
    if not quality.num_answered:
        return [
            Finding(
                *(CHECK, subject, Verdict.FAIL, quality.error or "no answer", "answers"),
                *("The peer cannot be reached, or nothing could be sent to it.", _SOURCE),
                f"check the name, the route (ip route get {quality.peer}) and the firewall",
            )
        ]
    return [_loss(subject, quality), _delay(subject, quality)]


def _loss(subject: str, quality: PathQuality) -> Finding:
    num_lost = quality.num_sent - quality.num_answered
    if not num_lost:
        verdict = Verdict.OK
    elif quality.loss <= MAX_TOLERATED_LOSS:
        verdict = Verdict.WARN
    else:
        verdict = Verdict.FAIL
    return Finding(
        CHECK,
        f"{subject}: loss",
        verdict,
        f"{num_lost} of {quality.num_sent} lost ({quality.loss:.0%}, {quality.method})",
        "none",
        "Each lost packet makes RoCE send everything after it again, and TCP halve its rate.",
        _SOURCE,
        ""
        if verdict is Verdict.OK
        else "look for errors on the way: ethtool -S (crc, discards), the switch's drops, PFC",
    )


def _delay(subject: str, quality: PathQuality) -> Finding:
    median_ms, p99_ms = quality.median_rtt_s * 1000, quality.p99_rtt_s * 1000
    is_long = quality.median_rtt_s > MAX_RTT_S
    is_jittery = quality.p99_rtt_s - quality.median_rtt_s > MAX_JITTER_S
    if is_long:
        reason = "The peer is far away, or packets wait in a queue; each handoff pays round trips."
    elif is_jittery:
        reason = "Some packets wait long: a queue that fills, or a CPU that sleeps."
    else:
        reason = "A round trip is short against a decode step."
    return Finding(
        CHECK,
        f"{subject}: delay",
        Verdict.WARN if is_long or is_jittery else Verdict.OK,
        f"median {median_ms:.2f} ms, 99th percentile {p99_ms:.2f} ms ({quality.method})",
        f"median up to {MAX_RTT_S * 1000:g} ms, few beyond",
        reason,
        _SOURCE,
        "pair workers of one site; look at the queue (tc -s qdisc) and at CPU power states"
        if is_long or is_jittery
        else "",
    )
