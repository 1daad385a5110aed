"""pyverbs, either generation (rdma-core 44 and 59), behind the few calls that differ.

Imported on first use, and here alone: a host without RDMA needs none of it. What pyverbs raises
becomes CarrierUnavailable or CarrierLost at this border, with what a person can do.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvproto.errors import CarrierLost, CarrierUnavailable

# What Linux calls the descriptor of a completion channel, and that of a device's events.
_EVENT_LINK: Final = "anon_inode:[infinibandevent]"
_ADVICE: Final = {
    errno.EACCES: "this user may not open it: add it to the group of /dev/infiniband/uverbs*",
    errno.EPERM: "this user may not open it: add it to the group of /dev/infiniband/uverbs*",
    errno.ENODEV: "the device is gone",
    errno.ENOMEM: (
        "the device or the memlock limit has no room for it: set LimitMEMLOCK=infinity in the "
        "unit, or ulimit -l unlimited"
    ),
}
NODE_CHECK_HINT: Final = "pdctl node check (check rdma) looks into it"


@dataclass(frozen=True, slots=True)
class Verbs:
    """The classes of pyverbs in use."""

    ah_attr: Any
    gid: Any
    global_route: Any
    context: Any
    comp_channel: Any
    cq: Any
    mr: Any
    mw: Any
    mw_bind_info: Any
    pd: Any
    qp: Any
    qp_ex: Any
    qp_attr: Any
    qp_cap: Any
    qp_init_attr: Any
    qp_init_attr_ex: Any
    sge: Any
    send_wr: Any
    error: type[Exception]

    def open_context(self, name: str) -> tuple[Any, int]:
        """(context, descriptor of its events). Raises what pyverbs raises."""
        return _with_event_descriptor(lambda: self.context(name=name))

    def open_channel(self, context: Any) -> tuple[Any, int]:
        """(completion channel, its descriptor). Raises what pyverbs raises."""
        return _with_event_descriptor(lambda: self.comp_channel(context))


def load() -> Verbs:
    """Import pyverbs. CarrierUnavailable says which package is missing."""
    root = logging.getLogger()
    # pyverbs calls basicConfig when it is imported, which does nothing while there is a handler.
    guard = logging.NullHandler()
    root.addHandler(guard)
    try:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.device import Context
        from pyverbs.mr import MR, MW, MWBindInfo
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
        from pyverbs.wr import SGE, SendWR
    except ImportError as exc:
        raise CarrierUnavailable(
            f"RDMA needs pyverbs, which cannot be imported here ({exc}); install the "
            "distribution's python3-pyverbs, or pdserve[rdma] as docs/rdma.md says"
        ) from exc
    finally:
        root.removeHandler(guard)
    return Verbs(
        ah_attr=AHAttr,
        gid=GID,
        global_route=GlobalRoute,
        context=Context,
        comp_channel=CompChannel,
        cq=CQ,
        mr=MR,
        mw=MW,
        mw_bind_info=MWBindInfo,
        pd=PD,
        qp=QP,
        qp_ex=QPEx,
        qp_attr=QPAttr,
        qp_cap=QPCap,
        qp_init_attr=QPInitAttr,
        qp_init_attr_ex=QPInitAttrEx,
        sge=SGE,
        send_wr=SendWR,
        error=PyverbsError,
    )


@contextmanager
def needed_for(verbs: Verbs, what: str) -> Iterator[None]:
    """Around calls that open something: CarrierUnavailable("cannot {what}: ...")."""
    try:
        yield
    except verbs.error as exc:
        raise CarrierUnavailable(f"cannot {what}: {_reason(exc)}; {NODE_CHECK_HINT}") from exc


@contextmanager
def in_use_for(verbs: Verbs, what: str) -> Iterator[None]:
    """Around calls on what is open: CarrierLost("cannot {what}: ...")."""
    try:
        yield
    except verbs.error as exc:
        raise CarrierLost(f"cannot {what}: {_reason(exc)}") from exc


def error_number(exc: Exception) -> int:
    """The errno of an exception of pyverbs; 0 if it has none."""
    code = getattr(exc, "error_code", 0)
    return code if isinstance(code, int) and code > 0 else 0


def _reason(exc: Exception) -> str:
    number = error_number(exc)
    if not number:
        return str(exc).strip().rstrip(".")
    advice = _ADVICE.get(number, "")
    return f"{os.strerror(number)} (errno {number})" + (f": {advice}" if advice else "")


def _with_event_descriptor(make: Any) -> tuple[Any, int]:
    """The object that ``make`` makes, and the one event descriptor that came with it.

    pyverbs shows that of a channel from 59 on, and that of a context never.
    """
    before = _event_descriptors()
    made = make()
    new = _event_descriptors() - before
    if len(new) != 1:
        made.close()
        raise CarrierUnavailable(
            f"opening an RDMA device brought {len(new)} event descriptors instead of one: is /proc "
            "mounted, and does no other thread open devices at the same time?"
        )
    descriptor = new.pop()
    # A read that finds nothing must return: pyverbs keeps the interpreter's lock meanwhile.
    os.set_blocking(descriptor, False)
    return made, descriptor


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENT_LINK:
                found.add(int(name))
        except OSError:
            pass  # it was the folder that is being listed
    return found
