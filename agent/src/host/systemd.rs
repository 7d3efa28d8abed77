//! The host's systemd, over its system bus.
//!
//! systemd trusts uid 0 on its bus, so no capability is needed. Every call has a deadline, since a bus that does
//! not answer must not hang a node's provisioning.

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt;
use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use zbus::wire::{OwnedObjectPath, OwnedVariant, Variant};
use zbus::{Connection, MatchRule, MessageStream, message};

use super::HostRoot;
use crate::checkpoint::checkpoint;

const SERVICE: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
const BUS_SOCKET: &str = "/run/dbus/system_bus_socket";
const CALL: Duration = Duration::from_secs(10);

/// Why systemd could not be asked or did not do what it was asked.
#[derive(Debug, Error)]
pub enum SystemdError {
    /// No bus.
    #[error("the host's D-Bus socket {BUS_SOCKET} cannot be reached: {0}")]
    NoBus(String),
    /// A call that failed.
    #[error("systemd refused {call}: {why}")]
    Call {
        /// What was asked.
        call: String,
        /// D-Bus's own words.
        why: String,
    },
    /// A unit that is already there.
    #[error("the unit {0} exists already")]
    UnitExists(String),
    /// No such unit.
    #[error("the unit {0} is not loaded")]
    NoSuchUnit(String),
    /// An answer or a job that did not come in time.
    #[error("systemd did not finish {0} in time")]
    Deadline(String),
}

/// How a job of systemd ended: `done`, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobResult(pub String);

impl JobResult {
    /// Whether the job did what it was for.
    pub fn is_done(&self) -> bool {
        self.0 == "done"
    }
}

/// A property of a transient unit.
pub type Property = (&'static str, Variant<'static>);

/// What is known of a service's unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceFacts {
    /// `ActiveState`
    pub active: String,
    /// `MainPID`, 0 when it is not running.
    pub main_pid: u32,
    /// Arguments of `ExecStart`, the first of which is the program.
    pub exec: Vec<String>,
    /// Path of the program in `ExecStart`.
    pub binary: String,
    /// `KillMode`
    pub kill_mode: String,
    /// `FragmentPath`
    pub fragment: String,
    /// Units that a restart takes along: `RequiredBy`, `BoundBy`, `ConsistsOf`.
    pub restarts_along: Vec<String>,
}

/// A connection to the host's systemd.
#[derive(Debug, Clone)]
pub struct Systemd {
    bus: Connection,
}

impl Systemd {
    /// Connects over the bus of the host below `root`.
    ///
    /// # Errors
    /// [`SystemdError::NoBus`].
    pub async fn connect(root: &HostRoot) -> Result<Self, SystemdError> {
        let no_bus = |error: &dyn std::fmt::Display| SystemdError::NoBus(error.to_string());
        let socket = root.hold(BUS_SOCKET).map_err(|error| no_bus(&error))?;
        let connect = async {
            let stream = tokio::net::UnixStream::connect(socket.path())
                .await
                .map_err(|error| no_bus(&error))?;
            let stream = stream.into_std().map_err(|error| no_bus(&error))?;
            zbus::connection::Builder::unix_stream(stream)
                .method_timeout(CALL)
                .build()
                .await
                .map_err(|error| no_bus(&error))
        };
        let bus = tokio::time::timeout(CALL, connect)
            .await
            .map_err(|_| SystemdError::NoBus("no answer".into()))??;
        Ok(Self { bus })
    }

    async fn manager<B>(&self, method: &'static str, body: &B) -> Result<zbus::Message, SystemdError>
    where
        B: serde::Serialize + zbus::wire::DynamicType,
    {
        self.bus
            .call_method(Some(SERVICE), MANAGER_PATH, Some(MANAGER), method, body)
            .await
            .map_err(|error| refused(method, &error))
    }

    /// Those of `names` that are active or becoming so.
    ///
    /// # Errors
    /// When systemd does not answer.
    pub async fn active_among(&self, names: &[&str]) -> Result<Vec<String>, SystemdError> {
        type Unit = (
            String,
            String,
            String,
            String,
            String,
            String,
            OwnedObjectPath,
            u32,
            String,
            OwnedObjectPath,
        );
        let reply = self.manager("ListUnitsByNames", &(names,)).await?;
        let units: Vec<Unit> = body("ListUnitsByNames", &reply)?;
        Ok(units
            .into_iter()
            .filter(|unit| matches!(unit.3.as_str(), "active" | "activating" | "reloading"))
            .map(|unit| unit.0)
            .collect())
    }

    /// Reads what is known of a service.
    ///
    /// # Errors
    /// [`SystemdError::NoSuchUnit`] when it is not loaded, or when systemd does not answer.
    pub async fn service(&self, name: &str) -> Result<ServiceFacts, SystemdError> {
        let reply = self.manager("GetUnit", &(name,)).await?;
        let path: OwnedObjectPath = body("GetUnit", &reply)?;
        let unit = self.properties(&path, "org.freedesktop.systemd1.Unit").await?;
        let service = self.properties(&path, "org.freedesktop.systemd1.Service").await?;
        type Exec = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);
        let (binary, exec) = take::<Vec<Exec>>(&service, "ExecStart")
            .and_then(|list| list.into_iter().next())
            .map(|exec| (exec.0, exec.1))
            .unwrap_or_default();
        let mut restarts_along: Vec<String> = ["RequiredBy", "BoundBy", "ConsistsOf"]
            .iter()
            .flat_map(|key| take::<Vec<String>>(&unit, key).unwrap_or_default())
            .collect();
        restarts_along.sort();
        restarts_along.dedup();
        Ok(ServiceFacts {
            active: take(&unit, "ActiveState").unwrap_or_default(),
            main_pid: take(&service, "MainPID").unwrap_or_default(),
            exec,
            binary,
            kill_mode: take(&service, "KillMode").unwrap_or_default(),
            fragment: take(&unit, "FragmentPath").unwrap_or_default(),
            restarts_along,
        })
    }

    /// The environment that a service's unit sets, as `NAME=value`.
    ///
    /// # Errors
    /// [`SystemdError::NoSuchUnit`] when it is not loaded, or when systemd does not answer.
    pub async fn environment(&self, name: &str) -> Result<Vec<String>, SystemdError> {
        let reply = self.manager("GetUnit", &(name,)).await?;
        let path: OwnedObjectPath = body("GetUnit", &reply)?;
        let service = self.properties(&path, "org.freedesktop.systemd1.Service").await?;
        Ok(take(&service, "Environment").unwrap_or_default())
    }

    /// Whether a unit is loaded and active or becoming so.
    ///
    /// # Errors
    /// When systemd does not answer.
    pub async fn is_active(&self, name: &str) -> Result<bool, SystemdError> {
        Ok(!self.active_among(&[name]).await?.is_empty())
    }

    async fn properties(
        &self,
        path: &OwnedObjectPath,
        interface: &str,
    ) -> Result<HashMap<String, OwnedVariant>, SystemdError> {
        let reply = self
            .bus
            .call_method(
                Some(SERVICE),
                path.as_ref(),
                Some(PROPERTIES),
                "GetAll",
                &(interface,),
            )
            .await
            .map_err(|error| refused("GetAll", &error))?;
        body("GetAll", &reply)
    }

    /// Starts a transient service and waits until its start job is done.
    ///
    /// # Errors
    /// [`SystemdError::UnitExists`] when one of that name is there, or when systemd refuses or is late.
    pub async fn start_transient(
        &self,
        name: &str,
        properties: &[Property],
        within: Duration,
    ) -> Result<JobResult, SystemdError> {
        let properties: Vec<(&str, &Variant<'static>)> =
            properties.iter().map(|(key, value)| (*key, value)).collect();
        let nothing: Vec<(String, Vec<(String, Variant<'static>)>)> = Vec::new();
        self.job(
            "StartTransientUnit",
            &(name, "fail", properties, nothing),
            name,
            within,
        )
        .await
    }

    /// Restarts a unit and waits until the job is done.
    ///
    /// # Errors
    /// When systemd refuses or is late.
    pub async fn restart(&self, name: &str, within: Duration) -> Result<JobResult, SystemdError> {
        self.job("RestartUnit", &(name, "replace"), name, within).await
    }

    /// Stops a unit and waits until the job is done; a unit that is gone already is stopped.
    ///
    /// # Errors
    /// When systemd refuses or is late.
    pub async fn stop(&self, name: &str, within: Duration) -> Result<(), SystemdError> {
        match self.job("StopUnit", &(name, "replace"), name, within).await {
            Ok(_) | Err(SystemdError::NoSuchUnit(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether systemd knows a unit of this name, running or not.
    ///
    /// # Errors
    /// When systemd does not answer.
    pub async fn is_loaded(&self, name: &str) -> Result<bool, SystemdError> {
        match self.manager("GetUnit", &(name,)).await {
            Ok(_) => Ok(true),
            Err(SystemdError::NoSuchUnit(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Has systemd read its unit files again.
    ///
    /// # Errors
    /// When systemd refuses or does not answer.
    pub async fn reload(&self) -> Result<(), SystemdError> {
        checkpoint("reload systemd");
        self.manager("Reload", &()).await.map(drop)
    }

    /// Forgets failures of a unit, which also resets its start limit. A unit that has none is fine.
    pub async fn reset_failed(&self, name: &str) {
        let _ = self.manager("ResetFailedUnit", &(name,)).await;
    }

    async fn job<B>(
        &self,
        method: &'static str,
        arguments: &B,
        unit: &str,
        within: Duration,
    ) -> Result<JobResult, SystemdError>
    where
        B: serde::Serialize + zbus::wire::DynamicType,
    {
        let deadline = Instant::now() + within;
        let late = || SystemdError::Deadline(format!("{method} of {unit}"));
        let rule = MatchRule::builder()
            .msg_type(message::Type::Signal)
            .sender(SERVICE)
            .interface(MANAGER)
            .member("JobRemoved")
            .build()
            .map_err(|error| refused(method, &error))?;
        // The match stands before the call: a quick job is gone before its reply is read.
        let mut signals = MessageStream::for_match_rule(rule, &self.bus, None)
            .await
            .map_err(|error| refused(method, &error))?;
        // systemd sends signals only to who subscribed; to subscribe twice is an error that means nothing.
        let _ = self.manager("Subscribe", &()).await;
        checkpoint(format_args!("{method} {unit}"));
        let reply = self.manager(method, arguments).await?;
        let job: OwnedObjectPath = body(method, &reply)?;
        loop {
            let signal = timeout_at(deadline, signals.next())
                .await
                .map_err(|_| late())?
                .ok_or_else(|| SystemdError::NoBus("the bus closed".into()))?
                .map_err(|error| refused(method, &error))?;
            let Ok((_, path, _, result)) = signal
                .body()
                .deserialize::<(u32, OwnedObjectPath, String, String)>()
            else {
                continue;
            };
            if path == job {
                return Ok(JobResult(result));
            }
        }
    }
}

fn body<T>(call: &str, reply: &zbus::Message) -> Result<T, SystemdError>
where
    T: for<'d> zbus::wire::DynamicDeserialize<'d>,
{
    reply.body().deserialize().map_err(|error| refused(call, &error))
}

fn take<T>(properties: &HashMap<String, OwnedVariant>, key: &str) -> Option<T>
where
    T: TryFrom<OwnedVariant>,
{
    T::try_from(properties.get(key)?.try_clone().ok()?).ok()
}

fn refused(call: &str, error: &zbus::Error) -> SystemdError {
    if let zbus::Error::MethodError(name, detail, _) = error {
        let detail = detail.clone().unwrap_or_default();
        return match name.as_str() {
            "org.freedesktop.systemd1.UnitExists" => SystemdError::UnitExists(detail),
            "org.freedesktop.systemd1.NoSuchUnit" => SystemdError::NoSuchUnit(detail),
            _ => SystemdError::Call {
                call: call.to_owned(),
                why: detail,
            },
        };
    }
    SystemdError::Call {
        call: call.to_owned(),
        why: error.to_string(),
    }
}
