#!/usr/bin/env bash
# mtu.sh: one MTU for the interface, the path to each peer and RDMA.
#
#   mtu.sh check [--peer ADDRESS]... | plan
#
# It changes nothing: an MTU above that of the switch loses packets, and only a person knows the
# switch. plan prints the commands. RDMA's MTU is the largest of 256 to 4096 that fits into the
# Ethernet MTU with its headers, so 4096 needs at least 4200 there; 9000 is usual.
set -eu
CONCERN=mtu
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

WANTED_MTU=9000
LEAST_MTU=4200
# IPv4 and ICMP headers; IPv6's are 20 longer.
HEADER_NBYTES=28
HEADER6_NBYTES=48

# interfaces: those of hardware
interfaces() {
    local device
    for device in "$ROOT"/sys/class/net/*/device; do
        if [ -e "$device" ] || [ -L "$device" ]; then basename "$(dirname "$device")"; fi
    done
}

# rdma_interfaces: "DEVICE INTERFACE" of each RDMA device
rdma_interfaces() {
    local folder
    for folder in "$ROOT"/sys/class/infiniband/*/device/net/*; do
        if [ -e "$folder" ]; then
            printf '%s %s\n' "$(basename "${folder%/device/net/*}")" "$(basename "$folder")"
        fi
    done
}

check_rdma() {
    local device interface mtu active
    while read -r device interface; do
        if [ -z "$device" ]; then continue; fi
        mtu=$(value "/sys/class/net/$interface/mtu") || mtu=0
        active=$(ask ibv_devinfo -d "$device" | awk '/active_mtu:/ { print $2; exit }') || active=
        if [ -z "$active" ]; then
            finding UNKNOWN "$device" "" 4096 "ibv_devinfo cannot be asked here" "packages.sh apply"
        elif [ "$active" -ge 4096 ]; then
            finding OK "$device" "$active over $interface with $mtu" 4096 "one packet for 4 KiB"
        else
            finding FAIL "$device" "$active over $interface with $mtu" 4096 \
                "RDMA's MTU must fit into Ethernet's; below 4096 the NIC sends more packets" \
                "ip link set $interface mtu $WANTED_MTU, on the peers and the switch as well"
        fi
    done <<<"$(rdma_interfaces)"
}

# route_mtu ADDRESS: MTU of the interface towards it, or nothing
route_mtu() {
    local interface
    interface=$(ask ip route get "$1" | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1) || return 0
    if [ -n "$interface" ]; then value "/sys/class/net/$interface/mtu" || true; fi
}

check_peer() {
    local peer=$1 mtu size header=$HEADER_NBYTES
    case $peer in *:*) header=$HEADER6_NBYTES ;; esac
    mtu=$(route_mtu "$peer")
    if ! has_tool ping || ! is_number "$mtu"; then
        finding UNKNOWN "$peer" "" "the interface's MTU" "ping or the route cannot be asked here" \
            "packages.sh apply"
        return
    fi
    if probe "$peer" $((mtu - header)); then
        finding OK "$peer" "$mtu" "" "a full packet arrives whole"
    elif ! probe "$peer" 56; then
        finding FAIL "$peer" "no answer" "an answer" \
            "it does not answer small packets either: down, wrong address, or ICMP is filtered"
    else
        size=$(largest "$peer" 56 $((mtu - header)))
        finding FAIL "$peer" "$((size + header))" "$mtu" \
            "small packets arrive and full ones do not: a switch or the peer has a smaller MTU" \
            "Set $mtu on every hop, or $((size + header)) here"
    fi
}

# probe PEER SIZE: does a packet that may not be fragmented come back?
probe() {
    ask ping -n -q -c 1 -W 1 -M 'do' -s "$2" "$1" >/dev/null
}

# largest PEER GOOD BAD: the largest of the usual sizes that comes back
largest() {
    local good=$2 bad=$3 size
    for size in 1472 4068 8972; do # Ethernet's 1500, RDMA's 4096, jumbo frames
        if [ "$size" -gt "$good" ] && [ "$size" -lt "$bad" ]; then
            if probe "$1" "$size"; then good=$size; else bad=$size && break; fi
        fi
    done
    printf '%s\n' "$good"
}

check() {
    local interface mtu peer found=
    for interface in $(interfaces); do
        found=yes
        mtu=$(value "/sys/class/net/$interface/mtu") || mtu=
        if ! is_number "$mtu"; then
            finding UNKNOWN "$interface" "" "at least $LEAST_MTU" "it has no MTU to read"
        elif [ "$mtu" -ge "$LEAST_MTU" ]; then
            finding OK "$interface" "$mtu" "" "RDMA's 4096 fits, and TCP sends fewer packets"
        else
            finding WARN "$interface" "$mtu" "at least $LEAST_MTU, best $WANTED_MTU" \
                "where it carries KV: RDMA's 4096 does not fit, and TCP sends more packets" \
                "ip link set $interface mtu $WANTED_MTU, on the peers and the switch as well"
        fi
    done
    if [ -z "$found" ]; then
        finding UNKNOWN interfaces "none" "" "no network hardware is seen here; look on the host"
    fi
    check_rdma
    for peer in $PEERS; do check_peer "$peer"; done
    if [ -z "$PEERS" ]; then
        finding UNKNOWN path "" "the same MTU at every hop" "no peer was named" \
            "$0 check --peer ADDRESS"
    fi
}

changes() {
    local interface mtu
    for interface in $(interfaces); do
        mtu=$(value "/sys/class/net/$interface/mtu") || continue
        if is_number "$mtu" && [ "$mtu" -lt "$LEAST_MTU" ]; then
            printf '# if %s carries KV, after the switch and together with its peers:\n' "$interface"
            printf 'ip link set %s mtu %s\n' "$interface" "$WANTED_MTU"
        fi
    done
    printf '# to last: the distribution'\''s network configuration (netplan, NetworkManager, ifcfg)\n'
}

if [ "${1:-}" = plan ] && [ $# -eq 1 ]; then
    changes
    exit
fi
run_verb 'check|plan' "$@"
