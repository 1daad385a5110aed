"""Where the sequences are that are under way, summed over the services: pure.

The unit of everything here is the sequence: "2.4 wait at the prefill workers" says that on average
over the interval so many did. Times of a histogram become such a number by Little's law
(``Interval.num_within``), so that queues, computing and handoffs can be compared.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ops.diagnosis.interval import Interval
from ops.diagnosis.json_path import mapping_at, mappings_at, number_at, text_at

# Below this many blocks of a hundred a pool counts as full: an average sequence finds no room.
_FULL_POOL_SHARE: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The figures that a diagnosis is made of; None where they cannot be seen.

    Attributes:
        seconds: length of the interval.
        num_requests: in flight at the router.
        router_cpu_share: CPU seconds of the router's process per second.
        num_held_at_router: sequences that the router has and no decode worker.
        ttft_s: mean time to first token of the sequences that got one.
        itl_s: mean gap between two tokens.
        num_decode_waiting: sequences that wait for blocks or a place at a decode worker.
        num_fetching: sequences for which a prefill worker makes KV.
        num_decoding: sequences that take part in decode steps.
        decode_busy_share: part of the time in which a decode step ran, mean of the workers.
        decode_step_s, decode_batch: of the mean step.
        output_tokens_per_s: of all decode workers.
        is_decode_full_batch: a decode worker holds max_num_seqs sequences.
        free_decode_share: least part of the blocks of a decode worker that nobody holds.
        num_preemptions: sequences that gave their blocks back.
        num_prefill_waiting: prompts of which nothing is computed yet.
        num_prefilling: prompts begun and not computed to the end.
        prefill_busy_share: part of the time in which a prefill step ran, mean of the workers.
        num_prefill_workers: those that are seen.
        free_prefill_share: as for decode.
        prefill_tokens_per_s: computed by all prefill workers.
        prefill_s: mean time from first step to last token of a prompt.
        num_handing_over: sequences whose KV is on its way and no longer hidden by computing.
        handoff_exposed_s: mean time that a handoff added.
        handoff_nbytes: mean size of one.
        handoff_bytes_per_s: of all handoffs that ended, or that arrived over TCP if that is more.
        path_share: part of its measured bandwidth that the fullest path carries.
        path_bytes_per_s: slowest measured path.
        carriers: of all paths.
        unseen: what could not be seen, and why.
    """

    seconds: float = 0.0
    num_requests: float | None = None
    router_cpu_share: float | None = None
    num_held_at_router: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    num_decode_waiting: float | None = None
    num_fetching: float | None = None
    num_decoding: float | None = None
    decode_busy_share: float | None = None
    decode_step_s: float | None = None
    decode_batch: float | None = None
    output_tokens_per_s: float | None = None
    is_decode_full_batch: bool = False
    free_decode_share: float | None = None
    num_preemptions: float | None = None
    num_prefill_waiting: float | None = None
    num_prefilling: float | None = None
    prefill_busy_share: float | None = None
    num_prefill_workers: int = 0
    free_prefill_share: float | None = None
    prefill_tokens_per_s: float | None = None
    prefill_s: float | None = None
    num_handing_over: float | None = None
    handoff_exposed_s: float | None = None
    handoff_nbytes: float | None = None
    handoff_bytes_per_s: float | None = None
    path_bytes_per_s: float | None = None
    path_share: float | None = None
    carriers: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def is_decode_pool_full(self) -> bool:
        """A decode worker has hardly a free block, or had to take some back."""
        return bool(self.num_preemptions) or _is_full(self.free_decode_share)

    @property
    def is_prefill_pool_full(self) -> bool:
        """A prefill worker has hardly a free block."""
        return _is_full(self.free_prefill_share)


def _is_full(share: float | None) -> bool:
    return share is not None and share < _FULL_POOL_SHARE


def measure_load(router: Interval | None, workers: Sequence[Interval]) -> Load:
    """The load between two looks at the services.

    Of workers that were not asked the router's list tells how many sequences they have; all other
    figures are those of the workers that were.
    """
    prefills = [worker for worker in workers if worker.after.role == "prefill"]
    decodes = [worker for worker in workers if worker.after.role == "decode"]
    routers = [] if router is None else [router]
    listed = _Listed(router, {worker.after.name for worker in workers})
    return Load(
        seconds=max((i.seconds for i in (*routers, *workers)), default=0.0),
        num_requests=_sum(routers, lambda i: _mean_gauge(i, "pd_router_requests_in_flight")),
        router_cpu_share=_rate(routers, "pd_router_process_cpu_seconds_total"),
        num_held_at_router=_held_at_router(router, decodes, listed),
        ttft_s=_ratio(routers, "gen_ai_server_time_to_first_token_seconds"),
        itl_s=_ratio(routers, "gen_ai_server_inter_token_latency_seconds"),
        num_decode_waiting=_plus(_sum(decodes, _decode_waiting), listed.num_decode_waiting),
        num_fetching=_plus(_sum(decodes, _fetching), listed.num_prefills),
        num_decoding=_plus(_sum(decodes, _decoding), listed.num_running("decode")),
        decode_busy_share=_mean(decodes, busy_share),
        decode_step_s=_ratio(decodes, "pd_decode_step_seconds"),
        decode_batch=_ratio(decodes, "pd_decode_batch_size"),
        output_tokens_per_s=_rate(decodes, "pd_decode_output_tokens_total"),
        is_decode_full_batch=any(map(_is_full_batch, decodes)),
        free_decode_share=_least(decodes, _free_share),
        num_preemptions=_sum(decodes, lambda i: i.rise("pd_decode_preemptions_total")),
        num_prefill_waiting=_plus(_sum(prefills, _prefill_waiting), listed.num_waiting("prefill")),
        num_prefilling=_plus(_sum(prefills, _prefilling), listed.num_running("prefill")),
        prefill_busy_share=_mean(prefills, busy_share),
        num_prefill_workers=len(prefills),
        free_prefill_share=_least(prefills, _free_share),
        prefill_tokens_per_s=_rate(prefills, "pd_prefill_computed_tokens_total"),
        prefill_s=_ratio(prefills, "pd_prefill_prefill_seconds"),
        num_handing_over=_handing_over(prefills, decodes),
        handoff_exposed_s=_ratio(decodes, "pd_decode_handoff_exposed_seconds"),
        handoff_nbytes=_ratio(decodes, "pd_decode_handoff_bytes"),
        handoff_bytes_per_s=_sum(decodes, _handoff_bytes_per_s),
        path_bytes_per_s=_least(decodes, _path_bytes_per_s),
        path_share=_most(decodes, _path_share),
        carriers=tuple(sorted({carrier for decode in decodes for carrier in _carriers(decode)})),
        unseen=(*_unseen(router, workers), *listed.unseen),
    )


# ---- one worker


def _decode_waiting(decode: Interval) -> float | None:
    """Those that wait for blocks or a place; whose KV is being made is not among them."""
    snapshots = (decode.before.metrics, decode.after.metrics)
    waiting = [metrics.total("pd_decode_waiting_sequences") for metrics in snapshots]
    fetching = [metrics.total("pd_decode_fetching_sequences") for metrics in snapshots]
    stay = [
        max(0.0, num_waiting - num_fetching)
        for num_waiting, num_fetching in zip(waiting, fetching, strict=True)
        if num_waiting is not None and num_fetching is not None
    ]
    known = [decode.num_within("pd_decode_queue_seconds"), min(stay, default=None)]
    return max((value for value in known if value is not None), default=None)


def _fetching(decode: Interval) -> float | None:
    return decode.num_within("pd_decode_handoff_seconds", "pd_decode_fetching_sequences")


def _decoding(decode: Interval) -> float | None:
    """Sequences in the mean step, as long as steps ran."""
    batch, busy = decode.mean("pd_decode_batch_size"), busy_share(decode)
    stay = decode.low("pd_decode_running_sequences")
    known = [stay, None if batch is None or busy is None else batch * busy]
    return max((value for value in known if value is not None), default=None)


def _prefill_waiting(prefill: Interval) -> float | None:
    return prefill.num_within("pd_prefill_queue_seconds", "pd_prefill_waiting_prompts")


def _prefilling(prefill: Interval) -> float | None:
    return prefill.num_within("pd_prefill_prefill_seconds", "pd_prefill_running_prompts")


def busy_share(worker: Interval) -> float | None:
    """Part of the time in which the worker computed: its steps, or its CPU if none has ended."""
    prefix = f"pd_{worker.after.role}"
    steps = worker.per_second(f"{prefix}_step_seconds_sum")
    if steps is None:
        return None
    if steps == 0:
        cpu = worker.per_second(f"{prefix}_process_cpu_seconds_total")
        # A step longer than the interval has not been counted yet, but burns CPU. Below half a
        # core it is the event loop.
        steps = cpu if cpu is not None and cpu >= 0.5 else 0.0
    return min(1.0, steps)


def _is_full_batch(decode: Interval) -> bool:
    most = number_at(decode.after.health, "max_num_seqs")
    held = [
        decode.low("pd_decode_running_sequences"),
        decode.low("pd_decode_fetching_sequences"),
    ]
    return most is not None and sum(value or 0.0 for value in held) >= most


def _free_share(worker: Interval) -> float | None:
    blocks = mapping_at(worker.after.health, "blocks")
    num_blocks = sum(number_at(blocks, state) or 0.0 for state in blocks)
    free = _mean_gauge(worker, f"pd_{worker.after.role}_free_blocks")
    return free / num_blocks if free is not None and num_blocks else None


def _paths(decode: Interval) -> Iterable[object]:
    return mapping_at(decode.after.health, "prefill_workers").values()


def _path_bytes_per_s(decode: Interval) -> float | None:
    speeds = [number_at(path, "bandwidth_bytes_per_s") for path in _paths(decode)]
    return min((speed for speed in speeds if speed), default=None)


def _received_per_s(decode: Interval) -> dict[str, float]:
    """Bytes/s over each TCP path that was there at both looks: those of unfinished handoffs, too.

    Mapped memory is written without anybody counting until the handoff ends.
    """
    rates: dict[str, float] = {}
    if decode.was_restarted or decode.seconds <= 0:
        return rates
    before = mapping_at(decode.before.health, "prefill_workers")
    for name, path in mapping_at(decode.after.health, "prefill_workers").items():
        old = number_at(before, name, "num_bytes_received")
        new = number_at(path, "num_bytes_received")
        if text_at(path, "carrier") == "tcp" and old is not None and new is not None:
            rates[name] = (new - old) / decode.seconds if new >= old else 0.0
    return rates


def _handoff_bytes_per_s(decode: Interval) -> float | None:
    ended = decode.per_second("pd_decode_handoff_bytes_sum")
    received = _received_per_s(decode)
    if ended is None:
        return sum(received.values()) if received else None
    return max(ended, sum(received.values()))


def _path_share(decode: Interval) -> float | None:
    paths = mapping_at(decode.after.health, "prefill_workers")
    shares = [
        rate / bandwidth
        for name, rate in _received_per_s(decode).items()
        if (bandwidth := number_at(paths, name, "bandwidth_bytes_per_s"))
    ]
    if len(paths) == 1 and not shares:
        ended, bandwidth = _handoff_bytes_per_s(decode), _path_bytes_per_s(decode)
        return ended / bandwidth if ended is not None and bandwidth else None
    return max(shares, default=None)


def _carriers(decode: Interval) -> set[str]:
    return {carrier for path in _paths(decode) if (carrier := text_at(path, "carrier"))}


# ---- all of them


def _handing_over(prefills: Sequence[Interval], decodes: Sequence[Interval]) -> float | None:
    """By the time that handoffs added, or by those that stay between computed and acknowledged."""
    exposed = _sum(decodes, lambda i: i.num_within("pd_decode_handoff_exposed_seconds"))
    stay = _sum(prefills, lambda i: i.low("pd_prefill_pushing_prompts"))
    return max((value for value in (exposed, stay) if value is not None), default=None)


def _held_at_router(
    router: Interval | None, decodes: Sequence[Interval], listed: "_Listed"
) -> float | None:
    """What the router counts more than all decode workers; only if every one was asked.

    The counts are some milliseconds apart, so the lower of the two differences is taken.
    """
    if router is None or not decodes or listed.num_unseen("decode"):
        return None
    pairs = [
        (router.before.metrics, [decode.before.metrics for decode in decodes]),
        (router.after.metrics, [decode.after.metrics for decode in decodes]),
    ]
    held = []
    for of_router, of_decodes in pairs:
        there = [
            of_router.total("pd_router_sequences_waiting"),
            of_router.total("pd_router_sequences_running"),
        ]
        gone = [
            metrics.total(f"pd_decode_{what}_sequences")
            for metrics in of_decodes
            for what in ("waiting", "running")
        ]
        if None in there or None in gone:
            return None
        held.append(sum(v for v in there if v) - sum(v for v in gone if v))
    return max(0.0, min(held))


class _Listed:
    """What the router's list tells of the workers that were not asked: the lower of two counts."""

    def __init__(self, router: Interval | None, seen: set[str]) -> None:
        looks = [] if router is None else [router.before.health, router.after.health]
        self._looks = [
            [entry for entry in mappings_at(look, "workers")
             if text_at(entry, "instance_id") not in seen]
            for look in looks
        ]  # fmt: skip

    def num_unseen(self, role: str) -> int:
        """Workers of ``role`` that only the router knows."""
        return max((len(_of_role(look, role)) for look in self._looks), default=0)

    def num_waiting(self, role: str) -> float | None:
        """Their sequences or prompts that wait."""
        return self._low(role, "num_waiting")

    def num_running(self, role: str) -> float | None:
        """Those that are computed."""
        return self._low(role, "num_running")

    @property
    def num_prefills(self) -> float | None:
        """Prompts at unseen prefill workers belong to sequences of unseen decode workers."""
        if not self.num_unseen("decode"):
            return None
        return _plus(self.num_waiting("prefill"), self.num_running("prefill"))

    @property
    def num_decode_waiting(self) -> float | None:
        """A worker's count of the waiting includes those whose prompt a prefill worker has."""
        waiting = self.num_waiting("decode")
        return None if waiting is None else max(0.0, waiting - (self.num_prefills or 0.0))

    @property
    def unseen(self) -> tuple[str, ...]:
        """One clause for each role of which workers are only listed."""
        return tuple(
            f"{num} {role} worker{'s were' if num > 1 else ' was'} not asked; the router's list "
            "tells only how many sequences are there"
            for role in ("prefill", "decode")
            if (num := self.num_unseen(role))
        )

    def _low(self, role: str, key: str) -> float | None:
        if not self.num_unseen(role):
            return None
        return min(
            sum(number_at(entry, key) or 0.0 for entry in _of_role(look, role))
            for look in self._looks
        )


def _of_role(look: Sequence[object], role: str) -> list[object]:
    return [entry for entry in look if text_at(entry, "role") == role]


def _unseen(router: Interval | None, workers: Sequence[Interval]) -> tuple[str, ...]:
    clauses = []
    if router is None:
        clauses.append("the router did not answer, so what clients see is not known")
    for interval in (*([router] if router else ()), *workers):
        if interval.was_restarted:
            clauses.append(f"{interval.after.name} was restarted meanwhile, so its rates are lost")
        elif interval.after.metrics_problem or interval.before.metrics_problem:
            clauses.append(f"the metrics of {interval.after.name} could not be read")
    return tuple(clauses)


def _sum(
    intervals: Iterable[Interval], value_of: Callable[[Interval], float | None]
) -> float | None:
    known = [value for interval in intervals if (value := value_of(interval)) is not None]
    return sum(known) if known else None


def _mean(
    intervals: Iterable[Interval], value_of: Callable[[Interval], float | None]
) -> float | None:
    known = [value for interval in intervals if (value := value_of(interval)) is not None]
    return sum(known) / len(known) if known else None


def _least(
    intervals: Iterable[Interval], value_of: Callable[[Interval], float | None]
) -> float | None:
    known = [value for interval in intervals if (value := value_of(interval)) is not None]
    return min(known, default=None)


def _most(
    intervals: Iterable[Interval], value_of: Callable[[Interval], float | None]
) -> float | None:
    known = [value for interval in intervals if (value := value_of(interval)) is not None]
    return max(known, default=None)


def _plus(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return sum(known) if known else None


def _ratio(intervals: Sequence[Interval], histogram: str) -> float | None:
    """Mean of a histogram over several workers."""
    total = _sum(intervals, lambda i: i.rise(f"{histogram}_sum"))
    count = _sum(intervals, lambda i: i.rise(f"{histogram}_count"))
    return total / count if total is not None and count else None


def _rate(intervals: Sequence[Interval], name: str) -> float | None:
    return _sum(intervals, lambda i: i.per_second(name))


def _mean_gauge(interval: Interval, name: str) -> float | None:
    before, after = interval.before.metrics.total(name), interval.after.metrics.total(name)
    return None if before is None or after is None else (before + after) / 2
