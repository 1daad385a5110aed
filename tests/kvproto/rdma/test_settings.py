"""The settings under their public names, and what their numbers mean."""

from dataclasses import fields
from pathlib import Path

import pytest

from decode_svc.config import DecodeConfig
from kvproto.rdma.settings import RdmaConfig, RdmaSettings
from prefill_svc.config import PrefillConfig

CONFIGS = {"decode": DecodeConfig, "prefill": PrefillConfig}


def config_of(kind: str, **settings: object) -> RdmaConfig:
    return CONFIGS[kind](model=Path("tiny"), instance_id="w", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_worker_without_settings_has_the_defaults(kind: str) -> None:
    assert RdmaSettings.of(config_of(kind)) == RdmaSettings()


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_setting_of_a_worker_arrives(kind: str) -> None:
    settings = RdmaSettings.of(
        config_of(
            kind,
            rdma_device="mlx5_0:1",
            rdma_gid_index=3,
            rdma_queue_pairs=4,
            rdma_traffic_class=104,
            rdma_service_level=3,
            rdma_ack_timeout=12,
            rdma_retry_count=5,
            rdma_rnr_retry_count=2,
            rdma_mtu_nbytes=1024,
        )
    )
    assert settings == RdmaSettings(
        device="mlx5_0:1",
        gid_index=3,
        num_queue_pairs=4,
        traffic_class=104,
        service_level=3,
        ack_timeout_exponent=12,
        retry_count=5,
        rnr_retry_count=2,
        mtu_nbytes=1024,
    )
    default = RdmaSettings()
    changed = {
        f.name for f in fields(default) if getattr(settings, f.name) != getattr(default, f.name)
    }
    assert len(changed) == sum(name.startswith("rdma_") for name in dir(RdmaConfig))


@pytest.mark.parametrize(
    ("exponent", "seconds"), [(1, 8.192e-6), (14, 0.067108864), (31, 8796.0930)]
)
def test_the_time_out_of_a_packet(exponent: int, seconds: float) -> None:
    timeout_s = RdmaSettings(ack_timeout_exponent=exponent).ack_timeout_s
    assert timeout_s == pytest.approx(seconds)
