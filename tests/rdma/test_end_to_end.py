"""Router, prefill worker and decode worker as processes; KV by RDMA between two devices."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rdma.network import Network
from tests.reference import greedy_reference
from tests.system.cluster import Cluster
from tests.system.completions import client_of, complete, complete_all
from tests.system.conftest import start_cluster as start_cluster

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(280)]

_LENGTHS = (17, 33, 64, 130, 300)
_PROMPTS = [[(7 * i + 3 * k) % 256 for i in range(length)] for k, length in enumerate(_LENGTHS)]
_POOL = ["--kv-pool-nbytes", "16MiB"]
# A peer that does not answer is given up after about a second.
_IMPATIENT = ["--rdma-ack-timeout", "13", "--rdma-retry-count", "3"]


def _flags(*decode: str) -> dict[str, list[str]]:
    return {
        "prefill": ["--rdma-device", "rxe0", *_POOL, *_IMPATIENT, "--max-step-tokens", "64"],
        "decode": ["--rdma-device", "rxe1", *_POOL, *_IMPATIENT, *decode],
    }


async def test_tokens_are_those_of_one_process_and_kv_came_by_rdma(
    tiny_model_dir: Callable[[str], Path],
    start_cluster: Callable[..., Cluster],
    network: Network,
) -> None:
    model_dir = tiny_model_dir("llama")
    expected = greedy_reference(model_dir, _PROMPTS, max_tokens=6)
    cluster = start_cluster(model_dir, worker_flags=_flags("--kv-carrier", "rdma"))
    before = network.num_packets_sent("rdma0")
    answers = await complete_all(cluster, _PROMPTS, max_tokens=6, num_in_flight=3)
    assert [tokens for tokens, _ in answers] == expected
    assert {timings["carrier"] for _, timings in answers} == {"rdma"}
    nbytes = sum(timings["handoff_nbytes"] for _, timings in answers)
    assert network.num_packets_sent("rdma0") - before >= nbytes // 4096
    [path] = cluster.health("decode-0")["prefill_workers"].values()
    assert path["carrier"] == "rdma"
    assert path["bandwidth_bytes_per_s"] > 0
    assert cluster.health("decode-0")["offers"]["rdma"]["device"] == "rxe1:1"
    await cluster.wait_idle()

    # The cable is pulled: the next handoff fails on RDMA and arrives all the same, by TCP.
    cluster.processes["decode-0"].kill()
    cluster.processes["decode-0"].command += ["--kv-carrier", "auto"]
    cluster.processes["decode-0"].start()
    cluster.wait_ready()
    async with client_of(cluster) as client:
        network.loss(100)
        tokens, timings = await complete(client, "llama", _PROMPTS[0], 6)
    assert tokens == expected[0]
    assert timings["carrier"] in {"mapped", "tcp"}
    health = cluster.health("decode-0")["prefill_workers"]
    [path] = health.values()
    assert "rdma" in path["passed_over"], path
    assert cluster.metrics("decode-0")['pd_decode_path_fallbacks_total{carrier="rdma"}'] >= 1
    await cluster.wait_idle()
    cluster.stop()
