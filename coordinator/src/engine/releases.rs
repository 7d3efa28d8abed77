//! Effect: ordering agents to let go of pins, and telling the engine what is left of them.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use quartermaster_proto::v1::agent_client::AgentClient;
use quartermaster_proto::v1::{CommandHeader, HeldImage, ReleaseRequest};
use tonic::Status;
use tonic::transport::Channel;
use tracing::{info, warn};

use super::Engine;
use super::input::Input;
use super::orders::client;
use crate::prefetch::{Keep, is_kept_to_the_end, is_removed};

/// For one command to let go.
const RELEASE_DEADLINE: Duration = Duration::from_secs(60);
/// How often the pins of a node are listed and let go in one order: each list is bounded.
const RELEASE_ROUNDS: usize = 20;

/// What was let go, and what is left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Released {
    /// Of what was wanted then.
    pub hash: String,
    pub released: u32,
    pub removed: u32,
    /// When the last pin that is left expires; `None` where none is left.
    pub held_until: Option<Timestamp>,
}

impl Engine {
    /// Orders that pins which nobody wants any more are let go.
    pub(super) fn order_release(&mut self, node: &str, channel: Channel, hash: String, keep: Keep) {
        let id = uuid::Uuid::new_v4().to_string();
        info!(node, command = id, "release of pins ordered");
        let header = self.header(id);
        let (inputs, node) = (self.inputs.clone(), node.to_owned());
        self.tasks.spawn(async move {
            let release = release(channel, header, hash, &keep);
            let released = match tokio::time::timeout(RELEASE_DEADLINE, release).await {
                Ok(Ok(released)) => Some(released),
                Ok(Err(status)) => {
                    warn!(node, code = ?status.code(), message = status.message(), "pins could not be released");
                    None
                }
                Err(_) => None,
            };
            let _ = inputs.send(Input::Released { node, released }).await;
        });
    }
}

async fn release(
    channel: Channel,
    header: Option<CommandHeader>,
    hash: String,
    keep: &Keep,
) -> Result<Released, Status> {
    let mut agent = client(channel);
    let mut total = Released {
        hash,
        released: 0,
        removed: 0,
        held_until: None,
    };
    // An owner of whom nothing is held: the answer lists what is.
    let mut held = let_go(&mut agent, &header, Step::default(), &mut total).await?;
    for _ in 0..RELEASE_ROUNDS {
        let steps = steps(&held, keep);
        let before = total.released;
        for step in steps {
            held = let_go(&mut agent, &header, step, &mut total).await?;
        }
        // What can't be let go must not be asked for again and again.
        if total.released == before {
            break;
        }
    }
    total.held_until = held
        .iter()
        .flat_map(|image| &image.pins)
        .filter_map(|pin| Timestamp::from_second(pin.until.as_ref()?.seconds).ok())
        .max();
    Ok(total)
}

/// One request to let go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Step {
    owner: String,
    keep: Vec<String>,
    remove: bool,
}

/// What is to be let go of what is held: pins of owners that want the image no more, or that are gone. What an owner
/// asked to be kept stays until it expires.
fn steps(held: &[HeldImage], keep: &Keep) -> Vec<Step> {
    let mut owners: BTreeMap<&str, bool> = BTreeMap::new();
    for image in held {
        for pin in &image.pins {
            let stays = keep
                .get(&pin.owner)
                .is_some_and(|kept| kept.contains(&image.image));
            *owners.entry(&pin.owner).or_default() |= !stays;
        }
    }
    owners
        .into_iter()
        .filter(|(owner, lets_go)| *lets_go && !is_kept_to_the_end(owner))
        .map(|(owner, _)| Step {
            owner: owner.to_owned(),
            keep: keep.get(owner).cloned().unwrap_or_default(),
            remove: is_removed(owner),
        })
        .collect()
}

async fn let_go(
    agent: &mut AgentClient<Channel>,
    header: &Option<CommandHeader>,
    step: Step,
    total: &mut Released,
) -> Result<Vec<HeldImage>, Status> {
    let owner = if step.owner.is_empty() {
        "nobody".to_owned()
    } else {
        step.owner
    };
    let request = ReleaseRequest {
        header: header.clone(),
        owner,
        keep: step.keep,
        remove_unused: step.remove,
    };
    let answer = agent.release(request).await?.into_inner();
    total.released += answer.released;
    total.removed += answer.removed;
    Ok(answer.held)
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1;

    use super::*;
    use crate::prefetch::{Retention, pin_owner};

    fn held(image: &str, owners: &[&str]) -> HeldImage {
        HeldImage {
            image: image.into(),
            pins: owners
                .iter()
                .map(|owner| v1::Pin {
                    owner: (*owner).into(),
                    until: None,
                })
                .collect(),
        }
    }

    fn keep(owner: &str, images: &[&str]) -> Keep {
        [(owner.to_owned(), images.iter().map(|i| (*i).to_owned()).collect())].into()
    }

    #[test]
    fn only_what_its_owner_wants_no_more_is_let_go() {
        let all = [held("a", &["p", "q"]), held("b", &["p"])];
        let steps = steps(
            &all,
            &[keep("p", &["a"]), keep("q", &["a"])]
                .into_iter()
                .flatten()
                .collect(),
        );
        assert_eq!(
            steps,
            [Step {
                owner: "p".into(),
                keep: vec!["a".into()],
                remove: false
            }]
        );
    }

    #[test]
    fn a_prefetch_that_is_gone_is_let_go_of_as_it_had_asked() {
        let all = [
            held("a", &[&pin_owner("gone", Retention::Unpin)]),
            held("b", &[&pin_owner("kept", Retention::Keep)]),
            held("c", &[&pin_owner("removed", Retention::RemoveUnused)]),
        ];
        let steps = steps(&all, &Keep::new());
        let told: Vec<_> = steps
            .iter()
            .map(|step| (step.owner.as_str(), step.remove))
            .collect();
        assert_eq!(told, [("gone", false), ("removed/remove", true)]);
    }

    #[test]
    fn nothing_is_asked_when_all_that_is_held_is_wanted() {
        assert!(steps(&[held("a", &["p"])], &keep("p", &["a"])).is_empty());
        assert!(steps(&[], &keep("p", &["a"])).is_empty());
    }
}
