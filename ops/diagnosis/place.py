"""The places where a sequence can be, and how many are at each: pure; docs/doctor.md explains."""

from enum import StrEnum
from typing import Final

from ops.diagnosis.load import Load

# Workers that compute for less than this part of the time in which they have work are held up by
# something else.
MIN_BUSY_SHARE: Final = 0.5

# A path counts as full from this part of its measured bandwidth on.
FULL_PATH_SHARE: Final = 0.5


class Place(StrEnum):
    """Where a sequence can be, or what the diagnosis says instead."""

    ROUTER = "router"
    DECODE_MEMORY = "decode memory"
    DECODE_PLACES = "decode places"
    PREFILL_QUEUE = "prefill queue"
    HANDOFF = "handoff"
    PREFILL_COMPUTE = "prefill compute"
    DECODE_COMPUTE = "decode compute"
    IDLE = "idle"
    UNKNOWN = "unknown"


# Where sequences wait, and a setting or another worker would help.
WAITING_PLACES: Final = (
    Place.ROUTER,
    Place.DECODE_MEMORY,
    Place.DECODE_PLACES,
    Place.PREFILL_QUEUE,
    Place.HANDOFF,
)


def places(load: Load) -> dict[Place, float]:
    """How many sequences are at each place on average.

    Those that wait at a decode worker wait for whoever holds its blocks and places: the sequences
    that decode, or those whose KV is still being made. So they are divided between the decode
    worker and what lies before it, in proportion.
    """
    begun, num_workers = load.num_prefilling or 0.0, max(1, load.num_prefill_workers)
    num_prompts = (load.num_prefill_waiting or 0.0) + begun
    # A worker of which it is not known computes whenever it has a prompt.
    has_work_share = min(1.0, num_prompts / num_workers)
    busy = has_work_share if load.prefill_busy_share is None else load.prefill_busy_share
    # What is used more is what the other waits for.
    path_share = load.path_share or 0.0
    is_path_full = path_share >= FULL_PATH_SHARE and path_share > busy
    is_computing = busy >= MIN_BUSY_SHARE * has_work_share and not is_path_full
    # One prompt for each worker that computes; the others that are begun wait for their turn.
    computing = min(begun, num_workers * (1.0 if is_computing else busy))
    behind = num_prompts - computing
    # Prompts that wait while the workers need not compute wait for KV to leave.
    handoff = (load.num_handing_over or 0.0) + (0.0 if is_computing else behind)
    prefill_queue = behind if is_computing else 0.0
    waiting, decoding = load.num_decode_waiting or 0.0, load.num_decoding or 0.0
    fetching = load.num_fetching or 0.0
    held = decoding + fetching
    at_decode = waiting * (decoding / held if held else 1.0)
    upstream = waiting - at_decode
    if handoff > prefill_queue + computing:
        handoff += upstream
    else:
        prefill_queue += upstream
    is_memory = load.is_decode_pool_full or not load.is_decode_full_batch
    return {
        Place.ROUTER: load.num_held_at_router or 0.0,
        Place.DECODE_MEMORY: at_decode if is_memory else 0.0,
        Place.DECODE_PLACES: 0.0 if is_memory else at_decode,
        Place.PREFILL_QUEUE: prefill_queue,
        Place.HANDOFF: handoff,
        Place.PREFILL_COMPUTE: computing,
        Place.DECODE_COMPUTE: decoding,
    }
