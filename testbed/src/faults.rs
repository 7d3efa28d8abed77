//! A registry that misbehaves: a proxy before the testbed's own, in its network, which asks for passwords, refuses,
//! is slow or stops in the middle as it is told.
//!
//! It is no process of the testbed: it ends with the test that started it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::address::REGISTRY_HOST;
use crate::fabric::Fabric;

const UPSTREAM_PORT: u16 = 5000;
const PATIENCE: Duration = Duration::from_secs(300);

/// What goes wrong; nothing by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// Name and password, without which everything is answered with 401.
    pub password: Option<(String, String)>,
    /// A status with which everything is answered, and what `Retry-After` says.
    pub refuse: Option<(u16, u32)>,
    /// After so many bytes of a blob nothing comes any more.
    pub stall_after: Option<u64>,
    /// Bytes of a blob in a second.
    pub rate: Option<u64>,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The node that asked.
    pub by: IpAddr,
    /// `GET` or `HEAD`.
    pub method: String,
    /// Of the URL.
    pub path: String,
    /// When.
    pub at: Instant,
    /// The status with which it was refused; none where it was answered.
    pub refused: Option<u16>,
}

#[derive(Debug, Default)]
struct State {
    rules: Rules,
    asked: Vec<Asked>,
    /// When the last bytes of a blob were sent.
    last_byte: Option<Instant>,
}

/// A proxy that runs until it is dropped.
pub struct Faults {
    address: SocketAddrV4,
    state: Arc<Mutex<State>>,
    over: Arc<AtomicBool>,
    fabric: Fabric,
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Faults {
    pub(crate) fn start(fabric: Fabric, address: SocketAddrV4) -> Result<Self> {
        let state = Arc::<Mutex<State>>::default();
        let over = Arc::<AtomicBool>::default();
        let (shared, ended) = (Arc::clone(&state), Arc::clone(&over));
        // Threads that a thread of the fabric starts are in its network too.
        fabric.within(move || {
            let listener = TcpListener::bind(address)
                .with_context(|| format!("the misbehaving registry can't listen on {address}"))?;
            std::thread::spawn(move || {
                for connection in listener.incoming().flatten() {
                    if ended.load(Ordering::SeqCst) {
                        return;
                    }
                    let (state, ended) = (Arc::clone(&shared), Arc::clone(&ended));
                    let upstream = SocketAddrV4::new(*address.ip(), UPSTREAM_PORT);
                    std::thread::spawn(move || {
                        // A client that goes away in the middle is what is tested.
                        let _ = serve(connection, upstream, &state, &ended);
                    });
                }
            });
            Ok(())
        })?;
        Ok(Self {
            address,
            state,
            over,
            fabric,
        })
    }

    /// Its name, as nodes know it: `registry.testbed:5001`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{REGISTRY_HOST}:{}", self.address.port())
    }

    /// What goes wrong from now on; what was counted is forgotten.
    pub fn set(&self, rules: Rules) {
        *locked(&self.state) = State {
            rules,
            ..State::default()
        };
    }

    /// What was asked for since the rules were set, in this order.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        locked(&self.state).asked.clone()
    }

    /// How often each blob was sent.
    #[must_use]
    pub fn blobs(&self) -> HashMap<String, u32> {
        let mut blobs = HashMap::new();
        for asked in self.asked() {
            if asked.method == "GET" && asked.refused.is_none() && asked.path.contains("/blobs/") {
                *blobs.entry(asked.path).or_default() += 1;
            }
        }
        blobs
    }

    /// When the last bytes of a blob were sent; none since the rules were set where none were.
    #[must_use]
    pub fn last_byte(&self) -> Option<Instant> {
        locked(&self.state).last_byte
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // The listener sees it at its next connection.
        let address = self.address;
        let _ = self.fabric.within(move || {
            let _ = TcpStream::connect_timeout(&address.into(), Duration::from_secs(1));
            Ok(())
        });
    }
}

struct Head {
    method: String,
    path: String,
    authorization: Option<String>,
    accept: Vec<String>,
    range: Option<String>,
}

fn serve(
    mut client: TcpStream,
    upstream: SocketAddrV4,
    state: &Mutex<State>,
    over: &AtomicBool,
) -> Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let by = client.peer_addr()?.ip();
    let head = read_head(&client)?;
    let rules = locked(state).rules.clone();
    let refusal = refusal(&rules, &head);
    locked(state).asked.push(Asked {
        by,
        method: head.method.clone(),
        path: head.path.clone(),
        at: Instant::now(),
        refused: refusal.as_ref().map(|(status, _)| *status),
    });
    if let Some((status, header)) = refusal {
        return refuse(&mut client, status, &header);
    }
    let mut server = TcpStream::connect_timeout(&upstream.into(), Duration::from_secs(5))?;
    server.set_read_timeout(Some(PATIENCE))?;
    let mut request = format!(
        "{} {} HTTP/1.1\r\nHost: {upstream}\r\nConnection: close\r\n",
        head.method, head.path
    );
    for accept in &head.accept {
        request.push_str(&format!("Accept: {accept}\r\n"));
    }
    if let Some(range) = &head.range {
        request.push_str(&format!("Range: {range}\r\n"));
    }
    request.push_str("\r\n");
    server.write_all(request.as_bytes())?;
    let is_blob = head.method == "GET" && head.path.contains("/blobs/");
    if is_blob {
        let sent = || locked(state).last_byte = Some(Instant::now());
        relay(server, client, rules, sent, over)
    } else {
        relay(server, client, Rules::default(), || (), over)
    }
}

/// With which status and header a request is refused, if it is.
fn refusal(rules: &Rules, head: &Head) -> Option<(u16, String)> {
    if let Some((status, retry_after)) = rules.refuse {
        return Some((status, format!("Retry-After: {retry_after}\r\n")));
    }
    let (name, password) = rules.password.as_ref()?;
    let wanted = format!("Basic {}", STANDARD.encode(format!("{name}:{password}")));
    (head.authorization.as_deref() != Some(&wanted))
        .then(|| (401, "WWW-Authenticate: Basic realm=\"testbed\"\r\n".to_owned()))
}

fn read_head(client: &TcpStream) -> Result<Head> {
    let mut lines = BufReader::new(client.take(64 * 1024)).lines();
    let first = lines.next().context("no request")??;
    let mut words = first.split(' ');
    let mut head = Head {
        method: words.next().unwrap_or_default().to_owned(),
        path: words.next().unwrap_or_default().to_owned(),
        authorization: None,
        accept: Vec::new(),
        range: None,
    };
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        let Some((key, value)) = line.split_once(": ") else {
            continue;
        };
        match key.to_ascii_lowercase().as_str() {
            "authorization" => head.authorization = Some(value.to_owned()),
            "accept" => head.accept.push(value.to_owned()),
            "range" => head.range = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(head)
}

fn refuse(client: &mut TcpStream, status: u16, header: &str) -> Result<()> {
    let reason = match status {
        401 => "Unauthorized",
        429 => "Too Many Requests",
        503 => "Service Unavailable",
        _ => "Refused",
    };
    let answer =
        format!("HTTP/1.1 {status} {reason}\r\n{header}Content-Length: 0\r\nConnection: close\r\n\r\n");
    Ok(client.write_all(answer.as_bytes())?)
}

fn relay(
    mut server: TcpStream,
    mut client: TcpStream,
    rules: Rules,
    note: impl Fn(),
    over: &AtomicBool,
) -> Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    let mut sent = 0_u64;
    loop {
        let most = match rules.rate {
            Some(rate) => usize::try_from(rate / 10).unwrap_or(1).clamp(1, buffer.len()),
            None => buffer.len(),
        };
        let length = server.read(&mut buffer[..most])?;
        if length == 0 {
            return Ok(());
        }
        client.write_all(&buffer[..length])?;
        note();
        sent += length as u64;
        if rules.stall_after.is_some_and(|most| sent >= most) {
            return hold(client, over);
        }
        if let Some(rate) = rules.rate.filter(|rate| *rate > 0) {
            // The pace of a slow line is what is made here, not waited for.
            std::thread::sleep(Duration::from_secs_f64(length as f64 / rate as f64));
        }
        if over.load(Ordering::SeqCst) {
            return Ok(());
        }
    }
}

/// Keeps a connection open without a word until its client goes.
fn hold(mut client: TcpStream, over: &AtomicBool) -> Result<()> {
    client.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut byte = [0];
    while !over.load(Ordering::SeqCst) {
        match client.read(&mut byte) {
            Ok(0) => return Ok(()),
            Err(error)
                if !matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                ) =>
            {
                return Ok(());
            }
            _ => {}
        }
    }
    Ok(())
}
