#!/bin/sh
# Gathers crun, WasmEdge and every library the two need, with their own loader, into one folder that takes
# nothing from the host it is put on: collect.sh FOLDER. Runs in a Debian where crun and libwasmedge0 are installed.
#
# LLVM=none (default) leaves LLVM out, see no-llvm.sh; LLVM=full ships it.
set -eu
out=$1
home=/opt/quartermaster/current # where crun finds itself on a node
here=$(dirname "$0")

library() { # the file the loader would take for this name
    ldconfig -p | awk -v name="$1" '$1 == name { print $NF; exit }'
}
closure() { # every library these files load, and what those load
    ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u
}

crun=$(command -v crun)
wasmedge=$(library libwasmedge.so.0)
loader=$(patchelf --print-interpreter "$crun")
mkdir -p "$out/bin" "$out/lib"
cp -L "$crun" "$out/bin/crun"
cp -L "$loader" "$wasmedge" "$out/lib/"
case ${LLVM:-none} in
    full)
        closure "$crun" "$wasmedge" | xargs -I{} cp -L {} "$out/lib/" ;;
    none)
        llvm=$(closure "$wasmedge" | grep /libLLVM)
        sh "$here/no-llvm.sh" "$wasmedge" "$llvm" "$out/lib/$(basename "$llvm")"
        # What only LLVM wanted (z3, libxml2, libedit, …) goes with it: ask again, now that it is small.
        LD_LIBRARY_PATH=$out/lib closure "$crun" "$wasmedge" | grep -v "^$out/lib/" | xargs -I{} cp -L {} "$out/lib/" ;;
    *)
        echo "LLVM=$LLVM: none or full is meant" >&2; exit 2 ;;
esac

# The loader and libc know one another's private structures; leave both as Debian built them.
for file in "$out"/lib/*; do
    case $(basename "$file") in
        "$(basename "$loader")" | libc.so.6) ;;
        *) strip --strip-unneeded "$file" && patchelf --force-rpath --set-rpath '$ORIGIN' "$file" ;;
    esac
done
strip --strip-unneeded "$out/bin/crun"

# crun runs itself again from a copy in memory, so its paths are absolute. DT_RPATH and not DT_RUNPATH: a
# containerd that was started with LD_LIBRARY_PATH (snaps are) would mix its libraries with ours otherwise.
# Both strings get room of 255 bytes, filled with NUL, so that another prefix can be written over them in place.
room() { # the path, with as many slashes in front as fill the room
    printf '%*s%s' $((255 - ${#1})) '' "$1" | tr ' ' /
}
patchelf --set-interpreter "$(room "$home/lib/$(basename "$loader")")" "$out/bin/crun"
patchelf --force-rpath --set-rpath "$(room "$home/lib")" "$out/bin/crun"
perl -0777 -pi -e 's{/{50,}([^\0]+)(?=\0)}{my $path = "/$1"; $path . "\0" x (255 - length $path)}ge' "$out/bin/crun"

chmod 0755 "$out" "$out"/bin "$out"/lib "$out"/bin/* "$out"/lib/*
(cd "$out" && find bin lib -type f | LC_ALL=C sort | xargs sha256sum > SHA256SUMS && chmod 0644 SHA256SUMS)
# The same files are the same layer, whenever they were gathered.
find "$out" -exec touch -h -d @0 {} +
