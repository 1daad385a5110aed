from pathlib import Path

from ops.cluster import ClusterWishes, http_url, plan_cluster, worker_env
from ops.ports import plan_ports
from ops.start import flag_value

WISHES = ClusterWishes(num_prefill=1, num_decode=2, model_dir=Path("/m"), drain_timeout_s=7.5)
PORTS = plan_ports(8000, 7400, 3)
SPECS = plan_cluster(WISHES, PORTS, [(0, 1), (2,), (3,)])


def test_one_process_each_with_its_module_and_name() -> None:
    assert [(spec.name, spec.command[2]) for spec in SPECS] == [
        ("router", "router_svc"),
        ("prefill-0", "prefill_svc"),
        ("decode-0", "decode_svc"),
        ("decode-1", "decode_svc"),
    ]
    assert [flag_value(spec.command, "--instance-id") for spec in SPECS] == [
        spec.name for spec in SPECS
    ]


def test_workers_know_their_ports_and_the_router() -> None:
    command = SPECS[3].command
    assert flag_value(command, "--listen-port") == "7403"
    assert flag_value(command, "--admin-port") == "7413"
    assert flag_value(command, "--router-port") == "7400"
    assert SPECS[3].ready_url == "http://127.0.0.1:7413/readyz"


def test_threads_and_cpus_agree_with_the_environment() -> None:
    spec = SPECS[1]
    assert flag_value(spec.command, "--cpus") == "0,1"
    assert flag_value(spec.command, "--threads") == "2"
    assert spec.env["OMP_NUM_THREADS"] == spec.env["MKL_NUM_THREADS"] == "2"
    assert spec.env["KMP_AFFINITY"] == "none"


def test_router_is_not_pinned_and_is_stopped_first() -> None:
    router, *workers = SPECS
    assert flag_value(router.command, "--cpus") is None
    assert all(router.stop_rank < worker.stop_rank for worker in workers)
    assert flag_value(router.command, "--listen-port") == "8000"
    assert flag_value(router.command, "--control-port") == "7400"


def test_shared_settings_reach_all() -> None:
    for spec in SPECS:
        assert flag_value(spec.command, "--model") == "/m"
        assert flag_value(spec.command, "--drain-timeout-s") == "7.5"
        assert flag_value(spec.command, "--config") is None
        assert spec.env["PYTHONUTF8"] == "1"


def test_files_are_passed_on_if_given() -> None:
    wishes = ClusterWishes(
        model_dir=Path("/m"),
        config_path=Path("/c.toml"),
        secret_file=Path("/s"),
        api_key_file=Path("/k"),
    )
    specs = plan_cluster(wishes, plan_ports(8000, 7400, 2), [(0,), (1,)])
    assert flag_value(specs[0].command, "--api-key-file") == "/k"
    for spec in specs:
        assert flag_value(spec.command, "--config") == "/c.toml"
        assert flag_value(spec.command, "--secret-file") == "/s"


def test_configured_models_and_levels_are_left_alone() -> None:
    wishes = ClusterWishes(
        model_dir=Path("/m"), roles_with_model=frozenset({"decode"}), log_level="debug"
    )
    specs = plan_cluster(wishes, plan_ports(8000, 7400, 2), [(0,), (1,)])
    models = [flag_value(spec.command, "--model") for spec in specs]
    assert models == ["/m", "/m", None]
    assert flag_value(specs[0].command, "--log-level") == "debug"
    assert flag_value(SPECS[0].command, "--log-level") is None


def test_url_of_this_host() -> None:
    def url(host: str) -> str:
        return http_url(ClusterWishes(model_dir=Path("/m"), http_host=host), PORTS)

    assert url("127.0.0.1") == url("0.0.0.0") == url("::") == "http://127.0.0.1:8000"
    assert url("10.1.2.3") == "http://10.1.2.3:8000"
    assert url("fd00::1") == "http://[fd00::1]:8000"


def test_environment_counts_threads() -> None:
    assert worker_env(3)["OMP_NUM_THREADS"] == "3"
