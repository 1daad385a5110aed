"""Kernel modules for RDMA: loaded now and at boot, and options that the driver really has."""

from collections.abc import Iterator
from typing import Final

from ops.node.change import Change, FileChange
from ops.node.facts import Facts
from ops.node.finding import Finding, Verdict
from ops.node.formats.modinfo import (
    ModuleInfo,
    ModuleOption,
    parse_modinfo,
    parse_module_names,
    parse_options,
)
from ops.node.formats.os_release import RHEL, read_distribution

CHECK: Final = "modprobe"
MODULES_FILE: Final = "/etc/modules-load.d/pdserve.conf"

_DRIVER: Final = "mlx5_core"
# Options of the owner's notes: no driver that we know has them, so each is looked up.
_NOTED_OPTIONS: Final = ("log_sz_xrq", "log_sz_sq")
# The program's own way to the devices, and connections made by address.
_MODULES: Final = ("ib_uverbs", "rdma_ucm")
_LOAD_FOLDERS: Final = ("/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d")
_OPTION_FOLDERS: Final = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d")
_SOFT_MODULE: Final = "rdma_rxe"


def check(facts: Facts) -> list[Finding]:
    """Modules, the driver's options, the service of Red Hat, and soft-RoCE where nothing else."""
    loaded = _loaded_modules(facts)
    has_rdma = _has_rdma(facts, loaded)
    findings = [_module(facts, name, loaded, has_rdma) for name in _MODULES]
    findings.append(_boot(facts, has_rdma))
    findings.extend(_driver_options(facts, loaded))
    service = _rdma_service(facts, has_rdma)
    if service is not None:
        findings.append(service)
    if not facts.names("/sys/class/infiniband"):
        findings.append(_soft_roce(facts, loaded))
    return findings


def changes(facts: Facts) -> list[Change]:
    """The list of modules to load at boot, on a machine with RDMA; loading is for a person."""
    if not _has_rdma(facts, _loaded_modules(facts)) or not _missing_at_boot(facts):
        return []
    text = (
        "# Written by pdserve (pdctl node, or ops/runbooks); its rollback takes it back.\n"
        + "".join(f"{name}\n" for name in _MODULES)
    )
    return [
        FileChange(
            MODULES_FILE,
            text,
            "RDMA programs need these modules after every boot.",
            needs=f"modprobe -a {' '.join(_MODULES)}, or a reboot",
        )
    ]


def _loaded_modules(facts: Facts) -> frozenset[str]:
    """Loaded or built in: /sys/module has built-in ones with options, /proc/modules has not."""
    listed = (facts.text("/proc/modules") or "").splitlines()
    return frozenset(
        (*facts.names("/sys/module"), *(line.split()[0] for line in listed if line.split()))
    )


def _has_rdma(facts: Facts, loaded: frozenset[str]) -> bool:
    return bool(facts.names("/sys/class/infiniband")) or _DRIVER in loaded


def _module(facts: Facts, name: str, loaded: frozenset[str], has_rdma: bool) -> Finding:
    source = "rdma-core: Documentation/udev.md"
    if name in loaded:
        return Finding(
            CHECK, name, Verdict.OK, "loaded", "loaded", "RDMA programs need it.", source
        )
    if not has_rdma:
        return Finding(
            CHECK,
            name,
            Verdict.UNKNOWN,
            "not loaded",
            "loaded where there is RDMA",
            "No RDMA device is seen here; KV goes over TCP.",
            source,
        )
    install = read_distribution(facts).install_line("rdma-core", "rdma-core")
    return Finding(
        CHECK,
        name,
        Verdict.FAIL,
        "not loaded",
        "loaded",
        "Without it no program can open the RDMA device, and KV falls back to TCP.",
        source,
        f"modprobe {name}; if there is no such module: {install}",
    )


def _missing_at_boot(facts: Facts) -> list[str]:
    texts = [
        facts.text(f"{folder}/{name}") or ""
        for folder in _LOAD_FOLDERS
        for name in facts.names(folder)
        if name.endswith(".conf")
    ]
    # rdma-core's own lists are read when udev sees a device.
    texts.extend(
        facts.text(f"/etc/rdma/modules/{name}") or "" for name in facts.names("/etc/rdma/modules")
    )
    listed = parse_module_names(texts)
    return [name for name in _MODULES if name not in listed]


def _boot(facts: Facts, has_rdma: bool) -> Finding:
    missing = _missing_at_boot(facts)
    source = "modules-load.d(5)"
    wanted = " ".join(_MODULES)
    if not missing:
        reason = "A file loads them at every boot."
        return Finding(CHECK, "at boot", Verdict.OK, wanted, wanted, reason, source)
    measured = f"{' '.join(missing)} in no list"
    if not has_rdma:
        reason = "No RDMA device is seen here, so none need be loaded."
        return Finding(CHECK, "at boot", Verdict.UNKNOWN, measured, wanted, reason, source)
    return Finding(
        CHECK,
        "at boot",
        Verdict.WARN,
        measured,
        wanted,
        "After a reboot they are loaded only if udev sees the device and rdma-core is installed.",
        source,
        "pdctl node apply",
    )


def _driver_options(facts: Facts, loaded: frozenset[str]) -> Iterator[Finding]:
    source = f"modinfo {_DRIVER}"
    configured = [option for option in _configured_options(facts) if option.module == _DRIVER]
    output = facts.run("modinfo", _DRIVER)
    if not output.is_ok:
        if _DRIVER in loaded or configured:
            reason = (
                "modinfo is not installed (package kmod), so options cannot be compared."
                if output.is_missing
                else f"modinfo knows no {_DRIVER} for this kernel: {output.stderr.strip()}."
            )
            yield Finding(CHECK, _DRIVER, Verdict.UNKNOWN, "", "known options", reason, source)
        return
    driver = parse_modinfo(output.stdout)
    yield from _noted_options(driver, source)
    for option in configured:
        yield _configured_option(facts, driver, option, source)


def _noted_options(driver: ModuleInfo, source: str) -> Iterator[Finding]:
    known = ", ".join(driver.parameters) or "none"
    for name in _NOTED_OPTIONS:
        if name in driver.parameters:
            yield Finding(
                CHECK,
                f"{_DRIVER} {name}",
                Verdict.OK,
                "the driver has it",
                "",
                "Left as it is: sizes of queues are asked for by the program that makes them.",
                source,
            )
        else:
            yield Finding(
                CHECK,
                f"{_DRIVER} {name}",
                Verdict.UNKNOWN,
                f"not an option of the driver; it has: {known}",
                "not set",
                "Some notes name it, this driver has none; a line that sets it does nothing.",
                source,
            )


def _configured_option(
    facts: Facts, driver: ModuleInfo, option: ModuleOption, source: str
) -> Finding:
    subject = f"{_DRIVER} {option.name}={option.value}"
    if option.name not in driver.parameters:
        return Finding(
            CHECK,
            subject,
            Verdict.WARN,
            "set in /etc/modprobe.d, unknown to the driver",
            f"one of: {', '.join(driver.parameters) or 'none'}",
            "The kernel logs 'unknown parameter ignored' and goes on without it.",
            source,
            f"grep -rn {option.name} /etc/modprobe.d, and remove it there",
        )
    running = facts.text(f"/sys/module/{_DRIVER}/parameters/{option.name}")
    if running is None or _same_value(running.strip(), option.value):
        measured = "" if running is None else running.strip()
        reason = "The driver has this option."
        return Finding(CHECK, subject, Verdict.OK, measured, option.value, reason, source)
    return Finding(
        CHECK,
        subject,
        Verdict.WARN,
        running.strip(),
        option.value,
        "The driver was loaded with another value, perhaps from an older initramfs.",
        "modprobe.d(5)",
        "update the initramfs (update-initramfs -u or dracut -f), then reboot",
    )


def _same_value(running: str, wanted: str) -> bool:
    switches = {"Y": "1", "N": "0"}
    return switches.get(running, running) == switches.get(wanted.upper(), wanted)


def _configured_options(facts: Facts) -> Iterator[ModuleOption]:
    by_name: dict[str, str] = {}
    for folder in _OPTION_FOLDERS:
        for name in facts.names(folder):
            if name.endswith(".conf"):
                by_name.setdefault(name, f"{folder}/{name}")
    for _, path in sorted(by_name.items()):
        yield from parse_options(facts.text(path) or "")


def _rdma_service(facts: Facts, has_rdma: bool) -> Finding | None:
    """Only Red Hat has it; from 8 on udev starts it, and some releases have none."""
    distribution = read_distribution(facts)
    if distribution.family != RHEL or not has_rdma:
        return None
    output = facts.run("systemctl", "is-enabled", "rdma")
    state = output.stdout.strip() or "not installed"
    source = "rdma-core: redhat/rdma-core.spec"
    if output.is_missing:
        reason = "systemctl is not here, so services cannot be seen."
        return Finding(CHECK, "rdma service", Verdict.UNKNOWN, "", "enabled", reason, source)
    if state in {"enabled", "static", "indirect", "generated"}:
        reason = "It loads the RDMA modules at boot."
        return Finding(CHECK, "rdma service", Verdict.OK, state, "enabled", reason, source)
    if distribution.major != 7 and state != "disabled" and state != "masked":
        reason = "This release needs none: udev loads the modules when it sees the device."
        return Finding(CHECK, "rdma service", Verdict.OK, state, "none needed", reason, source)
    return Finding(
        CHECK,
        "rdma service",
        Verdict.WARN,
        state,
        "enabled",
        "Without it the RDMA modules may not be there after a boot.",
        source,
        f"{distribution.install_line('rdma-core', 'rdma-core')}; systemctl enable --now rdma",
    )


def _soft_roce(facts: Facts, loaded: frozenset[str]) -> Finding:
    subject, source = "soft-RoCE", "rdma_rxe(7), rdma-link(8)"
    wanted = "only for a laptop or a test"
    make = "rdma link add rxe0 type rxe netdev INTERFACE"
    if _SOFT_MODULE in loaded:
        return Finding(
            CHECK,
            subject,
            Verdict.WARN,
            f"{_SOFT_MODULE} is loaded, without a device",
            wanted,
            "RDMA can be tried without hardware, once a device is made on an interface.",
            source,
            make,
        )
    output = facts.run("modinfo", _SOFT_MODULE)
    measured = "available" if output.is_ok else "not available"
    reason = (
        "There is no RDMA device; soft-RoCE would make one on any interface, for trying only."
        if output.is_ok
        else "There is no RDMA device, and this kernel has no rdma_rxe; cloud kernels lack it."
    )
    return Finding(
        CHECK,
        subject,
        Verdict.UNKNOWN,
        measured,
        wanted,
        reason,
        source,
        f"modprobe {_SOFT_MODULE}; {make}" if output.is_ok else "",
    )
