"""A real cluster for tests: router, prefill and decode workers as processes on loopback."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Process:
    """One service process, which can be killed and started again on the same ports."""

    name: str
    command: list[str]
    log_path: Path
    ready_url: str
    popen: subprocess.Popen[bytes] | None = None
    lifeline_fd: int | None = None

    def start(self) -> None:
        """Start it, appending to its log."""
        env = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # The reading end goes to the child: however this process ends, the child sees it.
        read_fd, self.lifeline_fd = os.pipe()
        command = [*self.command, "--parent-fd", str(read_fd)]
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, pass_fds=(read_fd,)
            )
        os.close(read_fd)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.popen is not None
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill -9, and wait until the process is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        assert self.popen is not None
        code = self.popen.wait(_STOP_TIMEOUT_S)
        if self.lifeline_fd is not None:
            os.close(self.lifeline_fd)
            self.lifeline_fd = None
        return code

    def log(self) -> str:
        """Everything the process said."""
        return self.log_path.read_text(encoding="utf-8")


@dataclass
class Cluster:
    """One router and some workers; ``workers`` are named prefill-0, decode-0 and so on."""

    folder: Path
    model_dir: Path
    num_prefill: int = 1
    num_decode: int = 1
    worker_flags: dict[str, list[str]] = field(default_factory=dict)
    router_flags: list[str] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    admin_ports: dict[str, int] = field(default_factory=dict)
    listen_ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.http_port = free_port()
        self.control_port = free_port()
        self._plan_router()
        for role, count in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            for number in range(count):
                self._plan_worker(role, f"{role}-{number}")

    @property
    def url(self) -> str:
        """The router's address."""
        return f"http://127.0.0.1:{self.http_port}"

    def worker_address(self, name: str) -> tuple[str, int]:
        """Where a worker takes kvproto connections."""
        return "127.0.0.1", self.listen_ports[name]

    def start(self) -> "Cluster":
        """Start everything and wait until the router is ready to serve."""
        for process in self.processes.values():
            process.start()
        self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until the router and every worker are ready, and all workers are registered."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            for process in self.processes.values():
                if process.popen is not None and process.popen.poll() is not None:
                    raise AssertionError(f"{process.name} ended:\n{process.log()}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {p.name}\n{p.log()}" for p in self.processes.values())
                raise AssertionError(f"the cluster is not ready:\n{logs}")
            time.sleep(0.05)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not end."""
        for process in self.processes.values():
            if process.popen is not None and process.popen.poll() is None:
                process.send(signal.SIGTERM)
        for process in self.processes.values():
            if process.popen is None:
                continue
            try:
                process.wait()
            except subprocess.TimeoutExpired:
                process.kill()

    def health(self, name: str) -> dict[str, Any]:
        """The health answer of a worker, or of the router."""
        port = self.http_port if name == "router" else self.admin_ports[name]
        answer: dict[str, Any] = json.loads(_get(f"http://127.0.0.1:{port}/healthz"))
        return answer

    def metrics(self, name: str) -> dict[str, float]:
        """Samples of /metrics by name with labels."""
        port = self.http_port if name == "router" else self.admin_ports[name]
        samples = {}
        for line in _get(f"http://127.0.0.1:{port}/metrics").decode().splitlines():
            if not line.startswith("#"):
                key, _, value = line.rpartition(" ")
                samples[key] = float(value)
        return samples

    async def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until no worker holds a block or a request."""
        async with asyncio.timeout(timeout_s):
            while not all(self._is_idle(name) for name in self.admin_ports):
                await asyncio.sleep(0.05)

    def _is_idle(self, name: str) -> bool:
        health = self.health(name)
        blocks = health["blocks"]
        num_active = health.get("num_sequences", 0) + health.get("num_prompts", 0)
        return num_active == 0 and blocks["free"] == sum(blocks.values())

    def _is_ready(self) -> bool:
        urls = [process.ready_url for process in self.processes.values()]
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            for url in urls:
                _get(url)
            workers = self.health("router")["workers"]
            num_serving = sum(worker["state"] == "serving" for worker in workers)
            return num_serving == self.num_prefill + self.num_decode
        return False

    def _plan_router(self) -> None:
        self._plan(
            "router",
            "router_svc",
            [
                *("--control-port", str(self.control_port), "--listen-port", str(self.http_port)),
                *("--admin-port", "0", *self.router_flags),
            ],
            f"{self.url}/readyz",
        )

    def _plan_worker(self, role: str, name: str) -> None:
        admin_port = self.admin_ports[name] = free_port()
        listen_port = self.listen_ports[name] = free_port()
        self._plan(
            name,
            f"{role}_svc",
            [
                *("--listen-port", str(listen_port), "--admin-port", str(admin_port)),
                *("--router-port", str(self.control_port), "--threads", "1"),
                *("--kv-pool-nbytes", "256MiB", *self.worker_flags.get(role, [])),
            ],
            f"http://127.0.0.1:{admin_port}/readyz",
        )

    def _plan(self, name: str, module: str, flags: list[str], ready_url: str) -> None:
        common = ["--model", str(self.model_dir), "--log-format", "json"]
        self.processes[name] = Process(
            name,
            [sys.executable, "-m", module, "--instance-id", name, *common, *flags],
            self.folder / f"{name}.log",
            ready_url,
        )


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
        return body
