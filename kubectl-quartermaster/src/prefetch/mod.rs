//! `prefetch`: images to nodes, as a Prefetch object, and their bytes as they come.

mod board;
mod follow;
mod object;

use std::process::ExitCode;

use kube::api::{DynamicObject, Patch, PatchParams};
use kube::{Api, ResourceExt as _};

use crate::cli;
use crate::cluster::Cluster;
use crate::events;
use crate::leader::Leader;
use crate::look::{Look, Tone, counted};
use crate::output;
use crate::provision::MANAGER;
use crate::trouble::Trouble;

/// `prefetch`
///
/// # Errors
/// When the object can't be written, or is refused.
pub(crate) async fn prefetch(
    cluster: &Cluster,
    leader: &Leader,
    asked: &cli::Prefetch,
) -> anyhow::Result<ExitCode> {
    let namespace = asked.into.as_deref().unwrap_or(&cluster.own_namespace);
    let object = object::object(asked, namespace).map_err(anyhow::Error::msg)?;
    if asked.dry_run {
        output::say(&serde_yaml_ng::to_string(&object)?);
        return Ok(ExitCode::SUCCESS);
    }
    // What happens from now on is heard before there is anything that could.
    let told = match asked.waiting.wait {
        true => Some(events::follow(leader, &[]).await),
        false => None,
    };
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.api.clone(), namespace, &object::resource());
    let name = object.name_any();
    let what = format!("{namespace}/{name}");
    let applied = api
        .patch(&name, &PatchParams::apply(MANAGER), &Patch::Apply(&object))
        .await
        .map_err(|error| match error {
            kube::Error::Api(status) if status.code == 409 => Trouble::Refused(format!(
                "there is a Prefetch {what} that somebody else has made; choose another name with --name ({})",
                status.message
            )),
            other => Trouble::of(&format!("write the Prefetch {what}"), &other),
        })?;
    let Some(told) = told else {
        let look = Look::of_stdout();
        output::say(&format!(
            "Prefetch {} wants {} {}\n",
            look.strong(&what),
            counted(asked.images.len(), "image"),
            look.paint(Tone::Dim, "(kubectl quartermaster status shows how far it is)")
        ));
        return Ok(ExitCode::SUCCESS);
    };
    follow::follow(cluster, &applied, told, asked.waiting.timeout).await
}
