//! The pause image, until the images module brings all.
use crate::tool::Tool;
use anyhow::Result;
use std::path::{Path, PathBuf};
/// An image.
pub struct BuiltImage {
    /// name:tag
    pub name: String,
    /// archive
    pub archive: PathBuf,
}
/// The base set.
pub fn base_set(cache: &Path) -> Result<Vec<BuiltImage>> {
    let archive = cache.join("seed-pause.tar");
    if !archive.exists() {
        Tool::new("sh").args(["-ec", r#"
t=$(mktemp -d); cd $t; printf '#include <unistd.h>\nint main(){for(;;)pause();}' > p.c; gcc -static -Os -o pause p.c
s="buildah --storage-driver vfs --root $t/r --runroot $t/rr"
c=$($s from scratch); $s copy $c pause /pause; $s config --entrypoint '["/pause"]' $c; $s commit $c oci-archive:$1; rm -rf $t"#, "sh"]).arg(&archive).output()?;
    }
    Ok(vec![BuiltImage {
        name: "pause:3.10".into(),
        archive,
    }])
}
