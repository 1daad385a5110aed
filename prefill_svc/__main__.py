"""``python -m prefill_svc``: the prefill worker's command line."""

from prefill_svc.config import PrefillConfig
from svckit.command import service_command

if __name__ == "__main__":
    service_command(
        "prefill", PrefillConfig, "prefill_svc.service:serve", "Run a prefill worker."
    )()
