#!/usr/bin/env bash
# First process of a host of the lab: its own /tmp, /dev/shm, HOME and hosts file, then an init that reaps orphans.
#   host.sh NUMBER FOLDER NETWORK SHARED PATH...   SHARED: `yes` for a folder that all hosts see, at /mnt/shared
#                                                 PATH: folders outside, which the host sees at the same place
# It ends with its standard input, and so does the host.
set -euo pipefail
number=$1 folder=$2 network=$3 shared=$4
shift 4
hostname "h$number"
mount -t tmpfs -o size=512m tmpfs /mnt
mkdir -p /mnt/home /mnt/given /mnt/disk
mount --bind "$folder/given" /mnt/given
mount --bind "$folder/hosts/$number" /mnt/disk
if [ "$shared" = yes ]; then
  mkdir -p /mnt/shared
  mount --bind "$folder/shared" /mnt/shared
fi
{ # Debian's default: the own name is 127.0.1.1
  printf '127.0.0.1 localhost\n127.0.1.1 h%s\n' "$number"
  for other in {1..9}; do
    [ "$other" = "$number" ] || printf '%s.%s h%s\n' "$network" "$other" "$other"
  done
} >/mnt/hosts
mount --bind /mnt/hosts /etc/hosts
# There is no name server: a query fails at once, and gRPC looks into /etc/hosts.
printf 'nameserver 127.0.0.1\noptions timeout:1 attempts:1\n' >/mnt/resolv.conf
mount --bind /mnt/resolv.conf /etc/resolv.conf
index=0
for path in "$@"; do # bound twice: they may lie in /tmp, which is covered now
  mkdir "/mnt/outside$((++index))"
  mount --bind "$path" "/mnt/outside$index"
done
umount -l /dev/shm 2>/dev/null || true
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o size=2g,mode=1777 tmpfs /tmp
index=0
for path in "$@"; do
  mkdir -p "$path"
  mount --bind "/mnt/outside$((++index))" "$path"
  mount -o remount,bind,ro "$path"
done
echo up >/mnt/disk/up
exec 3<&0
cat <&3 >/dev/null &
wait $!
