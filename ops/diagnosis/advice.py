"""What a bottleneck means, in a sentence with its figures, and what to do about it."""

from collections.abc import Mapping
from typing import Final

from ops.diagnosis.amount import number_text, rate_text, share_text, size_text, time_text
from ops.diagnosis.load import Load
from ops.diagnosis.place import FULL_PATH_SHARE, MIN_BUSY_SHARE, Place

# The router is one event loop; from here on every token waits for its turn in it.
MAX_ROUTER_CPU_SHARE: Final = 0.9


def explain(place: Place, load: Load, num_at: Mapping[Place, float]) -> tuple[str, str]:
    """(reason with the figures that decided, next step) for ``place``."""
    of_all = f"{num_at.get(place, 0.0):.1f} of {sum(num_at.values()):.1f} sequences under way"
    match place:
        case Place.UNKNOWN:
            return (
                "neither the router's metrics nor those of a decode worker could be read",
                "start the services, or say where they are (--url, --api-key-file, --admin)",
            )
        case Place.IDLE:
            return (
                f"nothing was under way for {load.seconds:.1f} s",
                "ask again while it is slow, or for longer with --seconds",
            )
        case Place.ROUTER:
            return _router(load, of_all)
        case Place.DECODE_MEMORY:
            return _decode_memory(load, of_all)
        case Place.DECODE_PLACES:
            return _decode_places(load, of_all)
        case Place.PREFILL_QUEUE:
            return _prefill_queue(load, of_all)
        case Place.HANDOFF:
            return _handoff(load, of_all)
        case Place.PREFILL_COMPUTE:
            return _prefill_compute(load, of_all)
        case Place.DECODE_COMPUTE:
            return _decode_compute(load, of_all)


def _router(load: Load, of_all: str) -> tuple[str, str]:
    share = load.router_cpu_share or 0.0
    if share >= MAX_ROUTER_CPU_SHARE:
        reason = (
            f"the router's process takes {share:.2f} CPUs, and its event loop is only one: every "
            "token waits for its turn"
        )
        next_step = (
            "give the router a CPU of its own (cpus of [router], and not those of a worker), "
            "or divide the workers between two routers"
        )
        return reason, next_step
    reason = (
        f"{of_all} are at the router and at no decode worker; its process takes {share:.2f} CPUs"
    )
    next_step = (
        "look for decode workers that drain, refuse or are unreachable (pdctl status), and for "
        "clients that read slowly"
    )
    return reason, next_step


def _decode_memory(load: Load, of_all: str) -> tuple[str, str]:
    reason = (
        f"{of_all} wait for KV blocks of a decode worker, of which "
        f"{share_text(load.free_decode_share)} are free, too few for the next one"
    )
    if load.num_preemptions:
        reason += (
            f", and {load.num_preemptions:.0f} sequences gave theirs back and are computed again"
        )
    next_step = (
        "raise kv_pool_nbytes of [decode], start another decode worker, or lower max_num_seqs "
        "if preemptions are many"
    )
    return reason, next_step


def _decode_places(load: Load, of_all: str) -> tuple[str, str]:
    reason = (
        f"{of_all} wait at a decode worker that has max_num_seqs sequences already; "
        f"{share_text(load.free_decode_share)} of its blocks are free"
    )
    return reason, "raise max_num_seqs of [decode], or start another decode worker"


def _prefill_queue(load: Load, of_all: str) -> tuple[str, str]:
    reason = (
        f"{of_all} wait for a prefill worker; those that are seen compute "
        f"{share_text(load.prefill_busy_share)} of the time, "
        f"{number_text(load.prefill_tokens_per_s)} tokens/s"
    )
    next_step = (
        "start another prefill worker (pdctl up --prefill N, or pdctl start prefill on another "
        "host), or give each more threads"
    )
    return reason, next_step


def _handoff(load: Load, of_all: str) -> tuple[str, str]:
    over = " and ".join(load.carriers) or "an unknown carrier"
    reason = (
        f"{of_all} wait for KV that is on its way over {over}, at "
        f"{rate_text(load.handoff_bytes_per_s)} where the path was measured with "
        f"{rate_text(load.path_bytes_per_s)}"
    )
    if load.handoff_exposed_s is not None:
        reason += (
            f"; a handoff of {size_text(load.handoff_nbytes)} adds "
            f"{time_text(load.handoff_exposed_s)}"
        )
    if load.is_prefill_pool_full:
        next_step = (
            "raise kv_pool_nbytes of [prefill]: its blocks are held until the KV has arrived"
        )
    elif (load.path_share or 0.0) >= FULL_PATH_SHARE:
        next_step = (
            "the path is full: bring both workers to one host (mapped memory), take a faster "
            "link, or set kv_wire_dtype of [decode] to float16 or int8"
        )
    else:
        next_step = (
            "the path carries less than when it was measured: see the pairs above, run pdctl node "
            "check on both hosts (MTU, flow control, CPU), and look for a worker that hangs"
        )
    return reason, next_step


def _prefill_compute(load: Load, of_all: str) -> tuple[str, str]:
    reason = (
        f"nothing holds sequences up; {of_all} are prompts being computed, "
        f"{time_text(load.prefill_s)} each, {number_text(load.prefill_tokens_per_s)} tokens/s"
    )
    next_step = (
        "give the prefill worker more threads or a faster machine, and see pdctl node check "
        "(CPU governor, memory); another worker helps only several prompts at once"
    )
    return reason, next_step


def _decode_compute(load: Load, of_all: str) -> tuple[str, str]:
    steps = (
        f"steps of {time_text(load.decode_step_s)} with {number_text(load.decode_batch)} sequences "
        f"make {number_text(load.output_tokens_per_s)} tokens/s"
    )
    if _is_starved(load):
        reason = (
            f"nothing holds sequences up and {of_all} decode, but steps fill only "
            f"{share_text(load.decode_busy_share)} of the time: {steps}"
        )
        next_step = (
            "something else takes the decode worker's CPU or its event loop: give it CPUs of "
            "its own (cpus of [decode]) and run pdctl node check"
        )
        return reason, next_step
    next_step = (
        "this is the speed of the machine: more threads, another decode worker for more "
        "sequences at once, a smaller model for each; see pdctl node check (CPU governor, memory)"
    )
    return f"nothing holds sequences up; {of_all} decode: {steps}", next_step


def _is_starved(load: Load) -> bool:
    """Sequences were there to decode at both looks, but steps did not run most of the time."""
    if load.decode_busy_share is None or load.decode_batch is None or load.num_decoding is None:
        return False
    return load.decode_busy_share * load.decode_batch < MIN_BUSY_SHARE * load.num_decoding
