# rxe0 on rdma0 (10.99.0.1) and rxe1 on rdma1 (10.99.0.2): the two ends of a veth pair, routed so
# that packets really cross it. Both ends are in one network namespace, because rxe of Linux 6.1
# listens in the initial one only. The kernel would deliver packets for its own addresses by `lo`,
# so the local table is asked only about packets that came in by a wire.
ip link add rdma0 mtu "$mtu" type veth peer name rdma1 mtu "$mtu"
for device in rdma0 rdma1; do
    sysctl -qw "net.ipv4.conf.$device.accept_local=1" "net.ipv4.conf.$device.rp_filter=0" \
        "net.ipv4.conf.$device.arp_ignore=1" "net.ipv4.conf.$device.arp_announce=2"
done
sysctl -qw net.ipv4.conf.all.rp_filter=0

ip -batch - <<END || fail "no network"
addr add 10.99.0.1/32 dev rdma0
addr add 10.99.0.2/32 dev rdma1
link set rdma0 up
link set rdma1 up
rule add pref 10 iif rdma0 lookup local
rule add pref 11 iif rdma1 lookup local
rule add pref 20 from 10.99.0.1 to 10.99.0.2 lookup 99
rule add pref 21 from 10.99.0.2 to 10.99.0.1 lookup 99
rule add pref 100 lookup local
rule del pref 0
END
# A file of its own: the routes are lost with the link and set again when it heals.
ip -batch /run/rig/pair.routes || fail "no routes"

rdma -b - <<END || fail "no soft RoCE"
link add rxe0 type rxe netdev rdma0
link add rxe1 type rxe netdev rdma1
END
