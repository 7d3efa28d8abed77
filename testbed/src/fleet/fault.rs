//! The faults that chaos is made of, and how often each is drawn.

/// What can be done to a fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    KillCoordinator,
    PauseCoordinator,
    PauseApiServer,
    RestartApiServer,
    Throttle,
    ExpireWatches,
    HoldWatches,
    StaleLists,
    KillAgent,
    HangAgent,
    CutAgent,
    SlowAgent,
    Annotate,
    ChangePrefetch,
    Reboot,
    Reimage,
    Remake,
    Cordon,
    NotReady,
}

/// Each with its weight.
const FAULTS: [(Fault, u32); 19] = [
    (Fault::KillCoordinator, 3),
    (Fault::PauseCoordinator, 2),
    (Fault::PauseApiServer, 2),
    (Fault::RestartApiServer, 1),
    (Fault::Throttle, 2),
    (Fault::ExpireWatches, 3),
    (Fault::HoldWatches, 3),
    (Fault::StaleLists, 3),
    (Fault::KillAgent, 8),
    (Fault::HangAgent, 4),
    (Fault::CutAgent, 8),
    (Fault::SlowAgent, 5),
    (Fault::Annotate, 30),
    (Fault::ChangePrefetch, 8),
    (Fault::Reboot, 8),
    (Fault::Reimage, 4),
    (Fault::Remake, 5),
    (Fault::Cordon, 4),
    (Fault::NotReady, 6),
];

impl Fault {
    /// What it is called.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::KillCoordinator => "coordinator killed",
            Self::PauseCoordinator => "coordinator paused",
            Self::PauseApiServer => "API server paused",
            Self::RestartApiServer => "API server restarted",
            Self::Throttle => "requests throttled",
            Self::ExpireWatches => "watches expired",
            Self::HoldWatches => "watches held back",
            Self::StaleLists => "lists stale",
            Self::KillAgent => "agent killed",
            Self::HangAgent => "agent hung",
            Self::CutAgent => "connections cut",
            Self::SlowAgent => "agent slowed down",
            Self::Annotate => "annotated",
            Self::ChangePrefetch => "Prefetch changed",
            Self::Reboot => "rebooted",
            Self::Reimage => "re-imaged",
            Self::Remake => "deleted and made anew",
            Self::Cordon => "cordoned",
            Self::NotReady => "NotReady",
        }
    }
}

/// Draws the next fault.
pub(super) fn draw_fault(draw: &mut fastrand::Rng) -> Fault {
    let sum = FAULTS.iter().map(|(_, weight)| weight).sum();
    let mut at = draw.u32(0..sum);
    for (fault, weight) in FAULTS {
        if at < weight {
            return fault;
        }
        at -= weight;
    }
    Fault::Annotate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_drawn_sooner_or_later() {
        let mut draw = fastrand::Rng::with_seed(1);
        let drawn: Vec<Fault> = (0..2000).map(|_| draw_fault(&mut draw)).collect();
        for (fault, _) in FAULTS {
            assert!(drawn.contains(&fault), "{fault:?}");
        }
    }
}
