#!/bin/sh
# Proves a payload where it will lie, /opt/quartermaster/current, and that it takes nothing from around it: check.sh FOLDER
set -eu
payload=$1
here=$(dirname "$0")
home=/opt/quartermaster/current
root=$(mktemp -d)
trap 'rm -rf "$root" "$home"' EXIT
mkdir -p "$(dirname "$home")" "$root$home"
ln -s "$payload" "$home"
cp -a "$payload/." "$root$home"
loader=$home/lib/$(cd "$payload/lib" && echo ld-linux*)

env -i "$home/bin/crun" --version | tee "$root/version"
grep -q '+WASM:wasmedge' "$root/version" || { echo 'this crun runs no WasmEdge' >&2; exit 1; }
if env -i "$loader" --list "$home/bin/crun" | grep '=>' | grep -v "=> $home/lib/"; then
    echo 'crun would load these from the host' >&2; exit 1
fi

# crun loads WasmEdge only when it starts a module, so its version proves nothing of that. The probe loads it as crun
# does, in a root where there is nothing else, no libc and no shell. (crun itself needs /proc, and a build can't mount it.)
gcc -O1 -o "$root/probe" "$here/probe.c"
said=$(chroot "$root" "$loader" --library-path "$home/lib" /probe)
[ "$said" = 'a module ran' ] || { echo "the probe's module said: $said" >&2; exit 1; }

(cd "$payload" && sha256sum --quiet -c SHA256SUMS)
echo "the payload runs modules by itself: $(du -sk "$payload" | cut -f1) KiB"
