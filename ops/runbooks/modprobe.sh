#!/usr/bin/env bash
# modprobe.sh: kernel modules of RDMA, loaded and loaded at boot, and options that the driver has.
#
#   modprobe.sh check | plan | apply [--yes] | verify | rollback [--yes]
#
# Nothing is loaded or unloaded here: reloading mlx5_core takes the network away.
set -eu
CONCERN=modprobe
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

LIST=/etc/modules-load.d/pdserve.conf
DRIVER=mlx5_core
# The program's own way to the devices, and connections made by address.
MODULES="ib_uverbs rdma_ucm"
# Options that circulate in tuning notes; no driver that we know has them, so each is looked up.
NOTED="log_sz_xrq log_sz_sq"

is_loaded() {
    [ -d "$ROOT/sys/module/$1" ] || text /proc/modules | grep -q "^$1 "
}

has_rdma() {
    [ -n "$(ls "$ROOT/sys/class/infiniband" 2>/dev/null)" ] || is_loaded "$DRIVER"
}

# missing_at_boot: those of MODULES that no list names
missing_at_boot() {
    local module folder listed=
    # rdma-core's own lists are read when udev sees a device.
    for folder in /etc/modules-load.d /run/modules-load.d /usr/lib/modules-load.d; do
        listed="$listed $(cat "$ROOT$folder"/*.conf 2>/dev/null | sed 's/[#;].*//' || true)"
    done
    listed="$listed $(cat "$ROOT"/etc/rdma/modules/* 2>/dev/null | sed 's/#.*//' || true)"
    for module in $MODULES; do
        if ! grep -q -x -F -e "$module" < <(tr -s ' \t' '\n' <<<"$listed"); then
            printf '%s\n' "$module"
        fi
    done
}

# options_set: "FILE OPTION=VALUE" for each option of the driver that a file sets
options_set() {
    local folder file first second rest word
    for folder in /etc/modprobe.d /run/modprobe.d /usr/lib/modprobe.d; do
        for file in "$ROOT$folder"/*.conf; do
            [ -f "$file" ] || continue
            while read -r first second rest; do
                if [ "$first $second" != "options $DRIVER" ]; then continue; fi
                for word in $rest; do printf '%s %s\n' "${file#"$ROOT"}" "$word"; done
            done <"$file"
        done
    done
}

check_options() {
    local known name file option
    if ! known=$(ask modinfo -F parm "$DRIVER"); then
        if is_loaded "$DRIVER"; then
            finding UNKNOWN "$DRIVER" "" "known options" \
                "modinfo cannot be asked about it here, so options cannot be compared" \
                "Install kmod"
        fi
        return 0
    fi
    known=$(cut -d : -f 1 <<<"$known")
    for name in $NOTED; do
        if grep -q -x -F -e "$name" <<<"$known"; then
            finding OK "$DRIVER $name" "the driver has it" "" \
                "left as it is: sizes of queues are asked for by the program that makes them"
        else
            finding UNKNOWN "$DRIVER $name" "no option of this driver" "not set" \
                "some notes name it, this driver has none; a line that sets it does nothing"
        fi
    done
    while read -r file option; do
        if [ -n "$option" ] && ! grep -q -x -F -e "${option%%=*}" <<<"$known"; then
            finding WARN "$DRIVER $option" "set in $file" "one of: $(tr '\n' ' ' <<<"$known")" \
                "the kernel logs 'unknown parameter ignored' and goes on without it" \
                "Remove it from $file"
        fi
    done <<<"$(options_set)"
}

check() {
    local module missing
    for module in $MODULES; do
        if is_loaded "$module"; then
            finding OK "$module" "loaded" "" "RDMA programs need it"
        elif has_rdma; then
            finding FAIL "$module" "not loaded" "loaded" \
                "without it no program can open the RDMA device, and KV falls back to TCP" \
                "modprobe $module; if there is no such module: packages.sh apply"
        else
            finding UNKNOWN "$module" "not loaded" "loaded where there is RDMA" \
                "no RDMA device is seen here; KV goes over TCP"
        fi
    done
    missing=$(missing_at_boot | tr '\n' ' ')
    if [ -z "$missing" ]; then
        finding OK "at boot" "$MODULES" "" "a file loads them at every boot"
    elif has_rdma; then
        finding WARN "at boot" "${missing}in no list" "$MODULES" \
            "after a reboot they are loaded only if udev sees the device and rdma-core is installed" \
            "$0 apply"
    else
        finding UNKNOWN "at boot" "${missing}in no list" "$MODULES" \
            "no RDMA device is seen here, so none need be loaded"
    fi
    check_options
    if ! has_rdma && ask modinfo -F filename rdma_rxe >/dev/null; then
        finding UNKNOWN "soft-RoCE" "available" "only for a laptop or a test" \
            "there is no RDMA device; rdma_rxe makes one on any interface, for trying only" \
            "modprobe rdma_rxe; rdma link add rxe0 type rxe netdev INTERFACE"
    fi
}

changes() {
    if ! has_rdma; then return 0; fi
    if [ -z "$(missing_at_boot)" ] && [ ! -e "$ROOT$LIST" ]; then return 0; fi
    want_file "$LIST" "# Written by pdserve (pdctl node, or ops/runbooks); its rollback takes it back.
${MODULES// /$'\n'}" "RDMA programs need these modules after every boot"
}

needs() {
    printf 'modprobe: counts from the next boot; now: modprobe -a %s\n' "$MODULES"
}

run_verb 'check|plan|apply|verify|rollback' "$@"
