"""Leases whose writer gave no proof that it has ended: their blocks wait here, not in the pool.

On TCP the end of the connection is proof, and a writer by RDMA is cut off by this side. A writer
that has mapped our memory can write until it detaches or dies, and one that was stopped does
neither for as long as it likes. Such blocks stay out of use; above a budget ``LeaseTable`` grants
nothing more, which the health answer shows.
"""

import asyncio

import structlog

from kvproto.carrier import Attachment
from kvproto.lease import LeaseTable


class Quarantine:
    """Releases each lease when its writer has detached. ``run`` owns the waiting tasks."""

    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases
        self._tasks: asyncio.TaskGroup | None = None
        self._log = structlog.get_logger("decode.quarantine")

    async def run(self) -> None:
        """Wait for writers until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    def keep(self, generation: int, attachment: Attachment) -> None:
        """The lease is revoked; release it once ``attachment`` is gone, which may be now."""
        attachment.cut()
        if attachment.is_gone:
            self._leases.release(generation)
            return
        num_blocks = len(self._leases.revoke(generation))
        self._log.error(
            "blocks in quarantine: the prefill worker neither confirms nor detaches",
            writer=attachment.writer,
            num_blocks=num_blocks,
        )
        if self._tasks is not None:
            self._tasks.create_task(
                self._release(generation, attachment), name=f"quarantine {generation}"
            )

    async def _release(self, generation: int, attachment: Attachment) -> None:
        await attachment.wait_gone()
        num_blocks = len(self._leases.release(generation))
        self._log.info("blocks out of quarantine", writer=attachment.writer, num_blocks=num_blocks)
