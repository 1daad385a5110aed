"""Handing work requests to a queue pair: several for one doorbell, without garbage where possible.

Two ways for the same thing. Devices with the extended interface take requests one after the other
and start together (ibv_wr_start(3)); the others take a chain of requests (ibv_post_send(3)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvproto.rdma.constants import SEND_SIGNALED, WR_RDMA_WRITE
from kvproto.rdma.verbs import Verbs


@dataclass(slots=True)
class RemoteWrite:
    """One work request: local pieces, gathered into one run of the other side's memory.

    ``pieces``: (address, nbytes, lkey) of each.
    """

    remote_address: int
    pieces: list[tuple[int, int, int]]

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(nbytes for _, nbytes, _ in self.pieces)


class Poster(Protocol):
    """Posts writes on one queue pair."""

    def post(
        self, writes: Sequence[RemoteWrite], key: int, first_id: int, signal_every: int
    ) -> None:
        """Post all with one doorbell; ids count from ``first_id``.

        Each ``signal_every``-th id and the last one ask for a completion. Raises what pyverbs
        raises, and then nothing was posted.
        """


class ExtendedPoster:
    """With the extended interface: nothing is made for a request but numbers."""

    def __init__(self, verbs: Verbs, qp: Any, max_sge: int) -> None:
        self._qp = qp
        # Their numbers are copied at once, so the same few serve for ever.
        self._pieces = [verbs.sge(0, 0, 0) for _ in range(max_sge)]

    def post(
        self, writes: Sequence[RemoteWrite], key: int, first_id: int, signal_every: int
    ) -> None:
        """See ``Poster.post``."""
        qp, pieces = self._qp, self._pieces
        last_id = first_id + len(writes) - 1
        qp.wr_start()
        try:
            for wr_id, write in enumerate(writes, first_id):
                is_signalled = wr_id == last_id or wr_id % signal_every == 0
                qp.wr_id = wr_id
                qp.wr_flags = SEND_SIGNALED if is_signalled else 0
                qp.wr_rdma_write(key, write.remote_address)
                for piece, (address, nbytes, lkey) in zip(pieces, write.pieces, strict=False):
                    piece.addr, piece.length, piece.lkey = address, nbytes, lkey
                if len(write.pieces) == 1:
                    qp.wr_set_sge(pieces[0])
                else:
                    qp.wr_set_sge_list(len(write.pieces), pieces)
        except BaseException:
            qp.wr_abort()
            raise
        qp.wr_complete()

    def close(self) -> None:
        """Free the pieces: pyverbs forgets to. Once only."""
        for piece in self._pieces:
            piece.close()


class ChainPoster:
    """With the plain interface: a chain of requests, made for each doorbell."""

    def __init__(self, verbs: Verbs, qp: Any) -> None:
        self._verbs = verbs
        self._qp = qp

    def post(
        self, writes: Sequence[RemoteWrite], key: int, first_id: int, signal_every: int
    ) -> None:
        """See ``Poster.post``."""
        verbs = self._verbs
        last_id = first_id + len(writes) - 1
        made: list[Any] = []
        try:
            following: Any = None
            # From the last to the first: each request is made with the one behind it.
            for wr_id, write in zip(
                range(last_id, first_id - 1, -1), reversed(writes), strict=True
            ):
                is_signalled = wr_id == last_id or wr_id % signal_every == 0
                pieces = [verbs.sge(*piece) for piece in write.pieces]
                made.extend(pieces)
                following = verbs.send_wr(
                    wr_id=wr_id,
                    opcode=WR_RDMA_WRITE,
                    num_sge=len(pieces),
                    sg=pieces,
                    send_flags=SEND_SIGNALED if is_signalled else 0,
                    next_wr=following,
                )
                made.append(following)
                following.set_wr_rdma(key, write.remote_address)
            self._qp.post_send(following)
        finally:
            # The device has copied them; pyverbs forgets to free them.
            for item in made:
                item.close()

    def close(self) -> None:
        """Nothing is kept."""
