//! Registries that want a password: whose is tried, and where none of them is ever written.

use anyhow::{Result, ensure};
use serde_json::Value;
use testbed::faults::Rules;

use crate::hand::{HAND, Hand};
use crate::stage::{NODES, Stage};

pub(crate) const CANARY: &str = "canary-8d1f0c5e";

impl Hand<'_> {
    fn credentials(&self, name: &str, entries: &[(&str, &str, &str)]) -> Result<String> {
        let auths: serde_json::Map<String, Value> = entries
            .iter()
            .map(|(key, username, password)| {
                let entry = serde_json::json!({"username": username, "password": password});
                ((*key).to_owned(), entry)
            })
            .collect();
        self.put(name, &serde_json::json!({"auths": auths}).to_string())?;
        Ok(format!("--credentials {HAND}/{name}"))
    }
}

pub(crate) fn secrets_are_tried_in_turn_and_written_nowhere(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5001)?;
    let name = faults.name();
    let (server, init) = (format!("{name}/server:1.0"), format!("{name}/server-init:1.0"));
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        faults.set(Rules {
            password: Some(("robot".into(), CANARY.into())),
            ..Rules::default()
        });
        hand.forget(&[&server, &init])?;
        let started = hand.sh("date +%s")?;
        hand.is_refused("", &server, "Unauthorized")?;
        let path = format!("{name}/server");
        let wrong = hand.credentials("wrong.json", &[(name.as_str(), "robot", "not-it")])?;
        hand.is_refused(&wrong, &server, "Unauthorized")?;
        // The longer key is tried first, and it is the wrong one.
        let both = hand.credentials(
            "both.json",
            &[
                (path.as_str(), "robot", "not-it"),
                (name.as_str(), "robot", CANARY),
            ],
        )?;
        hand.pulls(&both, &[&server])?;
        ensure!(
            faults.asked().iter().any(|asked| asked.refused == Some(401)),
            "{node}: nobody was refused"
        );
        // Without a rule anybody may pull: a wrong secret is no obstacle.
        faults.set(Rules::default());
        hand.pulls(&wrong, &[&init])?;
        hand.sh(&format!("rm {HAND}/both.json"))?;
        let found = hand.sh(&format!(
            "journalctl --since=@{} -o cat | grep -c {CANARY}; grep -rlsa {CANARY} /var/log /run /tmp /etc {HAND} /var/lib/containerd/io.containerd.metadata.v1.bolt | head -5; true",
            started.trim()
        ))?;
        ensure!(found.trim() == "0", "{node} kept the password: {found}");
        hand.forget(&[&server, &init])?;
    }
    Ok(())
}

pub(crate) fn the_kubelets_credential_providers_are_asked_on_the_host(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5002)?;
    let image = format!("{}/server:1.0", faults.name());
    faults.set(Rules {
        password: Some(("plugin".into(), CANARY.into())),
        ..Rules::default()
    });
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&image])?;
        let answer = format!(
            "{{\"kind\":\"CredentialProviderResponse\",\"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"Registry\",\"auth\":{{\"{}\":{{\"username\":\"plugin\",\"password\":\"{CANARY}\"}}}}}}",
            faults.name()
        );
        hand.sh("mkdir -p /opt/providers")?;
        hand.put(
            "provider",
            &format!("#!/bin/sh\ngrep -q CredentialProviderRequest && [ \"$1\" = get ] && [ \"$MODE\" = test ] && echo '{answer}'\n"),
        )?;
        hand.put(
            "providers.yaml",
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: provider\n  matchImages: ['*.testbed:5002']\n  defaultCacheDuration: 1h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  args: [get]\n  env: [{name: MODE, value: test}]\n",
        )?;
        hand.sh(&format!(
            "install -m 755 {HAND}/provider /opt/providers/provider; mkdir -p /etc/systemd/system/kubelet.service.d
             line=$(sed -n 's/^ExecStart=//p' /etc/systemd/system/kubelet.service)
             printf '[Service]\\nExecStart=\\nExecStart=%s --image-credential-provider-config={HAND}/providers.yaml --image-credential-provider-bin-dir=/opt/providers\\n' \"$line\" > /etc/systemd/system/kubelet.service.d/providers.conf
             systemctl daemon-reload; systemctl restart kubelet"
        ))?;
        let result = hand
            .is_refused("", &image, "Unauthorized")
            .and_then(|_| hand.pulls("--credential-providers", &[&image]))
            .and_then(|_| hand.sh(&format!("journalctl -b -o cat | grep -c {CANARY}; systemctl list-units --all --no-legend 'quartermaster-credentials-*' | wc -l; true")));
        hand.sh("rm -r /etc/systemd/system/kubelet.service.d/providers.conf /opt/providers; systemctl daemon-reload; systemctl restart kubelet")?;
        let left = result?;
        ensure!(left.split_whitespace().eq(["0", "0"]), "{node} kept: {left}");
        hand.forget(&[&image])?;
    }
    Ok(())
}
