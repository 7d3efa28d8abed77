# Boots a node: joins its cgroups, makes its root and its network, then becomes systemd. Runs in new mount, uts, ipc, pid and
# network namespaces, so all that it makes ends with the node.
set -eu
dir=$1 hostname=$2 layers=$3 fabric=$4 plug=$5 address=$6 gateway=$7 hierarchies=$8
root=$dir/root

# Only this process joins them, not the one that holds the namespaces: a v2 cgroup that holds a process besides systemd's own
# can't give its children controllers, and the kubelet finds none in kubepods.slice.
if [ "${9:-}" != joined ]; then
  while read -r join; do echo 0 > "$join"; done < "$dir/cgroups"
  exec unshare --cgroup -- sh "$0" "$dir" "$hostname" "$layers" "$fabric" "$plug" "$address" "$gateway" "$hierarchies" joined
fi

# /proc is still the host's here, so this is our id on the host. The shell keeps it when it becomes systemd.
read -r pid _ < /proc/self/stat
echo "$pid" > "$dir/init.pid.new"
mv "$dir/init.pid.new" "$dir/init.pid"

hostname "$hostname"

# The plug of an earlier boot may not have gone yet.
nsenter --net="$fabric" ip link delete "$plug" 2>/dev/null || true
ip link set lo up
ip link add eth0 type veth peer name "$plug" netns "$fabric"
nsenter --net="$fabric" ip link set "$plug" master br0 up
ip address add "$address" dev eth0
ip link set eth0 up
ip route add default via "$gateway"
echo 1 > /proc/sys/net/ipv4/ip_forward

mount -t overlay overlay -o "lowerdir=$layers,upperdir=$dir/upper,workdir=$dir/work" "$root"
# containerd's own overlays can't lie on an overlay, and the kubelet measures its disk.
mkdir -p "$root/var/lib/containerd" "$root/var/lib/kubelet"
mount --bind "$dir/containerd" "$root/var/lib/containerd"
mount --bind "$dir/kubelet" "$root/var/lib/kubelet"

mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
# Only the network's settings are a node's own; all others are the host's, and systemd and the kubelet would change them.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount --bind "$root/proc/sys/net" "$root/proc/sys/net"
mount -o remount,bind,ro "$root/proc/sys"
# Every boot of a node is one of its own, not the host's.
cat /proc/sys/kernel/random/uuid > "$dir/boot-id"
mount --bind "$dir/boot-id" "$root/proc/sys/kernel/random/boot_id"

mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty kmsg; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
touch "$root/dev/console"
mount --bind /dev/null "$root/dev/console"
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t mqueue mqueue "$root/dev/mqueue"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"

legacy=
if [ "$hierarchies" = v2 ]; then
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
  mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
  for options in $hierarchies; do
    name=${options#none,name=}
    # systemd must not find this one. In the legacy layout it takes the processes of some scopes out of it again, soon
    # after runc put them there; runc then sees an empty sandbox, and containerd 1.7 takes its shim for leaked when it
    # restarts, and ends the pod. devices-hierarchy.service mounts it once systemd has looked around.
    if [ "$name" = devices ]; then
      grep -v "^devices" /proc/cgroups > "$dir/controllers"
      mount --bind "$dir/controllers" "$root/proc/cgroups"
      touch "$root/run/devices-hierarchy"
      continue
    fi
    mkdir "$root/sys/fs/cgroup/$name"
    mount -t cgroup -o "$options" cgroup "$root/sys/fs/cgroup/$name"
    # cpu,cpuacct is looked for by each of its names.
    case $name in *,*)
      for one in $(echo "$name" | tr , ' '); do ln -s "$name" "$root/sys/fs/cgroup/$one"; done ;;
    esac
  done
  # Both switches and the variable, or systemd takes the hybrid layout and every node shares the host's one v2 tree.
  legacy="SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1"
fi

mount -o remount,bind,ro "$root/sys"

cd "$root"
mkdir -p old
pivot_root . old
umount -l /old
rmdir /old
# systemd leaves propagation alone when it takes the place for a container, and pods ask for shared mounts.
mount --make-rshared /
exec < /dev/null
# shellcheck disable=SC2086
exec env -i container=testbed PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  ${legacy:+SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1} \
  /sbin/init $legacy systemd.show_status=0 systemd.log_target=journal
