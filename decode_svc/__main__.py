"""``python -m decode_svc``: the decode worker's command line."""

from decode_svc.config import DecodeConfig
from svckit.command import service_command

if __name__ == "__main__":
    service_command("decode", DecodeConfig, "decode_svc.service:serve", "Run a decode worker.")()
