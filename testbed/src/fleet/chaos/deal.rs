//! How each fault is dealt out.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kube::api::Api;
use nix::sys::signal::Signal;

use super::hand::Hand;
use super::{Driver, PREFETCHES, RECOVERY, Undo, WORKLOADS};
use crate::fleet::fault::Fault;
use crate::fleet::ledger::locked;
use crate::fleet::{blocking, objects};

impl Driver<'_> {
    /// Deals one fault out; says what it was, if it could be.
    pub(super) async fn deal(&mut self, fault: Fault) -> Result<Option<String>> {
        match fault {
            Fault::KillCoordinator | Fault::PauseCoordinator => self.disturb_coordinator(fault).await,
            Fault::PauseApiServer | Fault::RestartApiServer => self.disturb_api_server(fault),
            Fault::Throttle | Fault::ExpireWatches | Fault::HoldWatches | Fault::StaleLists => {
                Ok(self.disturb_the_way(fault).await)
            }
            Fault::KillAgent | Fault::HangAgent | Fault::CutAgent | Fault::SlowAgent => {
                Ok(self.disturb_agent(fault))
            }
            Fault::ChangePrefetch => self.change_prefetch().await,
            _ => Ok(self.happen_to_a_node(fault)),
        }
    }

    async fn disturb_coordinator(&mut self, fault: Fault) -> Result<Option<String>> {
        if self.api_is_away {
            return Ok(None);
        }
        let leader = self.leader().await;
        // Mostly the leader: the other one has little to lose.
        let n = match leader {
            Some(leader) if self.draw.f64() < 0.75 => leader,
            _ => self.draw.usize(..self.replicas.len()),
        };
        if !self.replicas[n].runs() || self.replicas[n].paused {
            return Ok(None);
        }
        if leader.is_none() || leader == Some(n) {
            self.led_from = self.led_from.max(Instant::now() + RECOVERY);
        }
        let name = self.replicas[n].name().to_owned();
        let role = if leader == Some(n) { " (the leader)" } else { "" };
        if fault == Fault::KillCoordinator {
            let time = self.time(500..6000);
            blocking(|| self.replicas[n].kill())?;
            self.undo.push((Instant::now() + time, Undo::StartReplica(n)));
            return Ok(Some(format!("{name}{role} killed, for {}", seconds(time))));
        }
        // Past its Lease, or not quite.
        let time = self.time(3000..22_000);
        self.replicas[n].pause()?;
        self.led_from = self.led_from.max(Instant::now() + time + RECOVERY);
        self.undo.push((Instant::now() + time, Undo::ResumeReplica(n)));
        Ok(Some(format!("{name}{role} paused, for {}", seconds(time))))
    }

    fn disturb_api_server(&mut self, fault: Fault) -> Result<Option<String>> {
        if self.api_is_away {
            return Ok(None);
        }
        let time = self.time(1000..6000);
        self.api_is_away = true;
        if fault == Fault::PauseApiServer {
            self.signal_api_server(Signal::SIGSTOP)?;
            self.undo.push((Instant::now() + time, Undo::ResumeApiServer));
            return Ok(Some(format!("the API server paused, for {}", seconds(time))));
        }
        blocking(|| self.cluster.stop_api_server())?;
        self.undo.push((Instant::now() + time, Undo::StartApiServer));
        Ok(Some(format!("the API server killed, for {}", seconds(time))))
    }

    /// What lies between coordinators and the API server.
    async fn disturb_the_way(&mut self, fault: Fault) -> Option<String> {
        if fault == Fault::ExpireWatches {
            self.gateway.expire();
            return Some("every watch expires".to_owned());
        }
        let time = self.time(1000..6000);
        // A leader that hears nothing, or is not heard, can't be held to anything.
        let disturb = |driver: &mut Self, for_how_long| {
            driver.led_from = driver.led_from.max(Instant::now() + for_how_long + RECOVERY);
        };
        match fault {
            Fault::Throttle => {
                disturb(self, time);
                self.gateway.throttle(time);
                Some(format!("the API server throttles, for {}", seconds(time)))
            }
            Fault::HoldWatches => {
                disturb(self, time);
                self.gateway.hold_back(time);
                Some(format!("watches bring nothing for {}", seconds(time)))
            }
            _ => {
                // A coordinator lists anew when it begins to lead, and asks for what is so at that moment: only one that
                // leads already may be told what was.
                if self.api_is_away || !self.undo.is_empty() || self.leader().await.is_none() {
                    return None;
                }
                disturb(self, time);
                let lists = self.gateway.remember().await;
                self.undo.push((Instant::now() + time, Undo::AnswerWith(lists)));
                Some(format!(
                    "every watch expires in {0}, and lists are of {0} before",
                    seconds(time)
                ))
            }
        }
    }

    fn disturb_agent(&mut self, fault: Fault) -> Option<String> {
        let agents: Vec<_> = self
            .fleet
            .machines
            .iter()
            .filter_map(|machine| Some((machine, machine.agent()?)))
            .collect();
        let (machine, agent) = self.draw.choice(agents)?;
        let what = match fault {
            Fault::KillAgent => {
                agent.kill();
                "is killed".to_owned()
            }
            Fault::CutAgent => {
                agent.cut();
                "loses its connections".to_owned()
            }
            Fault::HangAgent => {
                let time = self.time(2000..20_000);
                agent.freeze(time);
                format!("hangs for {}", seconds(time))
            }
            _ => {
                let factor = self.draw.u32(2..12);
                agent.slow_down(factor);
                format!("is {factor} times as slow")
            }
        };
        Some(format!("the agent of {} {what}", machine.name))
    }

    fn time(&mut self, milliseconds: Range<u64>) -> Duration {
        Duration::from_millis(self.draw.u64(milliseconds))
    }

    async fn change_prefetch(&mut self) -> Result<Option<String>> {
        if self.api_is_away {
            return Ok(None);
        }
        let name = PREFETCHES[self.draw.usize(..PREFETCHES.len())];
        let client = &self.fleet.client;
        if self.prefetches.contains_key(name) && self.draw.f64() < 0.3 {
            objects::delete_prefetch(client, name).await?;
            self.prefetches.remove(name);
            return Ok(Some(format!("Prefetch {name} deleted")));
        }
        let workload = WORKLOADS[self.draw.usize(..WORKLOADS.len())];
        let filters = ["", "worker-0000", "worker-0001", "worker-00012"];
        let filter = filters[self.draw.usize(..filters.len())];
        objects::make_prefetch(client, name, workload, filter, 5).await?;
        self.prefetches.insert(name, (workload, filter));
        Ok(Some(format!(
            "Prefetch {name} wants {workload} on nodes with {filter:?} in their name"
        )))
    }

    /// What happens to a node goes on beside everything else, and to one node one thing at a time.
    fn happen_to_a_node(&mut self, fault: Fault) -> Option<String> {
        let number = self.draw.usize(..self.fleet.machines.len());
        let machine = Arc::clone(&self.fleet.machines[number]);
        let name = machine.name.clone();
        if !locked(&self.busy).insert(name.clone()) {
            return None;
        }
        let time = self.time(1000..8000);
        let value = self
            .draw
            .choice([Some("true"), Some("true"), Some("false"), None])?;
        let said = match fault {
            Fault::Annotate => format!("{name} annotated {value:?}"),
            other => format!("{name} {}, {}", other.name(), seconds(time)),
        };
        let wanted = Arc::clone(&self.wanted);
        let busy = Arc::clone(&self.busy);
        let hand = Hand {
            nodes: Api::all(self.fleet.client.clone()),
            machine,
            number,
            control_plane: number < self.fleet.control_planes,
        };
        self.happening.spawn(async move {
            match fault {
                Fault::Annotate => {
                    hand.annotate(value).await;
                    locked(&wanted).insert(name.clone(), value);
                }
                Fault::Reboot => hand.reboot(time / 4).await,
                Fault::Reimage => {
                    hand.machine.reimage();
                    hand.report_boot().await;
                }
                Fault::Remake => {
                    locked(&wanted).remove(&name);
                    hand.remake(time / 2).await;
                }
                Fault::Cordon => hand.cordon(time).await,
                _ => hand.not_ready(time).await,
            }
            locked(&busy).remove(&name);
        });
        Some(said)
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
