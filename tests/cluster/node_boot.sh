#!/bin/bash
# The first process of a bare node: makes a root of its own over this machine's, then waits and reaps.
#   node_boot.sh WORK HOSTNAME HOSTS_FILE CA_FILE      prints `up` when the node is
set -euo pipefail
work=$1 name=$2 hosts=$3 ca=$4
mount --make-rprivate /
mount -t tmpfs -o mode=0755 node "$work"
mkdir "$work"/{up,wk,root}
mount -t overlay node -o "lowerdir=/,upperdir=$work/up,workdir=$work/wk" "$work/root"
root=$work/root
hosts_text=$(cat "$hosts") ca_text=$(cat "$ca")
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=0755 run "$root/run"
mkdir -p "$root/.before"
cd "$root"
pivot_root . .before
umount -l /.before
cd /
ip link set lo up
hostname "$name"
printf '%s\n' "$hosts_text" >/etc/hosts
rm -f /etc/resolv.conf && : >/etc/resolv.conf
mkdir -p /usr/local/share/ca-certificates
printf '%s\n' "$ca_text" >/usr/local/share/ca-certificates/test.crt
printf '%s\n' "$ca_text" >>/etc/ssl/certs/ca-certificates.crt
# no package source, no settings and no lists of this machine
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/* /etc/apt/preferences.d/* \
    /etc/apt/auth.conf.d/* /var/lib/apt/lists/* /var/cache/apt/*.bin
mkdir -p /var/lib/apt/lists/partial /var/cache/apt/archives/partial
rm -f /usr/lib/*/libgomp.so.1* /lib/*/libgomp.so.1* /var/lib/dpkg/info/libgomp1*
echo up
while :; do sleep 3600 & wait $! || true; done
