//! `logs`: what the agents of nodes last reported, and with `--follow` what happens from then on.

use quartermaster_proto::v1;

use crate::events;
use crate::leader::Leader;
use crate::look::{Look, Tone};
use crate::output;
use crate::status;

/// Nodes that can be asked for in one request.
const AT_ONCE: usize = 100;

/// `logs`
///
/// # Errors
/// When the leader can't be asked, or nothing is known of a node.
pub(crate) async fn show(leader: &Leader, nodes: &[String], follow: bool) -> anyhow::Result<()> {
    let look = Look::of_stdout();
    // Begun before the reports are read: nothing falls between the two.
    let following = match follow {
        true => Some(events::follow(leader, nodes).await),
        false => None,
    };
    let mut reports: Vec<v1::Report> = Vec::new();
    let parts: Vec<&[String]> = if nodes.is_empty() {
        vec![&[]]
    } else {
        nodes.chunks(AT_ONCE).collect()
    };
    for part in parts {
        let request = v1::ReportsRequest { nodes: part.to_vec() };
        let answer = leader
            .ask(|mut leader| {
                let request = request.clone();
                async move { leader.reports(request).await }
            })
            .await?;
        reports.extend(answer.reports);
    }
    if reports.len() < nodes.len() {
        // A node that is not there is a mistake; one that has not reported yet is not.
        status::ask(leader).await?.keep(nodes)?;
    }
    output::say(&text(&reports, nodes, look));
    let Some(mut following) = following else {
        return Ok(());
    };
    loop {
        tokio::select! {
            event = following.recv() => match event {
                Some(event) => if let Some(line) = events::line(&event, look) {
                    output::say(&format!("{line}\n"));
                },
                None => return Ok(()),
            },
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

fn text(reports: &[v1::Report], nodes: &[String], look: Look) -> String {
    let mut parts: Vec<String> = reports
        .iter()
        .map(|report| {
            let lines = report.text.lines().map(|line| tinted(line, look) + "\n");
            format!("{}\n{}", look.strong(&report.node), lines.collect::<String>())
        })
        .collect();
    if reports.len() < nodes.len() || reports.is_empty() {
        let silent = nodes.iter().filter(|node| {
            // A long name is cut to what a ConfigMap takes as a key, so only its beginning is compared.
            let begins = &node[..node.floor_char_boundary(54)];
            !reports.iter().any(|report| report.node.starts_with(begins))
        });
        let names: Vec<&str> = silent.map(String::as_str).collect();
        let words = if names.is_empty() {
            "No agent has reported anything yet.\n".to_owned()
        } else {
            format!("Nothing has been reported yet of {}.\n", names.join(", "))
        };
        parts.push(look.paint(Tone::Dim, &words));
    }
    parts.join("\n")
}

fn tinted(line: &str, look: Look) -> String {
    let tone = if line.ends_with(" done") {
        Tone::Good
    } else if line.contains(" failed") {
        Tone::Bad
    } else {
        Tone::Plain
    };
    look.paint(tone, line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_stand_below_the_names_of_their_nodes() {
        let reports = [v1::Report {
            node: "worker-1".into(),
            text: "2026-01-01T00:00:00Z Install\n  detect        5 ms  Debian\n2026-01-01T00:00:02Z done"
                .into(),
        }];
        assert_eq!(
            text(
                &reports,
                &["worker-1".into(), "worker-2".into()],
                Look::plain(None)
            ),
            "worker-1\n2026-01-01T00:00:00Z Install\n  detect        5 ms  Debian\n2026-01-01T00:00:02Z done\n\n\
             Nothing has been reported yet of worker-2.\n"
        );
        assert_eq!(
            text(&[], &[], Look::plain(None)),
            "No agent has reported anything yet.\n"
        );
    }
}
