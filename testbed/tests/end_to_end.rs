//! The product on a real cluster: kubelets, containerds of four generations, an API server, a registry, and
//! the two images as their Dockerfiles make them.
//!
//! One cluster carries all scenarios, one after another; each leaves it as it found it. `TESTBED_KEEP=1`
//! leaves the cluster up at the end, for a look.

use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use testbed::deployment;
use testbed::{Cluster, Progress, Spec};

#[path = "end_to_end/by_hand.rs"]
mod by_hand;
#[path = "end_to_end/chart.rs"]
mod chart;
#[path = "end_to_end/configurations.rs"]
mod configurations;
#[path = "end_to_end/crash.rs"]
mod crash;
#[path = "end_to_end/documents.rs"]
mod documents;
#[path = "end_to_end/hand.rs"]
mod hand;
#[path = "end_to_end/identity.rs"]
mod identity;
#[path = "end_to_end/images.rs"]
mod images;
#[path = "end_to_end/kwasm.rs"]
mod kwasm;
#[path = "end_to_end/leadership.rs"]
mod leadership;
#[path = "end_to_end/operator.rs"]
mod operator;
#[path = "end_to_end/others.rs"]
mod others;
#[path = "end_to_end/payload.rs"]
mod payload;
#[path = "end_to_end/plugin.rs"]
mod plugin;
#[path = "end_to_end/prefetch.rs"]
mod prefetch;
#[path = "end_to_end/prefetch_bounds.rs"]
mod prefetch_bounds;
#[path = "end_to_end/prefetch_nodes.rs"]
mod prefetch_nodes;
#[path = "end_to_end/prefetch_object.rs"]
mod prefetch_object;
#[path = "end_to_end/prefetch_run.rs"]
mod prefetch_run;
#[path = "end_to_end/provision.rs"]
mod provision;
#[path = "end_to_end/pull.rs"]
mod pull;
#[path = "end_to_end/pull_credentials.rs"]
mod pull_credentials;
#[path = "end_to_end/pull_faults.rs"]
mod pull_faults;
#[path = "end_to_end/stage.rs"]
mod stage;

use stage::Stage;

const NODES: &str = "worker-16=1.6,worker-17=1.7,worker-21=2.1,worker-24=2.4";

type Scenario = fn(&Stage) -> anyhow::Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "a_quiet_cluster_gets_no_agent_and_no_write",
        provision::a_quiet_cluster_gets_no_agent_and_no_write,
    ),
    (
        "every_containerd_is_provisioned_runs_wasm_and_is_put_back_byte_for_byte",
        provision::every_containerd_is_provisioned_runs_wasm_and_is_put_back_byte_for_byte,
    ),
    (
        "pods_that_use_the_handler_block_its_removal_until_they_are_gone",
        provision::pods_that_use_the_handler_block_its_removal_until_they_are_gone,
    ),
    (
        "a_containerd_that_does_not_come_back_gets_its_old_configuration_again",
        provision::a_containerd_that_does_not_come_back_gets_its_old_configuration_again,
    ),
    (
        "a_handler_of_somebody_else_is_refused_and_left_alone",
        provision::a_handler_of_somebody_else_is_refused_and_left_alone,
    ),
    (
        "every_configuration_is_right_or_refused_on_every_containerd",
        configurations::every_configuration_is_right_or_refused_on_every_containerd,
    ),
    (
        "a_node_of_kwasm_is_adopted_without_a_restart_and_put_back",
        kwasm::a_node_of_kwasm_is_adopted_without_a_restart_and_put_back,
    ),
    (
        "a_handler_of_kwasm_that_does_not_work_is_replaced",
        kwasm::a_handler_of_kwasm_that_does_not_work_is_replaced,
    ),
    (
        "nothing_is_provisioned_beside_another_operator_and_what_it_left_is_named",
        others::nothing_is_provisioned_beside_another_operator_and_what_it_left_is_named,
    ),
    (
        "a_rebooted_node_is_verified_again",
        provision::a_rebooted_node_is_verified_again,
    ),
    (
        "images_of_a_deployment_that_cant_be_placed_are_on_every_node",
        prefetch::images_of_a_deployment_that_cant_be_placed_are_on_every_node,
    ),
    (
        "an_image_that_does_not_exist_is_named_and_comes_once_it_does",
        prefetch::an_image_that_does_not_exist_is_named_and_comes_once_it_does,
    ),
    (
        "bad_prefetches_are_refused_by_the_api_server",
        prefetch::bad_prefetches_are_refused_by_the_api_server,
    ),
    (
        "a_restarted_coordinator_wakes_no_agent",
        prefetch::a_restarted_coordinator_wakes_no_agent,
    ),
    (
        "exit_codes_tell_a_person_what_came_of_it",
        by_hand::exit_codes_tell_a_person_what_came_of_it,
    ),
    (
        "a_unit_whose_restart_would_end_pods_is_refused",
        by_hand::a_unit_whose_restart_would_end_pods_is_refused,
    ),
    (
        "units_that_restart_along_are_named_in_the_plan",
        by_hand::units_that_restart_along_are_named_in_the_plan,
    ),
    (
        "a_restart_that_would_end_pods_is_refused_before_anything_is_touched",
        by_hand::a_restart_that_would_end_pods_is_refused_before_anything_is_touched,
    ),
    (
        "a_file_that_cannot_be_replaced_is_left_alone_and_containerd_too",
        by_hand::a_file_that_cannot_be_replaced_is_left_alone_and_containerd_too,
    ),
    (
        "a_configuration_that_changes_before_its_swap_is_planned_again",
        by_hand::a_configuration_that_changes_before_its_swap_is_planned_again,
    ),
    (
        "a_node_without_a_network_is_installed_and_proven_by_hand",
        by_hand::a_node_without_a_network_is_installed_and_proven_by_hand,
    ),
    (
        "the_payload_runs_a_module_on_a_root_without_a_libc",
        payload::the_payload_runs_a_module_on_a_root_without_a_libc,
    ),
    (
        "a_cut_or_altered_copy_is_never_used",
        payload::a_cut_or_altered_copy_is_never_used,
    ),
    (
        "an_installation_below_another_prefix_works_is_found_again_and_goes_whole",
        payload::an_installation_below_another_prefix_works_is_found_again_and_goes_whole,
    ),
    (
        "an_upgrade_leaves_pods_running_and_containerd_alone",
        payload::an_upgrade_leaves_pods_running_and_containerd_alone,
    ),
    (
        "owner_mode_attributes_and_links_of_the_configuration_stay",
        by_hand::owner_mode_attributes_and_links_of_the_configuration_stay,
    ),
    (
        "the_copy_on_a_node_puts_it_back_when_the_cluster_has_forgotten_us",
        payload::the_copy_on_a_node_puts_it_back_when_the_cluster_has_forgotten_us,
    ),
    (
        "a_node_survives_the_death_of_the_agent_between_any_two_steps",
        crash::a_node_survives_the_death_of_the_agent_between_any_two_steps,
    ),
    (
        "a_node_survives_the_death_of_the_host_unit_between_any_two_steps",
        crash::a_node_survives_the_death_of_the_host_unit_between_any_two_steps,
    ),
    (
        "images_of_workloads_are_on_the_nodes_that_are_selected",
        prefetch_object::images_of_workloads_are_on_the_nodes_that_are_selected,
    ),
    (
        "an_image_stays_pinned_until_the_last_prefetch_lets_go_of_it",
        prefetch_object::an_image_stays_pinned_until_the_last_prefetch_lets_go_of_it,
    ),
    (
        "a_tag_that_moved_is_told_and_pulled_again_when_asked_for",
        prefetch_object::a_tag_that_moved_is_told_and_pulled_again_when_asked_for,
    ),
    (
        "a_suspended_prefetch_pulls_nothing_until_it_goes_on",
        prefetch_object::a_suspended_prefetch_pulls_nothing_until_it_goes_on,
    ),
    (
        "durations_and_numbers_that_make_no_sense_are_refused_in_words",
        prefetch_object::durations_and_numbers_that_make_no_sense_are_refused_in_words,
    ),
    (
        "only_the_token_of_a_living_agents_pod_gets_a_certificate_and_only_for_its_node",
        identity::only_the_token_of_a_living_agents_pod_gets_a_certificate_and_only_for_its_node,
    ),
    (
        "an_agent_obeys_no_other_agent_no_stranger_and_no_old_leader",
        identity::an_agent_obeys_no_other_agent_no_stranger_and_no_old_leader,
    ),
    (
        "an_authority_is_followed_by_another_while_nodes_are_worked_on",
        identity::an_authority_is_followed_by_another_while_nodes_are_worked_on,
    ),
    (
        "a_leader_that_ends_is_followed_at_once_and_one_that_is_cut_off_soon",
        leadership::a_leader_that_ends_is_followed_at_once_and_one_that_is_cut_off_soon,
    ),
    (
        "a_leader_that_is_paused_past_its_lease_does_nothing_afterwards",
        leadership::a_leader_that_is_paused_past_its_lease_does_nothing_afterwards,
    ),
    (
        "an_api_server_that_goes_away_in_the_middle_is_waited_for",
        leadership::an_api_server_that_goes_away_in_the_middle_is_waited_for,
    ),
    (
        "the_leader_is_asked_paused_and_resumed",
        operator::the_leader_is_asked_paused_and_resumed,
    ),
    (
        "everything_is_removed_whatever_annotations_say",
        operator::everything_is_removed_whatever_annotations_say,
    ),
    (
        "the_plugin_shows_plans_provisions_and_puts_back",
        plugin::the_plugin_shows_plans_provisions_and_puts_back,
    ),
    (
        "the_plugin_says_what_is_in_the_way",
        plugin::the_plugin_says_what_is_in_the_way,
    ),
    (
        "the_plugin_brings_images_and_says_which_are_missing",
        plugin::the_plugin_brings_images_and_says_which_are_missing,
    ),
    (
        "the_plugin_takes_over_from_the_operators_before",
        plugin::the_plugin_takes_over_from_the_operators_before,
    ),
    (
        "the_plugin_removes_everything",
        plugin::the_plugin_removes_everything,
    ),
    (
        "auto_provision_takes_every_node_but_one_at_a_time",
        provision::auto_provision_takes_every_node_but_one_at_a_time,
    ),
    (
        "the_chart_says_what_the_kustomize_base_says",
        chart::the_chart_says_what_the_kustomize_base_says,
    ),
    (
        "the_chart_installs_upgrades_and_puts_every_node_back_before_it_goes",
        chart::the_chart_installs_upgrades_and_puts_every_node_back_before_it_goes,
    ),
    (
        "images_say_what_they_are_and_what_they_consist_of",
        images::images_say_what_they_are_and_what_they_consist_of,
    ),
    (
        "commands_of_the_documents_work_as_they_stand_there",
        documents::commands_of_the_documents_work_as_they_stand_there,
    ),
    (
        "a_mirror_that_the_node_has_set_is_used",
        pull::a_mirror_that_the_node_has_set_is_used,
    ),
    (
        "secrets_are_tried_in_turn_and_written_nowhere",
        pull_credentials::secrets_are_tried_in_turn_and_written_nowhere,
    ),
    (
        "the_kubelets_credential_providers_are_asked_on_the_host",
        pull_credentials::the_kubelets_credential_providers_are_asked_on_the_host,
    ),
    (
        "what_the_clusters_operator_does_not_allow_is_told_with_its_reason",
        prefetch_bounds::what_the_clusters_operator_does_not_allow_is_told_with_its_reason,
    ),
    (
        "secrets_of_a_prefetch_are_read_where_they_may_be_and_anew_when_they_change",
        prefetch_bounds::secrets_of_a_prefetch_are_read_where_they_may_be_and_anew_when_they_change,
    ),
    (
        "a_new_node_is_kept_out_of_service_until_its_gated_images_are_there",
        prefetch_nodes::a_new_node_is_kept_out_of_service_until_its_gated_images_are_there,
    ),
    (
        "images_come_in_the_order_asked_for_and_unused_ones_are_removed",
        prefetch_run::images_come_in_the_order_asked_for_and_unused_ones_are_removed,
    ),
    (
        "a_registry_that_asks_one_node_for_patience_is_spared_by_all",
        prefetch_run::a_registry_that_asks_one_node_for_patience_is_spared_by_all,
    ),
    (
        "a_prefetch_that_is_changed_or_deleted_stops_what_it_was_pulling",
        prefetch_run::a_prefetch_that_is_changed_or_deleted_stops_what_it_was_pulling,
    ),
    (
        "objects_of_the_prefetch_operator_go_on_working_under_the_new_definition",
        prefetch_run::objects_of_the_prefetch_operator_go_on_working_under_the_new_definition,
    ),
    (
        "pins_are_held_for_each_owner_and_let_go_with_the_last",
        pull::pins_are_held_for_each_owner_and_let_go_with_the_last,
    ),
    (
        "every_kind_of_name_is_pulled_and_starts_without_a_second_pull",
        pull::every_kind_of_name_is_pulled_and_starts_without_a_second_pull,
    ),
    (
        "a_registry_that_stalls_or_asks_for_patience_is_told",
        pull_faults::a_registry_that_stalls_or_asks_for_patience_is_told,
    ),
    (
        "a_cancelled_pull_stops_in_containerd_and_a_kubelet_beside_it_goes_on",
        pull_faults::a_cancelled_pull_stops_in_containerd_and_a_kubelet_beside_it_goes_on,
    ),
    (
        "a_layer_that_images_share_is_fetched_once",
        pull::a_layer_that_images_share_is_fetched_once,
    ),
    (
        "what_does_not_fit_is_not_pulled",
        pull_faults::what_does_not_fit_is_not_pulled,
    ),
];

/// What is run by `make soak` (`TESTBED_SOAK=1`) besides.
const SOAK: &[(&str, Scenario)] = &[
    (
        "a_node_survives_the_death_of_containerd_between_any_two_steps",
        crash::a_node_survives_the_death_of_containerd_between_any_two_steps,
    ),
    (
        "a_node_survives_a_disk_that_is_full_at_any_write",
        crash::a_node_survives_a_disk_that_is_full_at_any_write,
    ),
    (
        "a_node_survives_a_power_cut_between_any_two_steps_of_the_host_unit",
        crash::a_node_survives_a_power_cut_between_any_two_steps_of_the_host_unit,
    ),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // All scenarios share one cluster.
    arguments.test_threads = Some(1);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    let stage = match set() {
        Ok(stage) => Arc::new(stage),
        Err(error) => {
            eprintln!("the cluster for the end-to-end tests can't be set up: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let conclusion = libtest_mimic::run(&arguments, trials(Some(stage)));
    if std::env::var_os("TESTBED_KEEP").is_none()
        && let Err(error) = Cluster::down(&name())
    {
        eprintln!("the cluster can't be taken down: {error:#}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

fn trials(stage: Option<Arc<Stage>>) -> Vec<Trial> {
    let soak = std::env::var_os("TESTBED_SOAK").is_some();
    SCENARIOS
        .iter()
        .chain(if soak { SOAK } else { &[] })
        .map(|(name, scenario)| {
            let stage = stage.clone();
            Trial::test(*name, move || {
                let stage = stage.ok_or_else(|| Failed::from("no cluster"))?;
                stage
                    .run(*scenario)
                    .map_err(|error| Failed::from(format!("{error:#}")))
            })
        })
        .collect()
}

/// Of the cluster: another one for whoever runs the tests twice at a time on one machine.
fn name() -> String {
    std::env::var("TESTBED_NAME").unwrap_or_else(|_| "e2e".to_owned())
}

/// A fresh cluster with Quartermaster in it.
fn set() -> anyhow::Result<Stage> {
    let spec = Spec::parse(&name(), NODES)?;
    let keep = std::env::var_os("TESTBED_KEEP").is_some();
    let (cluster, product) = deployment::set(&spec, keep, &Progress::terminal())?;
    let stage = Stage { cluster, product };
    deployment::deploy(&stage.cluster, &stage.product, &Stage::options())?;
    Ok(stage)
}
