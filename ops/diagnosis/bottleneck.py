"""Why is it slow: names the one place that holds the sequences up. Pure; docs/doctor.md explains.

Every place has a number of sequences, those that are there on average. Places where they wait, and
that a setting or another worker would empty, come first: the fullest of them is the bottleneck if
it holds a quarter of all sequences. Else nothing holds them up, and the answer is where the work
itself takes the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ops.diagnosis.advice import MAX_ROUTER_CPU_SHARE, explain
from ops.diagnosis.figure import Figure, figures
from ops.diagnosis.load import Load
from ops.diagnosis.place import WAITING_PLACES, Place, places
from ops.node.finding import Verdict

# Fewer sequences than this under way on average: nobody waits for anything.
IDLE_SEQUENCES: Final = 0.1
# A place with a smaller part of all sequences is not worth naming.
MIN_WAITING_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer.

    Attributes:
        place: the bottleneck.
        verdict: WARN if sequences are held up, OK if not, UNKNOWN if it cannot be seen.
        reason: one sentence with the figures that decided.
        next_step: what to do; "" if nothing.
        num_at: sequences at each place, on average.
        figures: everything that was measured.
        unseen: what could not be seen, and why.
    """

    place: Place
    verdict: Verdict
    reason: str
    next_step: str
    num_at: Mapping[Place, float]
    figures: tuple[Figure, ...]
    unseen: tuple[str, ...]


def diagnose(load: Load) -> Diagnosis:
    """Name the bottleneck of ``load``."""
    num_at = places(load)
    place = _bottleneck(load, num_at)
    if place is Place.UNKNOWN:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.WARN if place in WAITING_PLACES else Verdict.OK
    reason, next_step = explain(place, load, num_at)
    return Diagnosis(place, verdict, reason, next_step, num_at, figures(load), load.unseen)


def _bottleneck(load: Load, num_at: Mapping[Place, float]) -> Place:
    if load.num_decoding is None and load.num_requests is None:
        return Place.UNKNOWN
    total = sum(num_at.values())
    if total < IDLE_SEQUENCES:
        return Place.IDLE
    if (load.router_cpu_share or 0.0) >= MAX_ROUTER_CPU_SHARE:
        return Place.ROUTER
    fullest = max(WAITING_PLACES, key=lambda place: num_at[place])
    if num_at[fullest] >= MIN_WAITING_SHARE * total:
        return fullest
    return max((Place.PREFILL_COMPUTE, Place.DECODE_COMPUTE), key=lambda place: num_at[place])
