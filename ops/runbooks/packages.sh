#!/usr/bin/env bash
# packages.sh: the tools that the other runbooks and an RDMA transport need.
#
#   packages.sh check | plan | apply [--yes] | verify | rollback [--yes]
#   packages.sh yum ARGUMENTS...      yum or dnf with a UTF-8 locale
#
# rollback removes what apply installed, and nothing that was there before.
set -eu
CONCERN=packages
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

# package, and what cannot be seen or done without it
wanted() {
    case $(family) in
    debian)
        cat <<'END'
rdma-core RDMA devices, their modules and udev rules
ibverbs-utils ibv_devinfo: firmware, active MTU, link layer
perftest ib_write_bw: what the link carries
ethtool offloads, pause and discard counters
iproute2 ip, rdma and dcb: links, RDMA devices, PFC
iputils-ping probes of the path's MTU
kmod modinfo: options that a driver has
pciutils lspci: width and speed of the PCIe link
numactl where NIC, GPU and memory are
locales locale-gen: en_US.UTF-8
END
        ;;
    rhel)
        cat <<'END'
rdma-core RDMA devices, their modules and udev rules
libibverbs-utils ibv_devinfo: firmware, active MTU, link layer
perftest ib_write_bw: what the link carries
ethtool offloads, pause and discard counters
iproute ip, rdma and dcb: links, RDMA devices, PFC
iputils probes of the path's MTU
kmod modinfo: options that a driver has
pciutils lspci: width and speed of the PCIe link
numactl where NIC, GPU and memory are
END
        case $(os_release VERSION_ID) in
        7*) ;; # glibc-common brings en_US.UTF-8
        *) printf 'glibc-langpack-en en_US.UTF-8\n' ;;
        esac
        ;;
    *)
        stop "this distribution ($(os_release ID)) has neither apt nor yum that we know;" \
            "install the tools by hand: rdma-core, ethtool, iproute2, ping, kmod, pciutils"
        ;;
    esac
}

is_installed() {
    case $(family) in
    debian)
        dpkg-query --admindir="$ROOT/var/lib/dpkg" -W -f '${Status}\n' "$1" 2>/dev/null |
            grep -q ' installed$'
        ;;
    *) rpm --root "${ROOT:-/}" -q "$1" >/dev/null 2>&1 ;;
    esac
}

has_query() {
    case $(family) in
    debian) command -v dpkg-query >/dev/null 2>&1 ;;
    *) command -v rpm >/dev/null 2>&1 ;;
    esac
}

# safe_yum ARGUMENTS...: CentOS 7's yum is Python 2, which takes the locale's charset for texts and
# dies of the first package description that is not ASCII when that is C. C.UTF-8 is not there
# before RHEL 8, so the locale is taken from those that exist.
safe_yum() {
    local name utf8='' manager=yum
    for name in en_US.utf8 en_US.UTF-8 C.utf8 C.UTF-8; do
        if in_root locale -a 2>/dev/null | grep -q -x -F -e "$name"; then
            utf8=$name
            break
        fi
    done
    if [ -z "$utf8" ]; then
        stop "no UTF-8 locale exists, and yum fails without one; make it: localedef -i en_US -f" \
            "UTF-8 en_US.UTF-8"
    fi
    if in_root sh -c 'command -v dnf' >/dev/null 2>&1; then manager=dnf; fi
    in_root env LANG="$utf8" LC_ALL="$utf8" PYTHONIOENCODING=utf-8 "$manager" "$@"
}

install_packages() {
    case $(family) in
    debian)
        in_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 \
            apt-get install -y --no-install-recommends "$@"
        ;;
    *) safe_yum install -y "$@" ;;
    esac
}

remove_package() {
    is_installed "$1" || return 0
    case $(family) in
    debian) in_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 apt-get remove -y "$1" ;;
    *) safe_yum remove -y "$1" ;;
    esac
}

check() {
    local name reason list
    if [ -z "$(family)" ]; then
        finding UNKNOWN distribution "$(os_release ID)" "debian or rhel, or like one of them" \
            "package names are not known for it" "Install ethtool, iproute2, ping, kmod by hand"
        return 0
    fi
    list=$(wanted)
    while read -r name reason; do
        if ! has_query; then
            finding UNKNOWN "$name" "" "installed" "dpkg-query or rpm is not here to ask"
        elif is_installed "$name"; then
            finding OK "$name" "installed" "" "$reason"
        else
            finding WARN "$name" "not installed" "installed" "$reason" "$0 apply"
        fi
    done <<<"$list"
    if ! has_tool mlnx_qos; then
        finding UNKNOWN mlnx_qos "not here" "where there is a ConnectX" \
            "it comes with the vendor's packages (mlnx-tools); flow-control.sh uses dcb without it"
    fi
}

changes() {
    local name reason list missing=
    list=$(wanted)
    has_query || stop "neither dpkg-query nor rpm is here; what is installed cannot be seen"
    while read -r name reason; do
        if is_installed "$name"; then
            if [ "$MODE" = verify ]; then finding OK "$name" "installed" "" "$reason"; fi
            continue
        fi
        NUM_CHANGES=$((NUM_CHANGES + 1))
        case $MODE in
        verify) finding FAIL "$name" "not installed" "installed" "$reason" "$0 apply" ;;
        plan) printf 'install %s: %s\n' "$name" "$reason" ;;
        apply)
            has_entry package "$name" || add_entry package "$name" -
            missing="$missing $name"
            ;;
        esac
    done <<<"$list"
    if [ -n "$missing" ]; then
        # shellcheck disable=SC2086 # one word a package
        install_packages $missing || stop_halfway "the package manager failed"
    fi
}

if [ "${1:-}" = yum ]; then
    shift
    safe_yum "$@"
    exit
fi
run_verb 'check|plan|apply|verify|rollback' "$@"
