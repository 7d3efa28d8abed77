//! What is written down of a testbed, so that another run of this program can use it and take it down.

use std::fs;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::address::AddressPlan;
use crate::layout::State;
use crate::parts::Parts;
use crate::spec::{NodeSpec, Spec};
use crate::teardown::names;

/// A testbed on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    nodes: Vec<NodeRecord>,
    index: u8,
    parts: Parts,
    /// Set when `up` has come to its end.
    complete: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct NodeRecord {
    name: String,
    containerd: String,
}

impl Record {
    /// Claims the name, and an address range that no other testbed of this machine has. The caller holds the lock of the
    /// state folder.
    ///
    /// # Errors
    /// If a testbed of this name is up or left behind, or no range is free.
    pub fn claim(spec: &Spec, parts: &Parts) -> Result<Self> {
        let state = State::of(&spec.name);
        if state.root().exists() {
            bail!(
                "a testbed {name} is up already, or was left half-made. Use it, or end it with: testbed down --name {name} \
                 (or give --recreate)",
                name = spec.name
            );
        }
        let taken: Vec<u8> = names()?
            .iter()
            .filter_map(|name| Self::read(&State::of(name)).ok())
            .map(|record| record.index)
            .collect();
        let Some(index) = (0..=u8::MAX).find(|index| !taken.contains(index)) else {
            bail!("256 testbeds stand here already: no address range is free");
        };
        let record = Self {
            nodes: spec
                .nodes
                .iter()
                .map(|node| NodeRecord {
                    name: node.name.clone(),
                    containerd: node.containerd.clone(),
                })
                .collect(),
            index,
            parts: parts.clone(),
            complete: false,
        };
        fs::create_dir_all(state.root()).with_context(|| format!("can't make {}", state.root().display()))?;
        record.write(&state)?;
        Ok(record)
    }

    /// Reads the record of a testbed.
    ///
    /// # Errors
    /// If there is none.
    pub fn read(state: &State) -> Result<Self> {
        let path = state.record();
        let bytes = fs::read(&path).with_context(|| format!("can't read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| {
            format!(
                "can't understand {}: another version of this program made it; take the testbed down and up again",
                path.display()
            )
        })
    }

    /// Writes down that `up` has come to its end.
    ///
    /// # Errors
    /// If the record can't be written.
    pub fn mark_complete(&mut self, state: &State) -> Result<()> {
        self.complete = true;
        self.write(state)
    }

    /// Whether `up` came to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// What the testbed was asked to be.
    #[must_use]
    pub fn spec(&self, name: &str) -> Spec {
        Spec {
            name: name.to_owned(),
            nodes: self
                .nodes
                .iter()
                .map(|node| NodeSpec {
                    name: node.name.clone(),
                    containerd: node.containerd.clone(),
                })
                .collect(),
        }
    }

    /// Its addresses.
    #[must_use]
    pub fn plan(&self) -> AddressPlan {
        AddressPlan::new(self.index)
    }

    /// The parts it is made of.
    #[must_use]
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    fn write(&self, state: &State) -> Result<()> {
        let path = state.record();
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec_pretty(self)?)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("can't write {}", path.display()))
    }
}
