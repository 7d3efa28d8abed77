//! The one door from the host into a testbed: a port on the host's loopback whose connections go to the API server.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

use crate::address::{API_PORT, AddressPlan};
use crate::cgroups::Cgroups;
use crate::fabric::Fabric;
use crate::layout::State;
use crate::process::Launch;

/// The name of the hidden subcommand that [`serve`] is run by.
pub const SUBCOMMAND: &str = "forward";
const ROLE: &str = "forwarder";

/// Starts the forwarder as a process of the testbed; returns its port on 127.0.0.1.
///
/// # Errors
/// If the `testbed` program is not found or does not come up.
pub fn start(state: &State, fabric: &Fabric, cgroups: &Cgroups, plan: AddressPlan) -> Result<u16> {
    let port_file = state.run().join("forwarder.port");
    let _ = fs::remove_file(&port_file);
    let forwarder = Launch {
        role: ROLE,
        args: vec![
            program()?.into(),
            SUBCOMMAND.into(),
            fabric.network().into(),
            format!("{}:{API_PORT}", plan.fabric()).into(),
            port_file.clone().into(),
        ],
        env: Vec::new(),
        cgroups: &cgroups.make_control_plane()?,
        run: &state.run(),
        logs: &state.logs(),
    }
    .start()?;
    let mut port = 0;
    forwarder.wait_until("to listen", Duration::from_secs(10), || {
        port = fs::read_to_string(&port_file)?.trim().parse()?;
        Ok(true)
    })?;
    Ok(port)
}

/// The `testbed` program: this one, or the one built beside the test that uses the library.
fn program() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("TESTBED_PROGRAM") {
        return Ok(named.into());
    }
    let own = std::env::current_exe().context("can't tell which program this is")?;
    let candidates = own.ancestors().skip(1).take(2).map(|dir| dir.join("testbed"));
    let is_own = own.file_name().is_some_and(|name| name == "testbed");
    let Some(found) = is_own
        .then(|| own.clone())
        .or_else(|| candidates.into_iter().find(|path| path.is_file()))
    else {
        bail!(
            "the program testbed is not beside {}; build it first: cargo build -p testbed",
            own.display()
        );
    };
    Ok(found)
}

/// Listens on a free port of the host's loopback, writes the port to `port_file`, and joins each connection with one to
/// `target` made inside the network namespace. Never returns while all is well.
///
/// # Errors
/// If it can't listen or enter the namespace.
pub fn serve(network: &Path, target: SocketAddr, port_file: &Path) -> Result<()> {
    // A socket stays in the namespace it was made in: this one is the host's, those made after the step are the fabric's.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("can't listen on 127.0.0.1")?;
    let port = listener.local_addr()?.port();
    let fabric = File::open(network).with_context(|| format!("can't open {}", network.display()))?;
    setns(fabric, CloneFlags::CLONE_NEWNET).context("can't enter the fabric's network")?;
    let new = port_file.with_extension("new");
    fs::write(&new, port.to_string()).and_then(|()| fs::rename(&new, port_file))?;
    for client in listener.incoming() {
        match client {
            Ok(client) => {
                thread::spawn(move || {
                    if let Err(error) = join(client, target) {
                        eprintln!("connection to {target}: {error}");
                    }
                });
            }
            Err(error) => {
                // Out of descriptors, perhaps: let those that are open end rather than spin.
                eprintln!("can't take a connection: {error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
    Ok(())
}

fn join(client: TcpStream, target: SocketAddr) -> io::Result<()> {
    let server = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
    for end in [&client, &server] {
        end.set_nodelay(true)?;
    }
    let (from_client, to_server) = (client.try_clone()?, server.try_clone()?);
    let upstream = thread::spawn(move || pump(from_client, to_server));
    pump(server, client);
    // The other direction ends by itself: its end was shut down.
    let _ = upstream.join();
    Ok(())
}

/// Copies until the source ends, then passes the end on; a failure ends both sides.
fn pump(mut from: TcpStream, mut to: TcpStream) {
    if io::copy(&mut from, &mut to).is_err() {
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn passes_bytes_both_ways_and_the_end_of_each() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let target = server.local_addr().unwrap();
        let answering = thread::spawn(move || {
            let (mut connection, _) = server.accept().unwrap();
            let mut asked = String::new();
            connection.read_to_string(&mut asked).unwrap();
            write!(connection, "you said {asked}").unwrap();
        });
        let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(door.local_addr().unwrap()).unwrap();
        let (accepted, _) = door.accept().unwrap();
        let joining = thread::spawn(move || join(accepted, target).unwrap());
        client.write_all(b"hello").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "you said hello");
        answering.join().unwrap();
        joining.join().unwrap();
    }
}
