#!/usr/bin/env bash
# sysctl.sh: kernel settings for KV that goes over TCP, in a drop-in of our own.
#
#   sysctl.sh check | plan | apply [--yes] | verify | rollback [--yes]
#
# Others' files are never edited, only named when they win over ours.
set -eu
CONCERN=sysctl
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

DROP_IN=/etc/sysctl.d/90-pdserve.conf
# sysctl.d(5): a file hides files of the same name in the folders after its own.
FOLDERS="/etc/sysctl.d /run/sysctl.d /usr/local/lib/sysctl.d /usr/lib/sysctl.d /lib/sysctl.d"
NEIGHBOUR=base_reachable_time_ms
NEIGHBOUR_REASON="the unit is milliseconds: 1000 is one second, and 1 would ask for the peer again with every packet"

# key | least (a larger last number is right as well) or exact | verdict if not | value | reason
settings() {
    cat <<'END'
net.core.rmem_max|least|FAIL|268435456|no socket can have a larger receive buffer; below bandwidth times delay a transfer waits for acknowledgements
net.core.wmem_max|least|FAIL|268435456|no socket can have a larger send buffer; below bandwidth times delay a transfer waits for acknowledgements
net.ipv4.tcp_rmem|least|FAIL|4096 131072 268435456|the last number bounds the receive window that TCP grows by itself
net.ipv4.tcp_wmem|least|FAIL|4096 65536 268435456|the last number bounds the send buffer that TCP grows by itself
net.core.netdev_max_backlog|least|WARN|250000|packets beyond it are dropped when a burst of KV arrives
net.core.somaxconn|least|WARN|4096|more clients that connect at once than this wait for a retry of their SYN
net.ipv4.tcp_mtu_probing|exact|WARN|1|without it a path that drops large packets silently stalls a transfer for ever
net.ipv4.tcp_slow_start_after_idle|exact|WARN|0|with it every handoff after a pause starts with a small window again
net.ipv4.tcp_window_scaling|exact|FAIL|1|without it no TCP window is above 64 KiB
vm.max_map_count|least|WARN|262144|mapped KV files, shared memory and weights are mappings; beyond it mmap fails
net.ipv4.neigh.default.gc_thresh1|least|WARN|1024|with more peers than this the neighbour table is emptied, and packets wait for ARP
net.ipv4.neigh.default.gc_thresh2|least|WARN|2048|with more peers than this the neighbour table is emptied, and packets wait for ARP
net.ipv4.neigh.default.gc_thresh3|least|WARN|4096|with more peers than this the neighbour table is full, and packets wait for ARP
END
    printf 'net.%s.neigh.default.%s|exact|WARN|1000|%s\n' \
        ipv4 "$NEIGHBOUR" "$NEIGHBOUR_REASON" ipv6 "$NEIGHBOUR" "$NEIGHBOUR_REASON"
}

# Interfaces of hardware that are there have values of their own; "default" is for later ones.
interface_settings() {
    local device name ip
    for device in "$ROOT"/sys/class/net/*/device; do
        [ -e "$device" ] || [ -L "$device" ] || continue
        name=$(basename "$(dirname "$device")")
        for ip in ipv4 ipv6; do
            if [ -e "$ROOT/proc/sys/net/$ip/neigh/$name/$NEIGHBOUR" ]; then
                printf 'net.%s.neigh.%s.%s|exact|WARN|1000|%s\n' \
                    "$ip" "${name//.//}" "$NEIGHBOUR" "$NEIGHBOUR_REASON"
            fi
        done
    done
}

# path_of KEY: the file of the running value; a "/" in a key stands for the dot of a name
path_of() {
    printf '/proc/sys/%s\n' "$(tr './' '/.' <<<"$1")"
}

is_right() {
    local rule=$1 now=$2 wanted=$3
    if [ "$now" = "$wanted" ]; then return 0; fi
    [ "$rule" = least ] && is_number "${now##* }" && [ "${now##* }" -ge "${wanted##* }" ]
}

# files: the drop-ins in the order in which they are read, ours among them, each file name once
files() {
    local folder file
    for folder in $FOLDERS; do
        for file in "$ROOT$folder"/*.conf; do
            [ -e "$file" ] || continue
            # Debian and Red Hat link the last file into the folder.
            [ "$(basename "$(readlink "$file" || true)")" != sysctl.conf ] || continue
            printf '%s %s\n' "$(basename "$file")" "$folder"
        done
    done | LC_ALL=C sort -s -u -k 1,1 | while read -r file folder; do
        printf '%s/%s\n' "$folder" "$file"
    done
    printf '/etc/sysctl.conf\n' # sysctl --system reads it last
}

# assignments: "KEY FILE:LINE before|after VALUE" of all files but ours, read once
assignments() {
    local file side=before
    while read -r file; do
        if [[ $(basename "$file") > 90-pdserve.conf || $file = /etc/sysctl.conf ]]; then
            side=after
        fi
        if [ "$(basename "$file")" = 90-pdserve.conf ] || [ ! -f "$ROOT$file" ]; then continue; fi
        text "$file" | awk -v file="$file" -v side="$side" '
            /^[ \t]*[#;]/ || !/=/ { next }
            {
                at = index($0, "=")
                key = substr($0, 1, at - 1)
                value = substr($0, at + 1)
                gsub(/[ \t]/, "", key)
                sub(/^-/, "", key)
                if (match(key, /[.\/]/) && substr(key, RSTART, 1) == "/") {
                    gsub(/\./, "\001", key)
                    gsub("/", ".", key)
                    gsub("\001", "/", key)
                }
                gsub(/[ \t\r]+/, " ", value)
                gsub(/^ | $/, "", value)
                print key, file ":" NR, side, value
            }'
    done <<<"$(files)"
}

# others_of KEY: its lines; patterns count only if no line names it
others_of() {
    local key where side value found=
    while read -r key where side value; do
        if [ "$key" = "$1" ]; then found="$found$where $side $value"$'\n'; fi
    done <<<"$ASSIGNMENTS"
    if [ -z "$found" ]; then
        while read -r key where side value; do
            # shellcheck disable=SC2053 # a pattern on purpose
            if [[ -n $key && $1 == $key ]]; then found="$found$where $side $value"$'\n'; fi
        done <<<"$ASSIGNMENTS"
    fi
    printf '%s' "$found"
}

ASSIGNMENTS=$(assignments)

check() {
    local key rule verdict wanted reason now where side other shown
    while IFS='|' read -r key rule verdict wanted reason; do
        shown=$wanted
        if [ "$rule" = least ]; then shown="at least $wanted"; fi
        if ! now=$(value "$(path_of "$key")"); then
            finding UNKNOWN "$key" "" "$shown" \
                "this kernel or this network namespace does not show it; look on the host"
        elif is_right "$rule" "$now" "$wanted"; then
            finding OK "$key" "$now" "$shown" "$reason"
        else
            # Longer than wanted is only slow to notice; shorter floods the network with ARP.
            case $key in
            *"$NEIGHBOUR") if is_number "$now" && [ "$now" -lt 1000 ]; then verdict=FAIL; fi ;;
            esac
            finding "$verdict" "$key" "$now" "$shown" "$reason" \
                "$0 apply, or for now: sysctl -w \"$key=$wanted\""
        fi
        while read -r where side other; do
            if [ "$side" = after ] && ! is_right "$rule" "$other" "$wanted"; then
                finding FAIL "$key" "$other in $where" "$shown" \
                    "that file is read after $DROP_IN and wins at the next boot" \
                    "Remove the line from $where"
            fi
        done <<<"$(others_of "$key")"
    done <<<"$(settings && interface_settings)"
}

# is_right_by_others KEY RULE WANTED: another file sets it well; then it needs no line of ours
is_right_by_others() {
    local last
    last=$(others_of "$1" | tail -n 1)
    [ -n "$last" ] && is_right "$2" "${last#* * }" "$3"
}

drop_in_lines() {
    local key rule verdict wanted reason
    while IFS='|' read -r key rule verdict wanted reason; do
        if ! is_right_by_others "$key" "$rule" "$wanted"; then printf '%s = %s\n' "$key" "$wanted"; fi
    done <<<"$(settings)"
}

changes() {
    local key rule verdict wanted reason now lines
    lines=$(drop_in_lines)
    if [ -n "$lines" ] || [ -e "$ROOT$DROP_IN" ]; then
        want_file "$DROP_IN" "# Written by pdserve (pdctl node, or ops/runbooks); its rollback takes it back.
# Settings of your own belong into another file.${lines:+
$lines}" "settings for KV over TCP that last over a reboot"
    fi
    while IFS='|' read -r key rule verdict wanted reason; do
        now=$(value "$(path_of "$key")") || continue
        if is_right "$rule" "$now" "$wanted"; then wanted=$now; fi
        want_value "$(path_of "$key")" "$wanted" "$reason"
    done <<<"$(settings && interface_settings)"
}

run_verb 'check|plan|apply|verify|rollback' "$@"
