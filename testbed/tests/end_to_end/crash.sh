#!/bin/bash
# One case of the crash tests, on a node: crash.sh FAULT OPERATION COMMAND ORDINAL THEN
#
# Runs `quartermaster-agent OPERATION` with a fault at the ORDINALth point of COMMAND (install, uninstall, or apply for
# the host unit), leaves the node to itself until it is quiet, and tells in one line what it has become. Then it gives
# the node to a person: THEN is `again` (the same operation) or `back` (uninstall), and a second line tells the end.
#
# FAULT: kill (the process ends there, for good if it is the agent), containerd (containerd is killed meanwhile),
# full (the disks are full from there on), cut (says so in the file `stopped` and waits for the power to be cut),
# booted (what a cut has left, after the boot), none.
set -u
hand=/root/hand
fault=$1 operation=$2 command=$3 ordinal=$4 next=$5
export QUARTERMASTER_FAULTS=$hand/faults
agent() { "$hand/quartermaster-agent" "$@" --payload "$hand/payload"; }
within() { # SECONDS COMMAND…: until it succeeds
    local end=$((SECONDS + $1)); shift
    until "$@"; do [ $SECONDS -lt $end ] || return 1; sleep 0.02; done
}
pid_of() { # the process that the order is for
    if [ "$command" = apply ]; then systemctl show --property=MainPID --value quartermaster-apply.service; else echo "$agent"; fi
}
stopped() { # …or the operation has ended without coming there
    pid=$(pid_of)
    { [ "$pid" != 0 ] && read -r _ _ state _ < "/proc/$pid/stat" && [ "$state" = T ]; } 2>/dev/null || ! kill -0 "$agent" 2>/dev/null
}
fill() { for disk in /opt /etc/containerd; do dd if=/dev/zero of=$disk/fill bs=4k; done 2>/dev/null; }
quiet() { # neither runs nor is about to be started again
    ! systemctl show --property=ActiveState --value quartermaster-apply.service quartermaster-apply-at-boot.service | grep -Eq '^(active|activating|deactivating|reloading)$'
}
healthy() { crictl info 2>/dev/null | tr -d ' \n' | grep -q '"type":"RuntimeReady","status":true\|"status":true,"type":"RuntimeReady"'; }
served() { crictl info 2>/dev/null | grep -q '"crun": {'; }
config() {
    if cmp -s /etc/containerd/config.toml $hand/original; then echo old
    elif cmp -s /etc/containerd/config.toml $hand/edited; then echo new
    else echo neither; fi
}
node() { # what the node is
    local health=down has=without
    within 30 healthy && health=healthy
    served && has=with
    echo "$(config) $health $has"
}
traces() {
    ls -d /opt/quartermaster /run/quartermaster /etc/systemd/system/*quartermaster* \
        /etc/systemd/system/*.wants/*quartermaster* /etc/containerd/.config* 2>/dev/null
    systemctl list-units --all --plain --no-legend 'quartermaster*'
    ctr -n k8s.io images ls -q | grep quartermaster.internal
    ctr -n k8s.io leases ls -q | grep quartermaster
    crictl pods -q --label quartermaster.internal/verify=true
}

rm -f $hand/stopped
if [ "$fault" = booted ]; then
    timeout 60 systemctl is-system-running --wait > $hand/first
else
    rm -rf "$QUARTERMASTER_FAULTS" && mkdir -p "$QUARTERMASTER_FAULTS"
    [ "$fault" = none ] || echo "$command $ordinal $([ "$fault" = kill ] && echo kill || echo stop)" > "$QUARTERMASTER_FAULTS/order"
    # Not by the function: its subshell would be the process that is watched.
    "$hand/quartermaster-agent" "$operation" --payload "$hand/payload" > $hand/first 2>&1 & agent=$!
fi
case $fault in
    containerd | full | cut)
        within 60 stopped
        case $fault in
            containerd) kill -KILL "$(systemctl show --property=MainPID --value containerd.service)" ;;
            full) fill ;;
            cut) touch $hand/stopped; sleep 600 ;;
        esac
        kill -CONT "$pid" ;;
esac 2>/dev/null
code=0
[ "$fault" = booted ] || { wait "$agent" 2>/dev/null; code=$?; }
within 120 quiet || echo 'the host unit goes on and on' >> $hand/first
rm -f /opt/fill /etc/containerd/fill
effect=$(sed -n "s/^$command $ordinal //p" "$QUARTERMASTER_FAULTS/passed" | head -n 1)
armed=$(ls /etc/systemd/system/quartermaster* >/dev/null 2>&1 && echo armed || echo disarmed)
echo "fault $code $(node) $armed $([ -e "$QUARTERMASTER_FAULTS/order" ] && echo missed || echo hit) $effect"
cp "$QUARTERMASTER_FAULTS/passed" $hand/passed
rm -rf "$QUARTERMASTER_FAULTS"
unset QUARTERMASTER_FAULTS

[ "$next" = again ] || operation=uninstall
agent "$operation" > $hand/second 2>&1
code=$?
left=
[ "$operation" = install ] || left=$(traces | tr '\n' ' ')
echo "then $operation $code $(node) $left"
