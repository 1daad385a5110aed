"""``pdctl doctor`` beside real processes: healthy, and slow for a reason that the test made."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from ops.diagnosis.examination import Wishes, examine
from ops.diagnosis.place import Place
from ops.diagnosis.report import Report
from ops.node.finding import Verdict
from tests.kvproto.fault_proxy import FaultProxy, Faults
from tests.system.cluster import Cluster
from tests.system.completions import client_of, complete

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

Start = Callable[..., Cluster]

_NUM_CLIENTS = 8


def admin_urls(cluster: Cluster) -> tuple[str, ...]:
    return tuple(f"http://127.0.0.1:{port}" for port in cluster.admin_ports.values())


async def examined(cluster: Cluster) -> Report:
    return await examine(
        Wishes(
            router_url=cluster.url,
            admin_urls=admin_urls(cluster),
            seconds=2.0,
            line_rate=None,
            node_checks=lambda: (),
            answer_timeout_s=20.0,
        )
    )


@contextlib.asynccontextmanager
async def busy(cluster: Cluster, *, num_prompt_tokens: int, max_tokens: int) -> AsyncIterator[None]:
    """Clients that each send one request after the other."""
    model = cluster.health("router")["model"]

    async with client_of(cluster) as client:

        async def send(number: int) -> None:
            prompt: Sequence[int] = [(7 * i + number) % 256 for i in range(num_prompt_tokens)]
            while True:
                await complete(client, model, prompt, max_tokens, ignore_eos=True)

        senders = [asyncio.create_task(send(number)) for number in range(_NUM_CLIENTS)]
        try:
            yield
            assert not any(sender.done() for sender in senders), "a request failed"
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.wait(senders)


async def wait_until_waiting(
    cluster: Cluster, worker: str, gauge: str, least: float = _NUM_CLIENTS / 2
) -> None:
    async with asyncio.timeout(60):
        while max(values_of(cluster, worker, gauge), default=0.0) < least:
            await asyncio.sleep(0.02)


def values_of(cluster: Cluster, worker: str, name: str) -> list[float]:
    """The values of a metric under all labels."""
    return [
        value
        for sample, value in cluster.metrics(worker).items()
        if sample.partition("{")[0] == name
    ]


async def test_a_healthy_cluster_is_idle_and_nothing_fails(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start
) -> None:
    cluster = start_cluster(tiny_model_dir("llama"))
    async with client_of(cluster) as client:
        await complete(client, "llama", list(range(60)), 4)
    await cluster.wait_idle()
    flags = [part for url in admin_urls(cluster) for part in ("--admin", url)]
    command = [sys.executable, "-m", "ops.pdctl", "doctor", "--url", cluster.url, "--json", *flags]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, encoding="utf-8", timeout=100, check=False
    )
    report = json.loads(ended.stdout)
    findings = {finding["subject"].split()[0]: finding for finding in report["services"]}
    assert [f for f in report["services"] if f["verdict"] == "FAIL"] == []
    assert findings["carrier"]["measured"] == "mapped"
    assert findings["compatibility"]["verdict"] == "OK"
    assert findings["compatibility"]["measured"].endswith("of 2 workers")
    assert findings["ports"]["measured"] == "2 open"
    assert findings["refusals"]["verdict"] == "OK"
    assert report["diagnosis"]["bottleneck"] == "idle"
    assert report["diagnosis"]["unseen"] == []
    # All but the means of things that did not happen.
    assert len(report["diagnosis"]["figures"]) >= 17
    cluster.stop()


async def test_a_decode_pool_for_one_sequence_is_named(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start
) -> None:
    # 24 blocks of 16 KiB; each sequence needs 19 in the end.
    cluster = start_cluster(
        tiny_model_dir("llama"), worker_flags={"decode": ["--kv-pool-nbytes", "384KiB"]}
    )
    async with busy(cluster, num_prompt_tokens=100, max_tokens=200):
        await wait_until_waiting(cluster, "decode-0", "pd_decode_waiting_sequences")
        report = await examined(cluster)
    diagnosis = report.diagnosis
    assert diagnosis.place is Place.DECODE_MEMORY, diagnosis
    assert diagnosis.verdict is Verdict.WARN
    assert "kv_pool_nbytes of [decode]" in diagnosis.next_step
    cluster.stop()


async def test_one_slow_prefill_slot_is_named_and_so_is_a_fall_back(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start, tmp_path: Path
) -> None:
    cluster = start_cluster(
        tiny_model_dir("llama"),
        worker_flags={
            "prefill": ["--max-step-prompts", "1", "--max-step-tokens", "16"],
            "decode": ["--mapped-dir", str(tmp_path / "elsewhere")],
        },
    )
    async with busy(cluster, num_prompt_tokens=700, max_tokens=2):
        await wait_until_waiting(cluster, "prefill-0", "pd_prefill_waiting_prompts")
        report = await examined(cluster)
    diagnosis = report.diagnosis
    assert diagnosis.place is Place.PREFILL_QUEUE, diagnosis
    assert "another prefill worker" in diagnosis.next_step
    [carrier] = [f for f in report.services if f.subject.startswith("carrier")]
    assert carrier.verdict is Verdict.WARN
    assert "no owner listens" in carrier.reason
    cluster.stop()


async def test_a_path_that_is_full_is_named(
    tiny_model_dir: Callable[[str], Path], start_cluster: Start
) -> None:
    # The worker's address is that of the proxy: the same port on another loopback address.
    throttled = Faults(nbytes_per_s=5e4)
    async with FaultProxy(0, target_host="127.0.0.3", to_source=throttled) as proxy:
        proxy.target_port = proxy.port
        cluster = start_cluster(
            tiny_model_dir("llama"),
            worker_flags={
                "prefill": [
                    *("--listen-host", "127.0.0.3", "--listen-port", str(proxy.port)),
                    *("--advertise-host", "127.0.0.1"),
                ],
                # Small, because the probe takes a quarter of it.
                "decode": [
                    *("--kv-carrier", "tcp", "--max-lanes", "1", "--kv-pool-nbytes", "1MiB"),
                    *("--connect-timeout-s", "60"),
                ],
            },
        )
        # 0.3 MB of KV each, which take six seconds; three find room at a time.
        async with busy(cluster, num_prompt_tokens=300, max_tokens=2):
            path = "pd_decode_path_bandwidth_bytes_per_second"
            await wait_until_waiting(cluster, "decode-0", path, least=1.0)
            await wait_until_waiting(cluster, "prefill-0", "pd_prefill_computed_tokens_total", 600)
            report = await examined(cluster)
        cluster.stop()
    assert report.diagnosis.place is Place.HANDOFF, report.diagnosis
    assert "over tcp" in report.diagnosis.reason
    [carrier] = [f for f in report.services if f.subject.startswith("carrier")]
    assert (carrier.verdict, carrier.measured) == (Verdict.OK, "tcp")
    [bandwidth] = [f for f in report.services if f.subject.startswith("bandwidth")]
    assert "kB/s" in bandwidth.measured
