"""Completions, delivered by the event loop.

Asking for a completion makes the device write to a descriptor, which the loop watches. Nothing
here waits inside pyverbs, which would stop every thread of the interpreter. The order is: take
the event, ask for the next one, then look: so none is missed. Source: ibv_get_cq_event(3).
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kvproto.rdma.constants import WcStatus
from kvproto.rdma.device import Device
from kvproto.rdma.verbs import needed_for

_POLL_COUNT: Final = 32

# (wr_id, status) of a work request of one queue pair.
OnCompletion = Callable[[int, int], None]


class CompletionQueue:
    """Completions of several queue pairs. A child of the device.

    Args:
        device: whose.
        depth: completions it can hold; as many as there are signalled work requests.
    """

    def __init__(self, device: Device, depth: int) -> None:
        self._device = device
        verbs = device.verbs
        self._receivers: dict[int, OnCompletion] = {}
        with needed_for(verbs, "make an RDMA completion queue"):
            self._channel, self._descriptor = verbs.open_channel(device.context)
            try:
                self.cq = verbs.cq(device.context, depth, None, self._channel, 0)
                self.cq.req_notify()
            except BaseException:
                self._channel.close()
                raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._on_event)
        device.adopt(self)

    def deliver(self, qp_num: int, receiver: OnCompletion) -> None:
        """Pass completions of a queue pair to ``receiver``."""
        self._receivers[qp_num] = receiver

    def forget(self, qp_num: int) -> None:
        """Undo ``deliver``. Idempotent."""
        self._receivers.pop(qp_num, None)

    def poll(self) -> None:
        """Deliver what is there."""
        while True:
            try:
                count, completions = self.cq.poll(_POLL_COUNT)
            except self._device.verbs.error:
                # Nothing that is under way will ever be known to have ended.
                for on_completion in list(self._receivers.values()):
                    on_completion(0, WcStatus.GENERAL_ERR)
                return
            for completion in completions:
                receiver = self._receivers.get(completion.qp_num)
                if receiver is not None:
                    receiver(completion.wr_id, completion.status)
            if count < _POLL_COUNT:
                return

    def close(self) -> None:
        """Its queue pairs must have been closed. Idempotent."""
        if self._descriptor < 0:
            return
        self._device.disown(self)
        self._loop.remove_reader(self._descriptor)
        self._descriptor = -1
        self._receivers.clear()
        self.cq.close()
        self._channel.close()

    def _on_event(self) -> None:
        try:
            self._channel.get_cq_event(self.cq)
        except self._device.verbs.error:
            return  # no event after all
        self.cq.ack_events(1)
        self.cq.req_notify()
        self.poll()
