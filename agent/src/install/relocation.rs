//! A program of the payload, made to find its loader and its libraries below another folder than it was built for.
//!
//! Both stand in the ELF file as absolute paths, as crun runs itself again from a copy in memory, where `$ORIGIN`
//! means nothing. The image's build leaves room behind them, filled with NUL, so the paths are written over in place
//! and nothing else moves. The same done the other way round gives the file as it was built, to the last byte: that
//! is how a relocated copy is held against the digest of its origin.

use std::ops::Range;

use object::Endianness;
use object::elf::{DT_RPATH, DT_RUNPATH, DT_STRSZ, DT_STRTAB, FileHeader64, PT_INTERP, PT_LOAD};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use thiserror::Error;

/// Why a program cannot be used from another folder.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum RelocationError {
    /// A file that cannot be understood.
    #[error("it is no ELF file that can be read: {0}")]
    Unreadable(String),
    /// A path that is not the one it was built for.
    #[error("its {0} is {1:?}, which is not below {2}")]
    Foreign(&'static str, String, String),
    /// No such path.
    #[error("it names no {0}")]
    Lacks(&'static str),
    /// A path that does not fit.
    #[error("its {name} has room for {room} bytes, and {wanted:?} is longer")]
    NoRoom {
        /// Which path.
        name: &'static str,
        /// Bytes.
        room: usize,
        /// The path.
        wanted: String,
    },
}

const INTERPRETER: &str = "interpreter";
const LIBRARIES: &str = "library path";

/// Lets the program in `bytes`, whose paths lie below `from`, find them below `to`.
pub(crate) fn relocate(bytes: &mut [u8], from: &str, to: &str) -> Result<(), RelocationError> {
    let rooms = rooms(bytes)?;
    let mut written = Vec::new();
    for (name, room) in rooms {
        let now = text(&bytes[room.clone()]);
        let Some(rest) = now.strip_prefix(from).filter(|rest| rest.starts_with('/')) else {
            return Err(RelocationError::Foreign(name, now, from.to_owned()));
        };
        let wanted = format!("{to}{rest}");
        // One NUL ends it.
        if wanted.len() >= room.len() {
            return Err(RelocationError::NoRoom {
                name,
                room: room.len().saturating_sub(1),
                wanted,
            });
        }
        written.push((room, wanted));
    }
    for (room, wanted) in written {
        let place = &mut bytes[room];
        place.fill(0);
        place[..wanted.len()].copy_from_slice(wanted.as_bytes());
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Where the two paths lie in the file, with the NULs after them.
fn rooms(bytes: &[u8]) -> Result<[(&'static str, Range<usize>); 2], RelocationError> {
    let unreadable = |error: object::Error| RelocationError::Unreadable(error.to_string());
    let header = FileHeader64::<Endianness>::parse(bytes).map_err(unreadable)?;
    let endian = header.endian().map_err(unreadable)?;
    let segments = header.program_headers(endian, bytes).map_err(unreadable)?;
    let mut interpreter = None;
    let mut libraries = None;
    let mut table = None;
    let mut table_size = None;
    for segment in segments {
        if segment.p_type(endian) == PT_INTERP {
            interpreter = inside(bytes, segment.p_offset(endian), segment.p_filesz(endian));
        }
        for entry in segment
            .dynamic(endian, bytes)
            .map_err(unreadable)?
            .unwrap_or_default()
        {
            let value = entry.val(endian);
            match entry.tag(endian) {
                DT_RPATH | DT_RUNPATH => libraries = Some(value),
                DT_STRTAB => table = Some(value),
                DT_STRSZ => table_size = Some(value),
                _ => {}
            }
        }
    }
    let interpreter = interpreter.ok_or(RelocationError::Lacks(INTERPRETER))?;
    let libraries = (|| {
        let (start, size) = (table?, table_size?);
        let string = libraries?;
        let segment = segments.iter().find(|segment| {
            let first = segment.p_vaddr(endian);
            segment.p_type(endian) == PT_LOAD
                && (first..first.saturating_add(segment.p_filesz(endian))).contains(&start)
        })?;
        let table = (start - segment.p_vaddr(endian)).checked_add(segment.p_offset(endian))?;
        let rest = inside(bytes, table.checked_add(string)?, size.checked_sub(string)?)?;
        // The room ends where the next string begins.
        let of_rest = &bytes[rest.clone()];
        let end = of_rest.iter().position(|byte| *byte == 0)?;
        let nul = of_rest[end..].iter().take_while(|byte| **byte == 0).count();
        Some(rest.start..rest.start + end + nul)
    })();
    let libraries = libraries.ok_or(RelocationError::Lacks(LIBRARIES))?;
    Ok([(INTERPRETER, interpreter), (LIBRARIES, libraries)])
}

fn inside(bytes: &[u8], start: u64, size: u64) -> Option<Range<usize>> {
    let start = usize::try_from(start).ok()?;
    let end = start.checked_add(usize::try_from(size).ok()?)?;
    (end <= bytes.len()).then_some(start..end)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const BUILT: &str = "/opt/quartermaster/current";
    const OTHER: &str = "/home/kubernetes/bin/quartermaster/current";

    fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
        bytes[at..at + value.len()].copy_from_slice(value);
    }

    /// A program with nothing but the two paths below `home`, each in so many bytes, and a string after the second.
    pub(crate) fn program(home: &str, room: usize) -> Vec<u8> {
        const INTERP: usize = 64 + 3 * 56;
        let strings = INTERP + room;
        let size = room + b"\0malloc\0".len();
        let dynamic = strings + size;
        let mut bytes = vec![0; dynamic + 4 * 16];
        put(&mut bytes, 0, b"\x7fELF\x02\x01\x01");
        put(&mut bytes, 16, &[3, 0, 62, 0, 1]);
        put(&mut bytes, 32, &64u64.to_le_bytes());
        for (at, value) in [(52, 64u16), (54, 56), (56, 3), (58, 64)] {
            put(&mut bytes, at, &value.to_le_bytes());
        }
        let whole = bytes.len();
        // Loaded elsewhere than it lies in the file, as programs are.
        for (nth, kind, at, length) in [(0, 1u32, 0, whole), (1, 3, INTERP, room), (2, 2, dynamic, 4 * 16)] {
            let header = 64 + nth * 56;
            put(&mut bytes, header, &kind.to_le_bytes());
            put(&mut bytes, header + 8, &(at as u64).to_le_bytes());
            put(&mut bytes, header + 16, &(at as u64 + 0x1000).to_le_bytes());
            for size in [32, 40] {
                put(&mut bytes, header + size, &(length as u64).to_le_bytes());
            }
        }
        put(&mut bytes, INTERP, format!("{home}/lib/ld.so").as_bytes());
        put(&mut bytes, strings, format!("\0{home}/lib").as_bytes());
        put(&mut bytes, strings + room + 1, b"malloc");
        let entries = [
            (15u64, 1u64),
            (5, strings as u64 + 0x1000),
            (10, size as u64),
            (0, 0),
        ];
        for (nth, (tag, value)) in entries.into_iter().enumerate() {
            put(&mut bytes, dynamic + nth * 16, &tag.to_le_bytes());
            put(&mut bytes, dynamic + nth * 16 + 8, &value.to_le_bytes());
        }
        bytes
    }

    fn paths(bytes: &[u8]) -> [String; 2] {
        rooms(bytes).unwrap().map(|(_, room)| text(&bytes[room]))
    }

    #[test]
    fn both_paths_are_moved_and_moving_back_gives_every_byte_again() {
        let built = program(BUILT, 255);
        let mut bytes = built.clone();
        relocate(&mut bytes, BUILT, OTHER).unwrap();
        assert_eq!(
            paths(&bytes),
            [
                "/home/kubernetes/bin/quartermaster/current/lib/ld.so",
                "/home/kubernetes/bin/quartermaster/current/lib"
            ]
        );
        assert!(bytes.windows(8).any(|window| window == b"\0malloc\0"));
        relocate(&mut bytes, OTHER, "/a").unwrap();
        assert_eq!(paths(&bytes), ["/a/lib/ld.so", "/a/lib"]);
        relocate(&mut bytes, "/a", BUILT).unwrap();
        assert_eq!(bytes, built);
    }

    #[test]
    fn a_program_without_room_or_of_another_folder_is_left_as_it_is() {
        let built = program(BUILT, 40);
        let mut bytes = built.clone();
        assert!(matches!(
            relocate(&mut bytes, BUILT, OTHER),
            Err(RelocationError::NoRoom {
                name: "interpreter",
                room: 39,
                ..
            })
        ));
        assert!(matches!(
            relocate(&mut bytes, "/opt/quarter", OTHER),
            Err(RelocationError::Foreign(..))
        ));
        assert_eq!(bytes, built);
        for length in 0..built.len() {
            let _ = relocate(&mut bytes[..length].to_vec(), BUILT, OTHER);
        }
        assert!(matches!(
            relocate(&mut b"#!/bin/sh\n".to_vec(), BUILT, OTHER),
            Err(RelocationError::Unreadable(_))
        ));
    }

    #[test]
    fn the_next_string_ends_the_room() {
        // 8 bytes more than the path needs, and the interpreter has more.
        let mut bytes = program("/x", 200);
        let [_, (_, room)] = rooms(&bytes).unwrap();
        assert_eq!(room.len(), 200);
        let long = format!("/{}", "y".repeat(194));
        assert!(relocate(&mut bytes, "/x", &long).is_err());
        assert_eq!(paths(&bytes), ["/x/lib/ld.so", "/x/lib"]);
    }
}
