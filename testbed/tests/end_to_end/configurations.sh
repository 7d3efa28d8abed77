# Plans each configuration below $1 with the agent beside it, boots the node's own containerd on the untouched and on
# the edited file, and prints what CRI serves: `==== NAME CODE`, then the parts `---- plan`, `---- untouched` and
# `---- edited`. Each daemon has mounts and a network of its own, with an interface and a default route: the files
# name addresses and sockets of their own.
set -u
cd "$1"
version=$(containerd --version | awk '{print $3}')

boot() {
  unshare --mount --net sh -c '
    mount -t tmpfs tmpfs /var/lib/containerd
    mkdir /var/lib/containerd/etc
    cp "$1" /var/lib/containerd/etc/config.toml
    cp spec.json /var/lib/containerd/etc/cri-base.json
    cp spec.json /var/lib/containerd/etc/base-runtime-spec.json
    mount --bind /var/lib/containerd/etc /etc/containerd
    cp spec.json /var/lib/containerd/base-spec.json
    mount -t tmpfs tmpfs /run
    mkdir /run/talos; cp /var/lib/containerd/base-spec.json /run/talos/
    mkdir -p /etc/cri/conf.d; mount --bind /run/talos /etc/cri/conf.d
    ip link set lo up
    ip link add v0 type veth peer name v1
    ip address add 192.0.2.2/24 dev v0; ip link set v0 up; ip link set v1 up
    ip route add default via 192.0.2.1
    containerd --config /etc/containerd/config.toml --root /var/lib/containerd/root --state /run/state \
      --address /run/c.sock >/run/log 2>&1 &
    pid=$!
    rounds=0
    while kill -0 $pid 2>/dev/null; do
      if crictl --timeout 2s -r unix:///run/c.sock -i unix:///run/c.sock info -o json >/run/info 2>/run/error; then
        cat /run/info; break
      fi
      grep -q "unknown service" /run/error && { echo "no CRI"; break; }
      rounds=$((rounds + 1))
      [ $rounds -gt 200 ] && { echo "no answer"; cat /run/error; break; }
      sleep 0.05
    done
    kill -0 $pid 2>/dev/null || { echo "dead"; tail -n 2 /run/log; }
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
  ' sh "$1"
}

ctr oci spec >spec.json
for file in *.toml; do
  name=${file%.toml}
  mkdir -p "host/$name/etc/containerd"
  cp "$file" "host/$name/etc/containerd/config.toml"
  ../quartermaster-agent plan --root "host/$name" --containerd-version "$version" --output "after/$name" --json >plan
  echo "==== $name $?"
  echo "---- plan"; cat plan
  echo "---- untouched"; boot "$file"
  edited=after/$name/etc/containerd/config.toml
  if [ -e "$edited" ]; then echo "---- edited"; boot "$edited"; fi
done
