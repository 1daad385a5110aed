"""The two processes of one contestant, stopped except in its turns.

A contestant that polls or runs threads of its own would slow the others down, so both processes
get SIGSTOP outside their turn. Each has half of the cores for itself: otherwise the scheduler
puts both on one core or not as it likes, and a bare socket is three times as slow when it does.
Their memory is filled at the begin of a turn and given back to
the kernel at its end: however many contestants there are, one of them holds memory. Before each
transfer the receiver spoils pieces of its memory, and behind it they must hold the pattern.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.transfer.channel import Channel
from bench.transfer.contestant import Contestant, Unavailable
from bench.transfer.memory import Pattern, sample, spoil

# Nothing takes this long, 1 GiB as JSON included; a peer's library that hangs is given up then.
TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """A contestant broke in a turn; the others go on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Wall-clock seconds of each transfer, and processor seconds of one at either side.

    Processor time says where a transfer spends, and on a busy machine it lies less than a clock.
    """

    times_s: list[float]
    sender_cpu_s: float
    receiver_cpu_s: float


class Duel:
    """One contestant in its two processes; made by ``fork``, so before any thread is started.

    Args:
        contestant: which.
        source: the sender's memory, filled with ``pattern``; the fork shares its pages.
        max_nbytes: of the largest transfer.
        has_huge_pages: ask for them in the receiver.
    """

    def __init__(
        self,
        contestant: Contestant,
        source: mmap.mmap,
        pattern: Pattern,
        *,
        max_nbytes: int,
        has_huge_pages: bool,
    ) -> None:
        self.contestant = contestant
        fork = multiprocessing.get_context("fork")
        side_here, side_there = Channel.pair()
        self._sender, sender_end = Channel.pair()
        self._receiver, receiver_end = Channel.pair()
        inherited = [self._sender, self._receiver]
        self._processes = [
            fork.Process(
                target=_run_sender,
                args=(contestant, source, side_here, sender_end, [*inherited, side_there]),
                daemon=True,
            ),
            fork.Process(
                target=_run_receiver,
                args=(
                    contestant,
                    max_nbytes,
                    has_huge_pages,
                    pattern,
                    side_there,
                    receiver_end,
                    [*inherited, side_here],
                ),
                daemon=True,
            ),
        ]
        for process in self._processes:
            process.start()
        for channel in (side_here, side_there, sender_end, receiver_end):
            channel.close()
        self._sender.set_timeout(TIMEOUT_S)
        self._receiver.set_timeout(TIMEOUT_S)

    def start(self) -> None:
        """Wait until both halves are ready, then stop them. Unavailable, Failed."""
        self._expect(self._receiver)
        self._expect(self._sender)
        self._signal(signal.SIGSTOP)

    def turn(self, nbytes: int, num_transfers: int) -> Turn:
        """Make ``num_transfers`` transfers, one more beforehand untimed. Failed."""
        self._signal(signal.SIGCONT)
        self._expect(self._receiver, do="touch", nbytes=nbytes)
        times_s, sender_cpu_s, receiver_cpu_s = [], [], []
        # One more than asked for: the first finds cold caches and closed windows.
        for _ in range(num_transfers + 1):
            self._expect(self._receiver, do="spoil", nbytes=nbytes)
            sent = self._expect(self._sender, nbytes=nbytes)
            verified = self._expect(self._receiver, do="verify", nbytes=nbytes)
            times_s.append(sent["time_s"])
            sender_cpu_s.append(sent["cpu_s"])
            receiver_cpu_s.append(verified["cpu_s"])
        self._expect(self._receiver, do="release", nbytes=nbytes)
        self._signal(signal.SIGSTOP)
        return Turn(
            times_s[1:], statistics.mean(sender_cpu_s[1:]), statistics.mean(receiver_cpu_s[1:])
        )

    def end(self) -> None:
        """End both processes; a stopped or hanging one too."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def _expect(self, channel: Channel, **message: Any) -> dict[str, Any]:
        try:
            if message:
                channel.send(**message)
            answer = channel.receive()
        except (EOFError, OSError) as exc:
            raise Failed(f"{self.contestant.name}: no answer: {exc}") from exc
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "failed" in answer:
            raise Failed(f"{self.contestant.name}: {answer['failed']}")
        return answer


def _begin_process(inherited: list[Channel], *, is_sender: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        half = len(cores) // 2
        os.sched_setaffinity(0, cores[:half] if is_sender else cores[half:])
    # A stopped process would outlive a killed parent for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for channel in inherited:
        channel.close()


def _report(channel: Channel, exc: Exception) -> None:
    if isinstance(exc, Unavailable):
        channel.send(unavailable=str(exc))
    else:
        traceback.print_exc(file=sys.stderr)
        channel.send(failed=f"{type(exc).__name__}: {exc}")


def _run_sender(
    contestant: Contestant,
    source: mmap.mmap,
    side: Channel,
    orders: Channel,
    inherited: list[Channel],
) -> None:
    _begin_process(inherited, is_sender=True)
    try:
        contestant.check()
        uvloop.run(_obey_sender(contestant, source, side, orders))
    except Exception as exc:
        _report(orders, exc)


async def _obey_sender(
    contestant: Contestant, source: mmap.mmap, side: Channel, orders: Channel
) -> None:
    await contestant.connect(memoryview(source), side)
    orders.send(ready=True)
    while True:
        try:
            order = orders.receive()
        except EOFError:
            await contestant.disconnect()
            return
        nbytes = order["nbytes"]
        await contestant.prepare(nbytes)
        begin_at, cpu_begin_s = time.perf_counter(), time.process_time()
        await contestant.transfer(nbytes)
        time_s, cpu_s = time.perf_counter() - begin_at, time.process_time() - cpu_begin_s
        orders.send(time_s=time_s, cpu_s=cpu_s)


def _run_receiver(
    contestant: Contestant,
    max_nbytes: int,
    has_huge_pages: bool,
    pattern: Pattern,
    side: Channel,
    orders: Channel,
    inherited: list[Channel],
) -> None:
    _begin_process(inherited, is_sender=False)
    try:
        contestant.check()
        memory = contestant.memory(max_nbytes, has_huge_pages=has_huge_pages)
    except Exception as exc:
        _report(orders, exc)
        return

    def obey() -> None:
        cpu_begin_s, pieces = 0.0, []
        while True:
            try:
                order = orders.receive()
            except EOFError:
                return
            cpu_s, at = time.process_time() - cpu_begin_s, None
            spans = contestant.spans(max_nbytes, order["nbytes"])
            if not contestant.has_receiver:
                pass
            elif order["do"] == "touch":
                memory.touch(spans)
            elif order["do"] == "spoil":
                pieces = sample(spans)
                spoil(memory.view, pieces)
            elif order["do"] == "verify":
                at = pattern.first_difference(memory.view, pieces)
            else:
                memory.release()
            cpu_begin_s = time.process_time()
            if at is None:
                orders.send(done=True, cpu_s=cpu_s)
            else:
                orders.send(failed=f"the receiver has other bytes at offset {at}")

    orders.send(ready=True)
    obeying = threading.Thread(target=obey, daemon=True)
    obeying.start()
    try:
        if contestant.has_receiver:
            contestant.serve(memory.view, side)
    except EOFError:
        pass
    except Exception:
        # The sender misses its answer and times out, or fails with its connection.
        traceback.print_exc(file=sys.stderr)
    obeying.join()
