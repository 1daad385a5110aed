#!/usr/bin/env bash
# system.sh: clock, CPU, memory, limits, cgroup and container: what makes latency jump.
#
#   system.sh check | plan | apply [--yes] | verify | rollback [--yes]
#
# apply only allows huge pages to shared memory that asks for them, as mapped KV pools do. The rest
# belongs to the whole machine and its other tenants: it is judged and left to a person.
set -eu
CONCERN=system
# shellcheck source=ops/runbooks/journal.sh
. "$(dirname "${BASH_SOURCE[0]}")/journal.sh"

THP=/sys/kernel/mm/transparent_hugepage
TMPFILES=/etc/tmpfiles.d/pdserve-huge-pages.conf
MIN_OPEN_FILES=65536
MIN_SHM_KIB=1048576

check_clock() {
    local found
    if found=$(value /sys/devices/system/clocksource/clocksource0/current_clocksource); then
        case $found in
        tsc | kvm-clock | hyperv_clocksource_tsc_page | arch_sys_counter)
            finding OK "clock source" "$found" "" "reading it costs no system call"
            ;;
        *) finding WARN "clock source" "$found" tsc \
            "every reading of the clock is a system call; the kernel took tsc for unstable" \
            "dmesg | grep -i tsc" ;;
        esac
    else
        finding UNKNOWN "clock source" "" tsc "the kernel does not show it here"
    fi
    found=$(ask timedatectl | sed -n 's/.*\(NTP\|System clock\) synchronized: *//p') || found=
    case $found in
    yes) finding OK "clock sync" yes "" "log lines of several hosts can be compared" ;;
    no) finding WARN "clock sync" no yes \
        "log lines of several hosts cannot be compared; pdserve itself never subtracts their clocks" \
        "systemctl enable --now chronyd (or systemd-timesyncd)" ;;
    *) finding UNKNOWN "clock sync" "" yes "timedatectl cannot be asked here" ;;
    esac
}

check_cpu() {
    local file found='' name
    for file in "$ROOT"/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do
        if [ -f "$file" ]; then found="$found$(cat "$file")"$'\n'; fi
    done
    found=$(sort -u <<<"$found" | grep . | tr '\n' ' ' | sed 's/ $//') || true
    case $found in
    '') finding UNKNOWN "CPU governor" "" performance "this machine does not show one (a guest)" ;;
    performance) finding OK "CPU governor" "$found" "" "no step waits for a core to speed up" ;;
    *) finding WARN "CPU governor" "$found" performance \
        "a core that idled between two steps is slow at first, which is jitter" \
        "cpupower frequency-set -g performance" ;;
    esac
    if found=$(cat "$ROOT/sys/fs/cgroup/cpu.stat" 2>/dev/null); then
        name=$(awk '$1 == "nr_throttled" { print $2 }' <<<"$found")
        if is_number "$name" && [ "$name" -gt 0 ]; then
            finding WARN "CPU quota" "throttled $name times" 0 \
                "the cgroup stops the process until its next period, which looks like jitter" \
                "Raise or remove the CPU limit of the container or unit"
        else
            finding OK "CPU quota" "not throttled" "" "the cgroup has let it run"
        fi
    fi
}

check_interrupts() {
    local name found=no file
    for file in "$ROOT"/proc/[0-9]*/comm; do
        if { IFS= read -r name <"$file"; } 2>/dev/null && [ "$name" = irqbalance ]; then found=yes; fi
    done
    if [ "$found" = yes ]; then
        finding OK irqbalance runs "" \
            "interrupts are spread; ban the CPUs that workers are pinned to (IRQBALANCE_BANNED_CPULIST)"
    else
        finding UNKNOWN irqbalance "not seen" "irqbalance, or affinities of your own" \
            "without either, all interrupts of a NIC may be on one core" \
            "cat /proc/interrupts; ethtool -x INTERFACE"
    fi
}

check_memory() {
    local found num
    if found=$(text /proc/swaps); then
        num=$(tail -n +2 <<<"$found" | grep -c . || true)
        if [ "$num" -gt 0 ]; then
            finding WARN swap "$num areas" none \
                "a KV block that was swapped out stalls every sequence of the step" \
                "swapoff -a, or MemorySwapMax=0 in the unit"
        else
            finding OK swap none "" "no page of KV waits for a disk"
        fi
    fi
    found=$(chosen "$(value $THP/defrag || true)")
    if [ -n "$found" ]; then
        if [ "$found" = always ]; then
            finding WARN "huge pages, defrag" always "madvise or defer" \
                "an allocation waits while the kernel moves pages together" \
                "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag"
        else
            finding OK "huge pages, defrag" "$found" "" "ordinary allocations do not wait for it"
        fi
    fi
    found=$(chosen "$(value $THP/shmem_enabled || true)")
    case $found in
    '') ;;
    advise | always | within_size | force)
        finding OK "huge pages, shared memory" "$found" "" "mapped KV pools can have them"
        ;;
    *) finding WARN "huge pages, shared memory" "$found" advise \
        "mapped KV pools are shared memory, and have huge pages only where this allows it" \
        "$0 apply" ;;
    esac
    if found=$(value /sys/fs/cgroup/memory.max) && [ "$found" != max ]; then
        finding WARN "memory limit" "$found bytes" "above weights, KV pool and 2 GiB" \
            "the kernel kills the worker at this limit, whatever the machine has" \
            "Compare with kv_pool_nbytes and the size of the model"
    fi
}

check_limits() {
    local found
    found=$(text /proc/self/limits | awk '/^Max open files/ { print $4 }') || found=
    if ! is_number "$found"; then
        finding UNKNOWN "open files" "" "at least $MIN_OPEN_FILES" "/proc/self/limits cannot be read"
    elif [ "$found" -ge "$MIN_OPEN_FILES" ]; then
        finding OK "open files" "$found" "" "a connection is a file"
    else
        finding WARN "open files" "$found in this shell" "at least $MIN_OPEN_FILES" \
            "each client and each lane to a peer is one; the units set LimitNOFILE" \
            "ulimit -n $MIN_OPEN_FILES, where a service is started by hand"
    fi
}

check_container() {
    local found
    if [ -d "$ROOT/sys/class/infiniband" ] && [ -n "$(ls "$ROOT/sys/class/infiniband")" ] &&
        [ ! -d "$ROOT/dev/infiniband" ]; then
        finding FAIL /dev/infiniband missing "there" \
            "the kernel has RDMA devices and this container was not given them" \
            "--device /dev/infiniband, and a memlock limit of unlimited"
    fi
    if [ -z "$ROOT" ] && found=$(df -k -P /dev/shm 2>/dev/null | awk 'NR == 2 { print $2 }') &&
        is_number "$found"; then
        if [ "$found" -ge "$MIN_SHM_KIB" ]; then
            finding OK /dev/shm "$((found / 1024)) MiB" "" "PyTorch and mapped files have room"
        else
            finding WARN /dev/shm "$((found / 1024)) MiB" "at least 1024 MiB" \
                "a container's default is 64 MiB" "--shm-size=8g, or a memory volume on /dev/shm"
        fi
    fi
}

check_gpu() {
    local found
    if found=$(value /proc/driver/nvidia/version); then
        finding OK "GPU driver" "$found" "" "the kernel has it"
    elif ls "$ROOT"/dev/nvidia[0-9]* >/dev/null 2>&1; then
        finding FAIL "GPU driver" "no version" "loaded" "the device is there and the driver is not"
    fi
}

check() {
    check_clock
    check_cpu
    check_interrupts
    check_memory
    check_limits
    check_container
    check_gpu
}

changes() {
    local choices reason="mapped KV pools are shared memory, and have huge pages only where this allows it"
    choices=$(value $THP/shmem_enabled) || return 0
    if ! grep -q -w advise <<<"$choices"; then return 0; fi # this kernel does not know it
    case $(chosen "$choices") in
    advise | always | within_size | force)
        if [ ! -e "$ROOT$TMPFILES" ]; then return 0; fi
        ;;
    esac
    # The file first: if this ends in between, the value still asks for the rest.
    want_file "$TMPFILES" "# pdserve: huge pages for shared memory whose program asks for them (mapped KV pools do).
w $THP/shmem_enabled - - - - advise" "$reason, also after a boot"
    want_value $THP/shmem_enabled advise "$reason"
}

run_verb 'check|plan|apply|verify|rollback' "$@"
