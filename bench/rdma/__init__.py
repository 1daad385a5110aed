"""RDMA against what the devices can do: see ``python -m bench.rdma --help``."""
