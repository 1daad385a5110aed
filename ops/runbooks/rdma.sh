#!/usr/bin/env bash
# rdma.sh: RDMA devices, ports, GIDs, firmware, offloads, locked memory, PCIe, and the GPU beside.
#
#   rdma.sh check | plan | apply [--yes] | verify | rollback [--yes]
#
# A node without RDMA is a good node: KV goes over TCP and mapped memory. What fails here is hardware
# that is there and cannot be used, because services then fall back to TCP without a word.
# apply writes one file: the limit of locked memory for logins. Units have LimitMEMLOCK.
set -eu
CONCERN=rdma
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

CLASS=/sys/class/infiniband
LIMITS=/etc/security/limits.d/90-pdserve-memlock.conf
MIN_FIRMWARE=22.30.1002 # ConnectX-6 Dx, whose firmware versions begin with 22
MELLANOX=0x15b3
NVIDIA=0x10de

devices() {
    ls "$ROOT$CLASS" 2>/dev/null || true
}

# pci_of VENDOR: addresses of that vendor's PCI devices
pci_of() {
    local file
    for file in "$ROOT"/sys/bus/pci/devices/*/vendor; do
        if [ -f "$file" ] && [ "$(cat "$file")" = "$1" ]; then basename "$(dirname "$file")"; fi
    done
}

# gid_index DEVICE PORT: of RoCE v2, one of an IPv4 address before others
gid_index() {
    local file index best='' folder=$ROOT$CLASS/$1/ports/$2
    for file in "$folder"/gid_attrs/types/*; do
        if [ ! -f "$file" ] || ! grep -q 'RoCE v2' "$file" 2>/dev/null; then continue; fi
        index=$(basename "$file")
        case $(cat "$folder/gids/$index" 2>/dev/null) in
        0000:0000:0000:0000:0000:ffff:*)
            printf '%s\n' "$index"
            return
            ;;
        fe80:*) ;; # link-local: works within one network segment only
        *) best=${best:-$index} ;;
        esac
    done
    printf '%s\n' "$best"
}

check_port() {
    local device=$1 port=$2 folder=$CLASS/$1/ports/$2 state layer rate index
    state=$(value "$folder/state") || state=unknown
    layer=$(value "$folder/link_layer") || layer=unknown
    rate=$(value "$folder/rate") || rate=
    case $state in
    *ACTIVE*) finding OK "$device/$port" "$state, $layer, $rate" "" "the port carries packets" ;;
    *) finding WARN "$device/$port" "$state, $layer" "ACTIVE" \
        "no RDMA packet leaves this port; services fall back to TCP" \
        "Look at cable, switch port and: ip link" ;;
    esac
    if [ "$layer" != Ethernet ]; then
        finding WARN "$device/$port link layer" "$layer" Ethernet \
            "RoCE settings and checks of MTU and flow control are for Ethernet" \
            "mlxconfig -d DEVICE set LINK_TYPE_P$port=2, then a reboot"
        return
    fi
    index=$(gid_index "$device" "$port")
    if [ -n "$index" ]; then
        finding OK "$device/$port GID" "index $index" "" "RoCE v2, which a router can forward"
    else
        finding FAIL "$device/$port GID" "no RoCE v2 entry with an address" "one" \
            "RoCE v2 travels in IP: the interface needs an address" "Give the interface an address"
    fi
}

check_firmware() {
    local found
    found=$(value "$CLASS/$1/fw_ver") || return 0
    case $found in
    "${MIN_FIRMWARE%%.*}".*)
        if [ "$(printf '%s\n%s\n' "$MIN_FIRMWARE" "$found" | sort -V | head -n 1)" = "$found" ] &&
            [ "$found" != "$MIN_FIRMWARE" ]; then
            finding FAIL "$1 firmware" "$found" "at least $MIN_FIRMWARE" \
                "the least version that this project was specified with" \
                "The vendor's firmware tool (mlxup or mstflint), then a reboot"
        else
            finding OK "$1 firmware" "$found" "at least $MIN_FIRMWARE" "ConnectX-6 Dx"
        fi
        ;;
    *) finding OK "$1 firmware" "$found" "" "no minimum is known for this family" ;;
    esac
}

check_pcie() {
    local what now max
    for what in speed width; do
        now=$(value "$CLASS/$1/device/current_link_$what") || continue
        max=$(value "$CLASS/$1/device/max_link_$what") || continue
        if [ "$now" = "$max" ]; then
            finding OK "$1 PCIe $what" "$now" "" "the slot gives what the card can"
        else
            finding WARN "$1 PCIe $what" "$now" "$max" \
                "the slot gives less than the card can, which bounds the bandwidth" \
                "Another slot, or look at the BIOS and the riser"
        fi
    done
    local address acs
    address=$(basename "$(readlink "$ROOT$CLASS/$1/device" || true)")
    if acs=$(ask lspci -s "$address" -vvv) && [ -n "$acs" ]; then
        if grep -q 'RlxdOrd-' <<<"$acs"; then
            finding WARN "$1 relaxed ordering" off on \
                "writes to memory of another NUMA node wait for each other" \
                "BIOS: PCIe relaxed ordering, or: mlxconfig -d $address set PCI_WR_ORDERING=1"
        fi
        if ask lspci -vvv | grep -q 'ACSCtl:.*SrcValid+'; then
            finding WARN "PCIe ACS" on "off between NIC and GPU" \
                "traffic between NIC and GPU takes the way through the CPU" \
                "BIOS: ACS off, if no virtual machine gets devices of its own"
        fi
    fi
}

# check_gpu DEVICE: only where there is a GPU
check_gpu() {
    local nic gpu address
    nic=$(value "$CLASS/$1/device/numa_node") || return 0
    for address in $(pci_of "$NVIDIA"); do
        gpu=$(value "/sys/bus/pci/devices/$address/numa_node") || continue
        if [ "$nic" = "$gpu" ]; then
            finding OK "$1 and GPU $address" "NUMA node $nic" "" "they are neighbours"
        else
            finding WARN "$1 and GPU $address" "NUMA nodes $nic and $gpu" "the same" \
                "KV crosses the link between the sockets" "Use the NIC of the GPU's own node"
        fi
    done
    if [ -n "$(pci_of "$NVIDIA")" ] && [ ! -d "$ROOT/sys/module/nvidia_peermem" ]; then
        finding UNKNOWN nvidia-peermem "not loaded" "loaded, or dma-buf" \
            "without it or dma-buf the NIC cannot reach GPU memory; our KV lands in host memory"
    fi
}

check_offloads() {
    local device=$1 folder interface features name
    for folder in "$ROOT$CLASS/$device"/device/net/*; do
        [ -e "$folder" ] || continue
        interface=$(basename "$folder")
        if ! features=$(ask ethtool -k "$interface"); then
            finding UNKNOWN "$interface offloads" "" "on" "ethtool cannot be asked here" \
                "packages.sh apply"
            continue
        fi
        for name in rx-checksumming tx-checksumming scatter-gather tcp-segmentation-offload \
            generic-segmentation-offload generic-receive-offload; do
            if grep -q "^$name: off" <<<"$features"; then
                finding WARN "$interface $name" off on "the CPU does what the NIC could do" \
                    "ethtool -K $interface with the feature on; names: ethtool(8)"
            fi
        done
    done
}

memlock() {
    text /proc/self/limits | awk '/^Max locked memory/ { print $4 }'
}

check() {
    local device port locked
    if [ -z "$(devices)" ]; then
        if [ -n "$(pci_of "$MELLANOX")" ]; then
            finding WARN devices "none, but a ConnectX is on the PCI bus" "an RDMA device" \
                "the NIC is there and its RDMA driver is not, so all KV goes over TCP" \
                "modprobe mlx5_ib; in a container: give it the host's devices"
        else
            finding UNKNOWN devices none "one, where KV shall cross hosts fast" \
                "$CLASS is empty: KV goes over TCP, which is right for a node without such a NIC"
        fi
        return 0
    fi
    for device in $(devices); do
        for port in $(ls "$ROOT$CLASS/$device/ports" 2>/dev/null || true); do
            check_port "$device" "$port"
        done
        check_firmware "$device"
        check_offloads "$device"
        check_pcie "$device"
        check_gpu "$device"
    done
    locked=$(memlock)
    case $locked in
    unlimited) finding OK memlock unlimited "" "the KV pool can be locked for the NIC" ;;
    '') finding UNKNOWN memlock "" unlimited "/proc/self/limits cannot be read" ;;
    *) finding FAIL memlock "$locked bytes" unlimited \
        "the KV pool is locked when it is registered for RDMA" "$0 apply, and log in again" ;;
    esac
}

changes() {
    if [ -z "$(devices)" ]; then return 0; fi
    if [ "$(memlock)" = unlimited ] && [ ! -e "$ROOT$LIMITS" ]; then return 0; fi
    want_file "$LIMITS" '# pdserve: RDMA locks the memory that peers write into.
# A service does not read this file; its unit sets LimitMEMLOCK.
* soft memlock unlimited
* hard memlock unlimited
root soft memlock unlimited
root hard memlock unlimited' "registering the KV pool for RDMA locks it; the usual limit is far below it"
}

needs() {
    printf 'rdma: counts for new logins\n'
}

run_verb 'check|plan|apply|verify|rollback' "$@"
