#!/usr/bin/env bash
# flow-control.sh: which priority carries RoCE, PFC on for it alone, ECN on for it, pauses and drops.
#
#   flow-control.sh check | plan | apply [--yes] | verify | rollback [--yes]
#
# PRIORITY=3 is the priority of RoCE, unless the fabric has another.
# ECN stays on: DCQCN, RoCE's congestion control, is driven by ECN marks. With ECN off nothing slows
# a sender down but PFC, which stops whole ports. apply turns it on in the driver (until the next
# reload); PFC, trust and buffers must match the switch, so plan prints those commands for a person.
set -eu
CONCERN=flow-control
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

PRIORITY=${PRIORITY:-3}
DSCP=26 # the usual mark of RoCE; DSCP 26 and priority 3 belong together by 26 / 8
SAMPLE_S=${SAMPLE_S:-1}
# A sender that is paused this part of the time or more: something behind it does not drain.
STORM_PERCENT=10

interfaces() {
    local folder
    for folder in "$ROOT"/sys/class/infiniband/*/device/net/*; do
        if [ -e "$folder" ]; then basename "$folder"; fi
    done | sort -u
}

# pfc INTERFACE: the priorities with PFC, separated by blanks; fails if nobody can be asked
pfc() {
    local shown
    if shown=$(ask mlnx_qos -i "$1") && grep -q 'enabled' <<<"$shown"; then
        awk '/PFC configuration/ { is_pfc = 1 }
            is_pfc && $1 == "enabled" {
                for (i = 2; i <= NF; i++) if ($i == 1) printf "%s%d", (n++ ? " " : ""), i - 2
                exit
            }' <<<"$shown"
    elif shown=$(ask dcb pfc show dev "$1"); then
        grep -o '[0-7]:on' <<<"$shown" | cut -d : -f 1 | tr '\n' ' ' | sed 's/ $//'
    else
        return 1
    fi
}

trust() {
    local shown
    if shown=$(ask mlnx_qos -i "$1") && grep -q 'trust state' <<<"$shown"; then
        sed -n 's/.*trust state: *//p' <<<"$shown"
    elif shown=$(ask dcb app show dev "$1"); then
        if grep -q "dscp-prio.*:$PRIORITY" <<<"$shown"; then printf 'dscp\n'; else printf 'pcp\n'; fi
    else
        return 1
    fi
}

# counter INTERFACE NAME
counter() {
    ask ethtool -S "$1" | awk -v name="$2:" '$1 == name { print $2; exit }'
}

check_pfc() {
    local interface=$1 found
    if ! found=$(pfc "$interface"); then
        finding UNKNOWN "$interface PFC" "" "$PRIORITY" "neither mlnx_qos nor dcb can be asked here" \
            "packages.sh apply"
    elif [ "$found" = "$PRIORITY" ]; then
        finding OK "$interface PFC" "$found" "" "RoCE's priority is lossless, and only it"
    elif [ -z "$found" ]; then
        finding FAIL "$interface PFC" "off" "on for $PRIORITY" \
            "RoCE answers a lost packet by sending all after it again" "$0 plan"
    else
        finding FAIL "$interface PFC" "on for $found" "on for $PRIORITY alone" \
            "a pause of other priorities stops traffic that could be dropped, and spreads" "$0 plan"
    fi
    if ! found=$(trust "$interface"); then
        finding UNKNOWN "$interface trust" "" dscp "neither mlnx_qos nor dcb can be asked here"
    elif [ "$found" = dscp ]; then
        finding OK "$interface trust" dscp "" "the mark survives routers and needs no VLAN"
    else
        finding WARN "$interface trust" "$found" dscp \
            "without a VLAN tag all packets count as priority 0, and PFC protects nothing" "$0 plan"
    fi
}

check_ecn() {
    local interface=$1 side found
    for side in np rp; do
        if ! found=$(value "/sys/class/net/$interface/ecn/roce_$side/enable/$PRIORITY"); then
            finding UNKNOWN "$interface ECN $side" "" on \
                "this driver does not show it; ask the vendor's tool"
        elif [ "$found" = 1 ]; then
            finding OK "$interface ECN $side" on "" "DCQCN sees the marks of the switch"
        else
            finding FAIL "$interface ECN $side" off "on for priority $PRIORITY" \
                "DCQCN works through ECN marks; without them only PFC is left, which stops ports" \
                "$0 apply"
        fi
    done
}

check_counters() {
    local interface=$1 name before after paused
    if ! has_tool ethtool || [ -z "$(counter "$interface" rx_packets)" ]; then
        finding UNKNOWN "$interface counters" "" "" "ethtool -S cannot be asked here" \
            "packages.sh apply"
        return
    fi
    before=$(ask ethtool -S "$interface")
    sleep "$SAMPLE_S"
    after=$(ask ethtool -S "$interface")
    for name in rx_discards_phy rx_out_of_buffer "rx_prio${PRIORITY}_discards" \
        "rx_prio${PRIORITY}_buf_discard"; do
        judge_growth "$interface" "$name" "$before" "$after"
    done
    # In microseconds: how long the port was told to be silent.
    paused=$(growth "rx_prio${PRIORITY}_pause_duration" "$before" "$after")
    if [ -n "$paused" ]; then
        paused=$((paused / (10000 * SAMPLE_S)))
        if [ "$paused" -ge "$STORM_PERCENT" ]; then
            finding FAIL "$interface pauses" "$paused % of the time" "below $STORM_PERCENT %" \
                "the switch keeps this port silent: a receiver behind it does not drain, or a storm" \
                "Find the slow receiver: on each peer, tx_prio${PRIORITY}_pause grows"
        else
            finding OK "$interface pauses" "$paused % of the time" "" "short pauses are PFC at work"
        fi
    fi
}

# growth NAME BEFORE AFTER: or nothing if there is no such counter
growth() {
    local first second
    first=$(awk -v name="$1:" '$1 == name { print $2; exit }' <<<"$2")
    second=$(awk -v name="$1:" '$1 == name { print $2; exit }' <<<"$3")
    if is_number "$first" && is_number "$second"; then printf '%d\n' $((second - first)); fi
}

judge_growth() {
    local grown
    grown=$(growth "$2" "$3" "$4")
    if [ -z "$grown" ]; then return 0; fi
    if [ "$grown" -gt 0 ]; then
        finding FAIL "$1 $2" "$grown in $SAMPLE_S s" 0 \
            "packets are lost now; RoCE sends much again for each of them" \
            "PFC and buffers of this priority here and on the switch: $0 plan"
    else
        finding OK "$1 $2" "no growth in $SAMPLE_S s" "" "nothing is lost now"
    fi
}

check() {
    local interface
    if [ -z "$(interfaces)" ]; then
        finding UNKNOWN interfaces none "one of an RDMA device" \
            "no RDMA device is seen here; TCP needs none of this"
        return 0
    fi
    for interface in $(interfaces); do
        check_pfc "$interface"
        check_ecn "$interface"
        check_counters "$interface"
    done
}

changes() {
    local interface side bits
    bits=$(awk -v on="$PRIORITY" \
        'BEGIN { for (i = 0; i < 8; i++) printf "%s%d", (i ? "," : ""), i == on }')
    for interface in $(interfaces); do
        for side in np rp; do
            want_value "/sys/class/net/$interface/ecn/roce_$side/enable/$PRIORITY" 1 \
                "DCQCN works through ECN marks"
        done
        if [ "$VERB" = plan ] && { [ "$(pfc "$interface" || true)" != "$PRIORITY" ] ||
            [ "$(trust "$interface" || true)" != dscp ]; }; then
            printf '# by hand, with the same on the switch; it stops traffic for a moment:\n'
            printf 'mlnx_qos -i %s --trust dscp --pfc %s\n' "$interface" "$bits"
            printf '# or, without the vendor'\''s tools:\n'
            printf 'dcb pfc set dev %s prio-pfc all:off %s:on\n' "$interface" "$PRIORITY"
            printf 'dcb app add dev %s dscp-prio %s:%s\n' "$interface" "$DSCP" "$PRIORITY"
        fi
    done
}

needs() {
    printf 'flow-control: ECN counts now and until the driver is loaded again\n'
}

run_verb 'check|plan|apply|verify|rollback' "$@"
