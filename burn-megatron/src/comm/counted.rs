//! A communicator that accounts for every call: how many, how many bytes, how long.

use super::{CommRef, Communicator, ReduceOp, Values, ValuesMut};
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The kinds of communication that are told apart in the accounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Barrier,
    Send,
    Receive,
}

impl Collective {
    /// All of them, in the order of the accounts.
    pub const ALL: [Collective; 7] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Barrier,
        Collective::Send,
        Collective::Receive,
    ];

    /// Its name as Megatron's and NCCL's users write it.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::Broadcast => "broadcast",
            Collective::Barrier => "barrier",
            Collective::Send => "send",
            Collective::Receive => "receive",
        }
    }
}

/// What one rank spent on one kind of collective in one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    pub calls: u64,
    /// Bytes of the whole tensor that the collective completes (NCCL's "size"): the buffer of an
    /// all-reduce or broadcast, the gathered result, the tensor before it is scattered, the message.
    pub bytes: u64,
    /// Time inside the calls, waiting for slower ranks included.
    pub time: Duration,
}

impl std::ops::Sub for Account {
    type Output = Account;

    /// What was spent between an earlier reading and this one.
    fn sub(self, earlier: Account) -> Account {
        Account {
            calls: self.calls - earlier.calls,
            bytes: self.bytes - earlier.bytes,
            time: self.time.saturating_sub(earlier.time),
        }
    }
}

impl std::ops::AddAssign for Account {
    fn add_assign(&mut self, other: Account) {
        self.calls += other.calls;
        self.bytes += other.bytes;
        self.time += other.time;
    }
}

#[derive(Debug, Default)]
struct Cell {
    calls: AtomicU64,
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// The accounts of one rank in one group, one per kind of collective.
#[derive(Debug, Default)]
pub struct Accounts([Cell; Collective::ALL.len()]);

impl Accounts {
    /// What was spent on `collective` so far.
    pub fn of(&self, collective: Collective) -> Account {
        let cell = &self.0[collective as usize];
        Account {
            calls: cell.calls.load(Relaxed),
            bytes: cell.bytes.load(Relaxed),
            time: Duration::from_nanos(cell.nanos.load(Relaxed)),
        }
    }
}

/// Wraps a communicator and keeps [`Accounts`] of its successful calls.
pub struct Counted {
    inner: CommRef,
    accounts: Arc<Accounts>,
}

impl Counted {
    /// Wraps `inner`; the accounts stay readable through the second value.
    pub fn wrap(inner: CommRef) -> (CommRef, Arc<Accounts>) {
        let accounts = Arc::new(Accounts::default());
        if inner.size() == 1 {
            // Nothing leaves the rank: there is nothing to count.
            return (inner, accounts);
        }
        let counted = Counted {
            inner,
            accounts: accounts.clone(),
        };
        (Arc::new(counted), accounts)
    }

    fn count<T>(
        &self,
        of: Collective,
        bytes: usize,
        call: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let result = call()?;
        let cell = &self.accounts.0[of as usize];
        cell.calls.fetch_add(1, Relaxed);
        cell.bytes.fetch_add(bytes as u64, Relaxed);
        cell.nanos
            .fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        Ok(result)
    }
}

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl Communicator for Counted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce_values(&self, buf: ValuesMut<'_>, op: ReduceOp) -> Result<()> {
        self.count(Collective::AllReduce, buf.as_values().num_bytes(), || {
            self.inner.all_reduce_values(buf, op)
        })
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.count(Collective::AllGather, recv.len(), || {
            self.inner.all_gather(send, recv)
        })
    }

    fn reduce_scatter_values(&self, send: Values<'_>, recv: ValuesMut<'_>) -> Result<()> {
        self.count(Collective::ReduceScatter, send.num_bytes(), || {
            self.inner.reduce_scatter_values(send, recv)
        })
    }

    fn broadcast(&self, buf: &mut [u8], root: usize) -> Result<()> {
        self.count(Collective::Broadcast, buf.len(), || {
            self.inner.broadcast(buf, root)
        })
    }

    fn barrier(&self) -> Result<()> {
        self.count(Collective::Barrier, 0, || self.inner.barrier())
    }

    fn send(&self, message: Vec<u8>, to: usize) -> Result<()> {
        self.count(Collective::Send, message.len(), || {
            self.inner.send(message, to)
        })
    }

    fn receive(&self, len: usize, from: usize) -> Result<Vec<u8>> {
        self.count(Collective::Receive, len, || self.inner.receive(len, from))
    }
}
