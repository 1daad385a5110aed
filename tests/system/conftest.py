"""Clusters of real processes for the tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.cluster import Cluster


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Start clusters that are stopped with the module."""
    clusters: list[Cluster] = []

    def start(model_dir: Path, **options: object) -> Cluster:
        folder = tmp_path_factory.mktemp("cluster")
        cluster = Cluster(folder, model_dir, **options)  # type: ignore[arg-type]
        clusters.append(cluster)
        return cluster.start()

    yield start
    for cluster in clusters:
        cluster.stop()
