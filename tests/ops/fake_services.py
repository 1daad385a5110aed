"""Stand-ins for the three services that ``pdctl up`` starts by module name.

``python -m`` looks in the current folder first, so modules of the services' names written there
are found before the real ones.
"""

import subprocess
import sys
from pathlib import Path

FAKE_SERVICE = """
import http.server, json, os, signal, sys
from svckit.process import watch_parent

def flag(name):
    return sys.argv[sys.argv.index(name) + 1]

role = os.path.basename(__file__).removesuffix("_svc.py")
watch_parent(int(flag("--parent-fd")), grace_s=5)
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
with open(flag("--instance-id") + ".argv", "w") as file:
    json.dump({"argv": sys.argv[1:], "threads": os.environ["OMP_NUM_THREADS"]}, file)
if os.environ.get("FAKE_REFUSAL") == role:
    sys.exit("The pool does not fit into memory.")
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

TIMINGS = {"ttft_s": 0.5, "e2e_s": 1.5, "num_output_tokens": 3, "prefill_s": 0.25,
           "handoff_s": 0.05, "handoff_nbytes": 5000000, "carrier": "tcp"}
EVENTS = [{"choices": [{"delta": {"content": "An answer"}}]},
          {"choices": [{"delta": {"content": "."}, "finish_reason": "stop"}]},
          {"choices": [], "timings": TIMINGS}]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if os.environ.get("FAKE_UNREADY") == role:
            print("probed", flush=True)
            return self.send_error(503)
        self.answer(json.dumps({"data": [{"id": "m"}]}).encode())
    def do_POST(self):
        if os.environ.get("FAKE_SILENCE"):
            print("asked", flush=True)
            signal.pause()
        self.answer(b"".join(b"data: " + json.dumps(e).encode() + b"\\n\\n" for e in EVENTS))
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

port = int(flag("--listen-port" if role == "router" else "--admin-port"))
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeServices:
    """A folder in which ``pdctl`` finds the stand-ins, and what they left there."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = {**env, "PD_CACHE_DIR": str(folder / "cache")}
        self._started: list[subprocess.Popen[str]] = []
        for role in ("router", "prefill", "decode"):
            (folder / f"{role}_svc.py").write_text(FAKE_SERVICE, encoding="utf-8")

    def pdctl(self, *arguments: str) -> subprocess.Popen[str]:
        """Start pdctl in the folder."""
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.pdctl", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=self.folder,
            env=self.env,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what a failed test left; the children notice by themselves."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=20)

    def pids(self) -> list[int]:
        """The processes that were started."""
        path = self.folder / "pids"
        return [int(line) for line in path.read_text("ascii").split()] if path.exists() else []
