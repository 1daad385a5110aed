"""RDMA carrier against ``ib_write_bw`` and TCP, on two devices of one machine.

    python -m bench.rdma --writer rxe0 --owner rxe1        # on a machine with RDMA devices
    python -m tests.rdma.rig python -m bench.rdma          # in the test rig

Each round runs everything once, one after the other; figures are medians, and ratios are taken
within a round, so that a noisy machine does not decide. CPU is all that the machine was busy
with, in the kernel too.
"""

import argparse
import asyncio
import json
import mmap
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bench.rdma.owner import BLOCK_SIZE, GEOMETRY
from kvproto.carrier import KvWriter
from kvproto.digest import RegionDigests
from kvproto.handshake import Identity
from kvproto.messages import Commit, CommitAck, Message, Offer
from kvproto.rdma.constants import Access
from kvproto.rdma.device import Device, open_device
from kvproto.rdma.memory import RegisteredMemory
from kvproto.rdma.settings import RdmaSettings
from kvproto.rdma.writer import RdmaWriter, answer_offer
from kvproto.tcp import Peer, TcpWriter, connect

TOKEN_NBYTES = GEOMETRY.kv_token_nbytes
TRANSFER_NBYTES = 16 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


class Bench:
    """The writer's side: one connection to an owner process, and memory to send from."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        memory = mmap.mmap(-1, TRANSFER_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(memory)
        self.memory[:] = bytes(range(256)) * (TRANSFER_NBYTES // 256)
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()

    async def start(self) -> None:
        """Start the owner, connect to it, attach."""
        options = self.options
        command = [sys.executable, "-m", "bench.rdma.owner", options.owner]
        num_tokens = 2 * TRANSFER_NBYTES // TOKEN_NBYTES
        self.process = await asyncio.create_subprocess_exec(
            *command,
            str(num_tokens),
            str(options.queue_pairs),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        port = (await self._answer())["port"]
        identity = Identity("prefill", "writer", GEOMETRY.facts())
        self.peer: Peer = await connect("127.0.0.1", port, identity=identity, timeout_s=10.0)
        self.device: Device = open_device(RdmaSettings(device=options.writer))
        self.registered = RegisteredMemory(self.device, self.memory, Access(0), "the KV")
        self.reading = asyncio.create_task(self._read())
        offer = await self.inbox.get()
        assert isinstance(offer, Offer)
        writer = await answer_offer(self.peer, offer, GEOMETRY, self.device, [self.registered])
        assert writer is not None, "the owner says why"
        self.rdma: RdmaWriter = writer

    async def stop(self) -> None:
        """End both sides."""
        await self.peer.close()
        await self.reading
        await self.rdma.close()
        self.device.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()

    async def _read(self) -> None:
        async for message in self.peer:
            self.inbox.put_nowait(message)

    async def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return answer

    async def transfer(
        self, carrier: str, nbytes: int, write_nbytes: int, is_checked: bool
    ) -> tuple[float, float]:
        """Seconds from the first write until all are acknowledged, and until COMMIT_ACK."""
        num_tokens = nbytes // TOKEN_NBYTES
        wish = {
            "num_tokens": num_tokens,
            "is_placed": carrier == "rdma",
            "is_checked": is_checked,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wish).encode("utf-8") + b"\n")
        lease = await self._answer()
        name, generation = lease["sequence_id"], lease["generation"]
        writer: KvWriter = TcpWriter(self.peer, GEOMETRY)
        if carrier == "rdma":
            self.rdma.begin(
                name,
                generation,
                lease["table"],
                num_tokens,
                keys=lease["keys"],
                is_checked=is_checked,
            )
            writer = self.rdma
        digests = RegionDigests(GEOMETRY) if is_checked else None
        row_nbytes = TOKEN_NBYTES // 2
        step = write_nbytes // TOKEN_NBYTES
        half = nbytes // 2
        began_at = time.monotonic()
        for first in range(0, num_tokens, step):
            count = min(step, num_tokens - first)
            start, size = first * row_nbytes, count * row_nbytes
            buffers = [self.memory[start : start + size], self.memory[half + start :][:size]]
            await writer.write(name, generation, 0, first, count, buffers, digests)
        await writer.flush()
        flushed_s = time.monotonic() - began_at
        values = [] if digests is None else digests.values()
        await self.peer.send(Commit(name, generation, num_tokens, nbytes, values, 0.0, 0.0, 0.0))
        answer = await self.inbox.get()
        elapsed_s = time.monotonic() - began_at
        assert isinstance(answer, CommitAck), answer
        if carrier == "rdma":
            self.rdma.end(name, generation)
        return flushed_s, elapsed_s


def busy_s() -> float:
    """CPU time that this machine has spent on anything so far."""
    with open("/proc/stat", encoding="ascii") as stat:
        fields = [int(field) for field in stat.readline().split()[1:8]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / 100


def ib_write_bw(options: argparse.Namespace, nbytes: int) -> float:
    """Bytes/s of perftest between the same two devices, polling as it does by itself."""
    common = ["-s", str(nbytes), "-n", str(max(5, min(200, (64 << 20) // nbytes)))]
    common += ["-F", "--report_gbits", "-q", str(options.queue_pairs)]
    common += ["-x", str(options.gid_index)]
    server = subprocess.Popen(
        ["ib_write_bw", "-d", options.owner, *common],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(50):
            time.sleep(0.1)
            client = subprocess.run(
                ["ib_write_bw", "-d", options.writer, *common, "127.0.0.1"],
                capture_output=True,
                text=True,
                encoding="utf-8",
                check=False,
                timeout=120,
            )
            rows = re.findall(rf"^\s*{nbytes}\s+\d+\s+[\d.]+\s+([\d.]+)", client.stdout, re.M)
            if rows:
                return float(rows[0]) * 1e9 / 8
        raise SystemExit(f"ib_write_bw failed: {client.stdout}{client.stderr}")
    finally:
        server.kill()
        server.wait()


async def rounds(options: argparse.Namespace) -> None:
    """Run and print."""
    bench = Bench(options)
    await bench.start()
    ways: dict[str, Callable[[int], Coroutine[Any, Any, tuple[float, float]]]] = {
        "rdma": lambda size: bench.transfer("rdma", TRANSFER_NBYTES, size, is_checked=False),
        "rdma checked": lambda size: bench.transfer("rdma", TRANSFER_NBYTES, size, is_checked=True),
        "tcp": lambda size: bench.transfer("tcp", TRANSFER_NBYTES, size, is_checked=False),
    }
    speeds: dict[tuple[str, int], list[float]] = {}
    ratios: dict[tuple[str, int], list[float]] = {}
    committed: dict[tuple[str, int], list[float]] = {}
    cpu: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds):
        for size in options.sizes:
            best = await asyncio.to_thread(ib_write_bw, options, size)
            speeds.setdefault(("ib_write_bw", size), []).append(best)
            for name, way in ways.items():
                before = busy_s()
                flushed_s, elapsed_s = await way(size)
                cpu.setdefault((name, size), []).append((busy_s() - before) / TRANSFER_NBYTES)
                speeds.setdefault((name, size), []).append(TRANSFER_NBYTES / flushed_s)
                ratios.setdefault((name, size), []).append(TRANSFER_NBYTES / flushed_s / best)
                committed.setdefault((name, size), []).append(TRANSFER_NBYTES / elapsed_s / best)
            print(f"round {number + 1}/{options.rounds}, {size >> 10} KiB done", file=sys.stderr)
    block_nbytes = TOKEN_NBYTES * BLOCK_SIZE
    fixed = [
        (await bench.transfer("rdma", block_nbytes, block_nbytes, is_checked=True))[1]
        for _ in range(20)
    ]
    fixed_tcp = [
        (await bench.transfer("tcp", block_nbytes, block_nbytes, is_checked=True))[1]
        for _ in range(20)
    ]
    print("bandwidth; ratio to ib_write_bw until all is acknowledged, and until COMMIT_ACK")
    print(f"{'write size':>12}" + "".join(f"{name:>25}" for name in ("ib_write_bw", *ways)))
    for size in options.sizes:
        cells = [f"{statistics.median(speeds['ib_write_bw', size]) / 1e6:>19.0f} MB/s "]
        cells += [
            f"{statistics.median(speeds[name, size]) / 1e6:>9.0f} MB/s "
            f"{statistics.median(ratios[name, size]):>5.2f} "
            f"{statistics.median(committed[name, size]):>4.2f}"
            for name in ways
        ]
        print(f"{size >> 10:>8} KiB" + "".join(cells))
    for name in ways:
        per_gb = [statistics.median(cpu[name, size]) * 1e9 for size in options.sizes]
        print(f"CPU {name}: " + ", ".join(f"{seconds:.2f}" for seconds in per_gb) + " s/GB")
    print(
        f"one block of 32 KiB, checked, first write to COMMIT_ACK: RDMA "
        f"{statistics.median(fixed) * 1e3:.2f} ms, TCP {statistics.median(fixed_tcp) * 1e3:.2f} ms"
    )
    await bench.stop()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--writer", default="rxe0", help="device that writes")
    parser.add_argument("--owner", default="rxe1", help="device of the pool")
    parser.add_argument("--gid-index", type=int, default=1, help="for ib_write_bw")
    parser.add_argument("--queue-pairs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    asyncio.run(rounds(parser.parse_args()))


if __name__ == "__main__":
    main()
