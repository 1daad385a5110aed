"""Stand-ins for services: small programs that answer /readyz and misbehave when told to."""

import sys
from pathlib import Path

import ops
from ops.cluster import ChildSpec
from ops.ports import free_ports

SOURCE_ROOT = Path(ops.__file__).parent.parent

# Appends its pid to PIDS at each start. MODE: serve, refuse, crash (right after the start),
# crash-once, never-ready, stubborn (ignores SIGTERM).
STAND_IN = """
import http.server, os, signal, sys, threading
from svckit.process import watch_parent
port, mode, pids = int(sys.argv[1]), sys.argv[2], sys.argv[3]
watch_parent(int(sys.argv[sys.argv.index("--parent-fd") + 1]), grace_s=5)
with open(pids, "a+") as file:
    file.write(f"{os.getpid()}\\n")
    file.seek(0)
    num_starts = len(file.readlines())
if mode == "refuse":
    sys.exit("The setting is wrong.")
if mode == "crash" or (mode == "crash-once" and num_starts == 1):
    os._exit(9)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "never-ready" else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

def stop(*_):
    with open(pids + ".order", "a") as file:
        file.write(f"{port}\\n")
    os._exit(0)

if mode != "stubborn":
    signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class StandIns:
    """Makes specs of stand-in programs and reads back what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "stand_in.py"
        self.program.write_text(STAND_IN, encoding="utf-8")
        self.pids_path = folder / "pids"
        self.ports = list(free_ports(8).workers)

    def spec(self, name: str, mode: str, stop_rank: int = 0) -> ChildSpec:
        port = self.ports.pop()
        return ChildSpec(
            name=name,
            command=(sys.executable, str(self.program), str(port), mode, str(self.pids_path)),
            env={"PYTHONPATH": str(SOURCE_ROOT)},
            ready_url=f"http://127.0.0.1:{port}/readyz",
            stop_rank=stop_rank,
        )

    def pids(self) -> list[int]:
        return [int(line) for line in self.pids_path.read_text("ascii").split()]

    def stop_order(self) -> list[int]:
        path = Path(f"{self.pids_path}.order")
        return [int(line) for line in path.read_text("ascii").split()]


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie that waits to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
