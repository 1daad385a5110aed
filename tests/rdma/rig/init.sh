#!/bin/sh
# First process of the guest. The root is the host's, read-only: put a RAM overlay on it, change
# into that and go on with setup.sh. rig_control comes from the kernel's command line: a folder of
# the host that is written through.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
busybox mount -t devtmpfs dev /dev 2>/dev/null
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys

die() {
    echo "rig: $*" >/dev/kmsg
    busybox poweroff -f
}

busybox mount -t tmpfs -o size=90% ram /mnt || die "no RAM disk"
busybox mkdir /mnt/up /mnt/work /mnt/root
root=/mnt/root
busybox mount -t overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work over $root ||
    die "no overlay"
for folder in dev proc sys; do busybox mount --move /$folder $root/$folder; done
busybox mkdir -p $root/dev/pts $root/dev/shm
busybox mount -t devpts pts $root/dev/pts
busybox mount -t tmpfs -o mode=1777 shm $root/dev/shm
busybox mount -t tmpfs run $root/run
busybox mkdir $root/run/rig
busybox mount -t hostfs -o "$rig_control" none $root/run/rig || die "no control folder"
busybox ln -sf /proc/self/fd $root/dev/fd
exec busybox chroot $root /bin/sh /run/rig/setup.sh <$root/dev/null >$root/dev/tty0 2>&1
