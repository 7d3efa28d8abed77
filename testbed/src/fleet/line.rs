//! The connections to all agents of the fleet: one listener for a whole range of loopback addresses, where the address that
//! was dialled says which agent is meant.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use anyhow::Context as _;
use futures::Stream;
use quartermaster_proto::COMMAND_PORT;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use super::agent::Agent;
use super::machine::Machine;

/// Whom a connection is to.
#[derive(Clone)]
pub(super) struct Caller {
    /// The machine.
    pub machine: Arc<Machine>,
    /// The agent that ran there when it was made.
    pub agent: Arc<Agent>,
}

/// A connection to an agent. It breaks when the agent's process ends, and stands still while the agent hangs.
pub(super) struct Line {
    stream: TlsStream<TcpStream>,
    caller: Caller,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    thaw: Option<Pin<Box<Sleep>>>,
}

/// Takes connections to the machines for ever.
///
/// # Errors
/// If the port is taken in this network.
pub(super) fn listen(
    machines: Arc<HashMap<Ipv4Addr, Arc<Machine>>>,
) -> anyhow::Result<impl Stream<Item = io::Result<Line>>> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket
        .bind((Ipv4Addr::UNSPECIFIED, COMMAND_PORT).into())
        .context("the agents' port can't be bound in the fabric")?;
    // A fleet is dialled in one go.
    let listener = socket.listen(4096)?;
    let (taken, lines) = mpsc::channel(1024);
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // Out of descriptors, perhaps: let those that are open end rather than spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (machines, taken) = (Arc::clone(&machines), taken.clone());
            tokio::spawn(async move {
                // One that is not wanted or not understood is simply closed.
                if let Ok(line) = accept(stream, &machines).await {
                    let _ = taken.send(Ok(line)).await;
                }
            });
        }
    });
    Ok(ReceiverStream::new(lines))
}

async fn accept(stream: TcpStream, machines: &HashMap<Ipv4Addr, Arc<Machine>>) -> io::Result<Line> {
    let nobody = || io::Error::from(io::ErrorKind::ConnectionRefused);
    let IpAddr::V4(address) = stream.local_addr()?.ip() else {
        return Err(nobody());
    };
    let machine = machines.get(&address).ok_or_else(nobody)?;
    let agent = machine.agent().ok_or_else(nobody)?;
    stream.set_nodelay(true)?;
    if let Some(until) = agent.frozen_until() {
        tokio::time::sleep_until(until.into()).await;
    }
    let line = agent.line();
    let acceptor = TlsAcceptor::from(Arc::clone(&agent.tls));
    let stream = tokio::select! {
        stream = acceptor.accept(stream) => stream?,
        () = line.cancelled() => return Err(nobody()),
    };
    machine.ledger.lines.fetch_add(1, Ordering::Relaxed);
    Ok(Line {
        stream,
        caller: Caller {
            machine: Arc::clone(machine),
            agent,
        },
        cut: Box::pin(line.cancelled_owned()),
        thaw: None,
    })
}

impl Line {
    /// Ready when bytes may pass.
    fn may_pass(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        loop {
            if let Some(thaw) = self.thaw.as_mut() {
                ready!(thaw.as_mut().poll(context));
                self.thaw = None;
            }
            match self.caller.agent.frozen_until() {
                None => return Poll::Ready(Ok(())),
                Some(until) => {
                    self.thaw = Some(Box::pin(tokio::time::sleep_until(Instant::from_std(until))));
                }
            }
        }
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.may_pass(context))?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.may_pass(context))?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.may_pass(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Line {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}
