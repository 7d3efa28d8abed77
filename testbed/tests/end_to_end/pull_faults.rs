//! Pulls that go wrong in the middle: a registry that stalls or refuses, a person who cancels, a containerd that is
//! restarted, a disk that is too small.

use anyhow::{Result, ensure};
use testbed::faults::Rules;

use crate::hand::{HAND, Hand};
use crate::pull::{INIT, MB, until_nothing_comes};
use crate::stage::{NODES, Stage};

pub(crate) fn a_registry_that_stalls_or_asks_for_patience_is_told(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5003)?;
    let image = format!("{}/stalling:1.0", faults.name());
    stage.push_random("stalling:1.0", 8 * MB)?;
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&image])?;
        faults.set(Rules {
            stall_after: Some(MB as u64),
            ..Rules::default()
        });
        let said = hand.is_refused("--stall-after 2 --attempts 1", &image, "RegistryStalled")?;
        ensure!(
            said["message"]
                .as_str()
                .is_some_and(|words| words.contains("8.0 MB")),
            "{node}: it is not told how far the pull was: {said}"
        );
        until_nothing_comes(stage, &hand)?;
        for (status, reason) in [(429, "RateLimited"), (503, "RegistryOverloaded")] {
            faults.set(Rules {
                refuse: Some((status, 7)),
                ..Rules::default()
            });
            hand.is_refused("--attempts 1", &image, reason)?;
        }
        faults.set(Rules::default());
        hand.pulls("", &[&image])?;
        hand.forget(&[&image])?;
    }
    Ok(())
}

pub(crate) fn a_cancelled_pull_stops_in_containerd_and_a_kubelet_beside_it_goes_on(
    stage: &Stage,
) -> Result<()> {
    let faults = stage.faults(5004)?;
    let image = format!("{}/slow:1.0", faults.name());
    stage.push_random("slow:1.0", 6 * MB)?;
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&image])?;
        let slow = Rules {
            rate: Some(2 * MB as u64),
            ..Rules::default()
        };
        faults.set(slow.clone());
        // A pull of one's own and one as the kubelet makes it, of the same layer; the first is interrupted.
        let out = hand.sh(&format!(
            "cd {HAND}; ./quartermaster-agent pull --json {image} >cancelled 2>/dev/null & pid=$!
             for i in $(seq 100); do ctr -n k8s.io content active | grep -q layer && break; sleep 0.05; done
             crictl pull {image} >crictl 2>&1 & other=$!
             sleep 0.3; kill -INT $pid; wait $pid; cat cancelled; wait $other; echo kubelet=$?"
        ))?;
        ensure!(out.contains("\"reason\":\"Cancelled\""), "{node}: {out}");
        ensure!(
            out.contains("kubelet=0"),
            "{node}: the other pull was broken: {out}"
        );
        hand.pulls("", &[&image])?;
        hand.forget(&[&image])?;
        until_nothing_comes(stage, &hand)?;

        faults.set(slow);
        let out = hand.sh(&format!(
            "cd {HAND}; ./quartermaster-agent pull --json {image} >over 2>/dev/null & pid=$!
             for i in $(seq 100); do ctr -n k8s.io content active | grep -q layer && break; sleep 0.05; done
             systemctl restart containerd; wait $pid; cat over"
        ))?;
        ensure!(
            out.contains("\"ready\":true"),
            "{node}: the pull did not outlive a restart of containerd: {out}"
        );
        hand.forget(&[&image])?;
        // containerd's own lease would have outlived it by a day, and what had come with it.
        until_nothing_comes(stage, &hand)?;
    }
    Ok(())
}

pub(crate) fn what_does_not_fit_is_not_pulled(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5007)?;
    let big = format!("{}/big:1.0", faults.name());
    stage.push_random("big:1.0", 60 * MB)?;
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        hand.is_refused("--keep-free 100 --attempts 1", INIT, "DiskReserve")?;
        // A small disk in the place of containerd's content.
        let content = "/var/lib/containerd/io.containerd.content.v1.content";
        hand.sh(&format!(
            "systemctl stop containerd; mount -t tmpfs -o size=100M none {content} && systemctl start containerd"
        ))?;
        // So slow that it is seen before it is over.
        faults.set(Rules {
            rate: Some(600_000),
            ..Rules::default()
        });
        let refused = hand.is_refused("--keep-free 10 --attempts 1", &big, "DoesNotFit");
        // containerd would go on believing in what lay on the small disk.
        let result = refused.and_then(|_| until_nothing_comes(stage, &hand));
        hand.sh(&format!(
            "systemctl stop containerd; umount -l {content}; systemctl start containerd"
        ))?;
        result?;
        faults.set(Rules::default());
        hand.pulls("", &[&big])?;
        hand.forget(&[&big])?;
    }
    Ok(())
}
