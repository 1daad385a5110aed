# Second part of the guest's start, inside the overlay; its output is the rig's output.
# settings.sh (made for each run) sets clock_mhz and mtu and defines mount_shares.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
busybox stty raw -echo </dev/tty0
ulimit -l unlimited
ulimit -c 0

fail() {
    echo "rig: $*"
    busybox poweroff -f
}

. /run/rig/settings.sh
mount_shares
ip link set lo up
. /run/rig/pair.sh

# perftest reads the clock rate there, and User Mode Linux tells none.
grep -q MHz /proc/cpuinfo || {
    sed "s/^processor.*/&\ncpu MHz\t\t: $clock_mhz/" /proc/cpuinfo >/run/cpuinfo
    mount --bind /run/cpuinfo /proc/cpuinfo
}

read -r up _ </proc/uptime
echo "$up" >/run/rig/booted
setsid -w /bin/sh /run/rig/command.sh </dev/null
echo $? >/run/rig/status
busybox poweroff -f
