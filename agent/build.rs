//! Compiles the Wasm module that proves an installation.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/verify.wat");
    let module = wat::parse_file("src/verify.wat")?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("verify.wasm"), module)?;
    Ok(())
}
