#!/bin/sh
# Makes a library with LLVM's name and the symbols WasmEdge asks of it, and nothing behind them:
# no-llvm.sh LIBWASMEDGE LIBLLVM OUT
#
# WasmEdge calls LLVM to compile modules ahead of time or just in time; crun does neither: it interprets, and
# loads what was compiled before. Yet libwasmedge.so.0 is linked with LLVM (130 MB, and 30 MB of libraries that
# only LLVM wants), and would not load without it. A function of it that is called after all says so and aborts.
set -eu
wasmedge=$1 llvm=$2 out=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(nm -D --undefined-only "$wasmedge" | sed -n 's/.*@\(LLVM_[0-9.]*\)$/\1/p' | head -n 1)
nm -D --undefined-only "$wasmedge" | sed -n "s/^ *[Uw] \(.*\)@$version$/\1/p" > "$work/wanted"
# name, kind, size of each
readelf --dyn-syms -W "$llvm" | awk '
    FNR == NR { wanted[$1]; next }
    $7 ~ /^[0-9]+$/ { split($8, at, "@"); if (at[1] in wanted) { print at[1], $4, $3; delete wanted[at[1]] } }
    END { for (name in wanted) { print "LLVM does not have " name > "/dev/stderr"; exit 1 } }
' "$work/wanted" - > "$work/symbols"

{
    cat <<'C'
extern long write(int, const void *, unsigned long);
extern void abort(void) __attribute__((noreturn));
static const char why[] = "WasmEdge called LLVM, which is left out here: modules are run, not compiled\n";
__attribute__((noreturn, used)) static void absent(void) { write(2, why, sizeof why - 1); abort(); }
/* Destructors free the tables of the linker inside libwasmedge at exit. They are empty: there is nothing to free. */
__attribute__((used)) static void nothing(void) {}
C
    while read -r name kind size; do
        case $kind in
            FUNC | IFUNC)
                case $name in *deallocate_buffer*) does=nothing ;; *) does=absent ;; esac
                echo "void $name(void) __attribute__((alias(\"$does\")));" ;;
            TLS) echo "__thread char $name[$size];" ;;
            OBJECT) echo "char $name[$size] __attribute__((aligned(16)));" ;;
            *) echo "libLLVM's $name is a $kind, which no-llvm.sh can't stand in for" >&2; exit 1 ;;
        esac
    done < "$work/symbols"
} > "$work/stand-in.c"
echo "$version { global: *; };" > "$work/stand-in.map"
gcc -Os -shared -fPIC -Wl,-soname,"$(basename "$llvm")" -Wl,--version-script,"$work/stand-in.map" -o "$out" "$work/stand-in.c"
