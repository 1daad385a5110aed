"""What a person may set about RDMA; the defaults suit a RoCE network that drops little."""

from dataclasses import dataclass
from typing import Final, Protocol

# A local ACK time-out of exponent n is 4.096 us * 2^n (InfiniBand specification, 9.9.2.1.1).
_ACK_TIMEOUT_UNIT_S: Final = 4.096e-6


class RdmaConfig(Protocol):
    """A configuration that has the settings under their public names."""

    @property
    def rdma_device(self) -> str:
        """See ``RdmaSettings.device``; the others likewise."""

    @property
    def rdma_gid_index(self) -> int: ...  # noqa: D102

    @property
    def rdma_queue_pairs(self) -> int: ...  # noqa: D102

    @property
    def rdma_traffic_class(self) -> int: ...  # noqa: D102

    @property
    def rdma_service_level(self) -> int: ...  # noqa: D102

    @property
    def rdma_ack_timeout(self) -> int: ...  # noqa: D102

    @property
    def rdma_retry_count(self) -> int: ...  # noqa: D102

    @property
    def rdma_rnr_retry_count(self) -> int: ...  # noqa: D102

    @property
    def rdma_mtu_nbytes(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """Settings of one process.

    Args:
        device: "mlx5_0" or "mlx5_0:1" (with the port); "" chooses by ``ports.choose_port``.
        gid_index: entry of the port's GID table; -1 chooses.
        num_queue_pairs: connections to each peer. One is enough for one port's line rate on most
            devices; more spread a transfer over several paths of the network.
        traffic_class: of the packets; its upper six bits are the DSCP, from which switches take the
            priority.
        service_level: 0..7; the priority where the network trusts it instead.
        ack_timeout_exponent: 1..31; after 4.096 us * 2^n without an answer a packet is sent again.
        retry_count: 0..7; after so many repetitions the connection fails. 7 is endless on some.
        rnr_retry_count: 0..7; the same for "receiver not ready", which our peers never say.
        max_send_wr: work requests under way on each connection.
        signal_every: a completion is asked for after as many, and after the last of a write.
        mtu_nbytes: at most this, 256..4096; 0: what the port has.
        completion_timeout_s: no completion for this long is a failure, whatever the device says.
    """

    device: str = ""
    gid_index: int = -1
    num_queue_pairs: int = 1
    traffic_class: int = 0
    service_level: int = 0
    ack_timeout_exponent: int = 14
    retry_count: int = 6
    rnr_retry_count: int = 6
    max_send_wr: int = 128
    signal_every: int = 16
    mtu_nbytes: int = 0
    completion_timeout_s: float = 10.0

    @classmethod
    def of(cls, config: RdmaConfig) -> "RdmaSettings":
        """Those of a worker's configuration."""
        return cls(
            device=config.rdma_device,
            gid_index=config.rdma_gid_index,
            num_queue_pairs=config.rdma_queue_pairs,
            traffic_class=config.rdma_traffic_class,
            service_level=config.rdma_service_level,
            ack_timeout_exponent=config.rdma_ack_timeout,
            retry_count=config.rdma_retry_count,
            rnr_retry_count=config.rdma_rnr_retry_count,
            mtu_nbytes=config.rdma_mtu_nbytes,
        )

    @property
    def ack_timeout_s(self) -> float:
        """Seconds without an answer after which a packet is sent again."""
        return _ACK_TIMEOUT_UNIT_S * float(1 << self.ack_timeout_exponent)
