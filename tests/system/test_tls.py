"""Router, prefill and decode worker over TLS: the same tokens, and nobody gets in without it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproto.errors import AuthenticationFailed, HandshakeRefused
from kvproto.handshake import Identity
from kvproto.tcp import connect
from svckit.tls import load_tls
from tests.certificates import Authority
from tests.reference import greedy_reference
from tests.system.cluster import Cluster
from tests.system.completions import complete_all
from tests.tiny_models import EOS_TOKEN_ID

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

_STRANGER = Identity(role="decode", instance_id="stranger")


async def test_a_trio_over_tls(
    tiny_model_dir: Callable[[str], Path],
    start_cluster: Callable[..., Cluster],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    # A certificate for each service: what they have in common is the CA alone.
    flags = {
        role: [
            *("--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key)),
            *("--tls-ca-file", str(files.ca)),
        ]
        for role in ("router", "prefill", "decode")
        for files in [authority.issue(f"{role}.example")]
    }
    prompts = [
        [(7 * index + length) % EOS_TOKEN_ID for index in range(length)] for length in (5, 200)
    ]
    expected = greedy_reference(tiny_model_dir("llama"), prompts, max_tokens=12)
    # On one host KV would go through shared memory; here it is to travel encrypted.
    flags["decode"] = [*flags["decode"], "--kv-carrier", "tcp"]
    cluster = start_cluster(
        tiny_model_dir("llama"), worker_flags=flags, router_flags=flags["router"]
    )
    answers = await complete_all(cluster, prompts, max_tokens=12, num_in_flight=2)
    assert [output for output, _ in answers] == expected
    assert [timings["carrier"] for _, timings in answers] == ["local", "tcp"]
    ports = [cluster.control_port, *(_port_of(cluster, role) for role in ("prefill", "decode"))]
    alien = load_tls(*Authority(tmp_path / "alien").issue().paths())
    for port in ports:
        with pytest.raises(HandshakeRefused, match="uses TLS"):
            await connect("127.0.0.1", port, identity=_STRANGER, timeout_s=10)
        with pytest.raises(AuthenticationFailed, match="certificate is not accepted"):
            await connect("127.0.0.1", port, identity=_STRANGER, timeout_s=10, tls=alien.client)
    async with asyncio.timeout(20):
        await cluster.wait_idle()
    cluster.stop()


def _port_of(cluster: Cluster, role: str) -> int:
    command = cluster.processes[f"{role}-0"].command
    return int(command[command.index("--listen-port") + 1])
