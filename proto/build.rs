//! Generates the types and services of `quartermaster.v1`; nothing generated is committed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "proto/quartermaster/v1/agent.proto",
        "proto/quartermaster/v1/enrollment.proto",
        "proto/quartermaster/v1/operator.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        // Its own Debug, in `credentials`, shows no secret.
        .skip_debug([".quartermaster.v1.Credential"])
        .compile_fds(descriptors)?;
    Ok(())
}
