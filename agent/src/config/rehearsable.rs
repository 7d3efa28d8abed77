//! A configuration as it can be booted in a sandbox without a network.

use toml_edit::{Document, Item};

use super::facts::Family;

const KEY: &str = "stream_server_address";
const LOOPBACK: &str = "\"127.0.0.1\"";

/// The file with CRI's streaming server on loopback.
///
/// With an empty address containerd looks for the interface of the default route and, finding none, does not start
/// CRI; with an address of the node it cannot bind. Neither says anything about the change, so in a rehearsal both
/// sides get the same address. All else stays; so does a file that is no TOML, for containerd itself to judge.
pub fn rehearsable(bytes: &[u8]) -> Vec<u8> {
    changed(bytes).unwrap_or_else(|| bytes.to_vec())
}

fn changed(bytes: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(bytes).ok()?;
    let document = Document::parse(text).ok()?;
    let plugins = document.as_table().get("plugins")?;
    // Version 3 keeps the server under the id of version 2.
    let mut spans: Vec<_> = [Family::V1, Family::V2]
        .iter()
        .filter_map(|family| plugins.get(family.id())?.get(KEY))
        .filter(|address| !matches!(address.as_str(), Some("127.0.0.1" | "::1" | "localhost")))
        .filter_map(Item::span)
        .collect();
    spans.sort_by_key(|span| span.start);
    let mut out = text.to_owned();
    for span in spans.into_iter().rev() {
        out.replace_range(span, LOOPBACK);
    }
    Some(out.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(before: &str, after: &str) {
        assert_eq!(rehearsable(before.as_bytes()), after.as_bytes());
    }

    #[test]
    fn the_streaming_server_goes_to_loopback_and_all_else_stays() {
        check(
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  stream_server_address = \"\" # any\n  x = 1\n",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  stream_server_address = \"127.0.0.1\" # any\n  x = 1\n",
        );
        check(
            "[plugins]\n[plugins.cri]\nstream_server_address = '10.0.0.5'",
            "[plugins]\n[plugins.cri]\nstream_server_address = \"127.0.0.1\"",
        );
    }

    #[test]
    fn a_file_that_needs_nothing_stays_as_it_is() {
        for text in [
            "",
            "version = 3\n",
            "not toml [",
            "[plugins.cri]\nstream_server_address = '127.0.0.1'\n",
        ] {
            check(text, text);
        }
    }
}
