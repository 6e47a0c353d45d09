//! Collective communication between ranks.
//!
//! [`Communicator`] is one rank's end of one group. The transport behind it is chosen at launch:
//! [`threads`] joins the ranks of one process. [`counted`] wraps any of them and accounts for every
//! call. Reductions run in rank order, so that a result is the same bits every time.

pub mod background;
pub mod counted;
pub mod threads;
mod values;

pub use values::{Values, ValuesMut};

use crate::error::{Error, ErrorKind, Result};
use std::fmt::Debug;
use std::sync::Arc;

/// A shared handle on one rank's end of a group.
pub type CommRef = Arc<dyn Communicator>;

/// How a reduction combines the ranks' values, in rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    Sum,
    Max,
}

/// One rank's end of a group of ranks: blocking collectives and messages over host memory.
///
/// Every rank of the group makes the same calls in the same order with the same lengths; a rank
/// that does not is found out and named. A call returns once its own buffers may be used again.
/// Waiting is bounded: a peer that failed, or that does not come within the group's timeout, ends
/// the call with an error naming the waiting rank, the operation and the missing peers.
pub trait Communicator: Debug + Send + Sync {
    /// This rank's place in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// Replaces `buf` on every rank by the element-wise reduction over the group. Values of 16 bits are
    /// added up in f32, and the result rounded once.
    fn all_reduce_values(&self, buf: ValuesMut<'_>, op: ReduceOp) -> Result<()>;

    /// The same for f32.
    fn all_reduce(&self, buf: &mut [f32], op: ReduceOp) -> Result<()> {
        self.all_reduce_values(ValuesMut::F32(buf), op)
    }

    /// Concatenates the ranks' `send` in rank order: `recv.len() == size * send.len()` bytes.
    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()>;

    /// Sums the ranks' `send` and leaves part `rank` of the sum in `recv`, of the same type:
    /// `send.len() == size * recv.len()`. Values of 16 bits are added up in f32, and the result rounded
    /// once.
    fn reduce_scatter_values(&self, send: Values<'_>, recv: ValuesMut<'_>) -> Result<()>;

    /// The same for f32.
    fn reduce_scatter(&self, send: &[f32], recv: &mut [f32]) -> Result<()> {
        self.reduce_scatter_values(Values::F32(send), ValuesMut::F32(recv))
    }

    /// Copies `buf` of rank `root` (a place in the group) to every rank.
    fn broadcast(&self, buf: &mut [u8], root: usize) -> Result<()>;

    /// Returns once every rank of the group has called it.
    fn barrier(&self) -> Result<()>;

    /// Sends a message to another rank, a place in the group. It does not wait for the receiver: the
    /// transport takes the buffer and keeps it until it is delivered.
    fn send(&self, message: Vec<u8>, to: usize) -> Result<()>;

    /// The next message, of `len` bytes, of another rank. One rank's messages to another arrive in
    /// the order in which they were sent.
    fn receive(&self, len: usize, from: usize) -> Result<Vec<u8>>;
}

/// A group of one: every collective is the identity.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

impl Communicator for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce_values(&self, _buf: ValuesMut<'_>, _op: ReduceOp) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }

    fn reduce_scatter_values(&self, send: Values<'_>, mut recv: ValuesMut<'_>) -> Result<()> {
        recv.copy_from(send);
        Ok(())
    }

    fn broadcast(&self, _buf: &mut [u8], _root: usize) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn send(&self, _message: Vec<u8>, to: usize) -> Result<()> {
        Err(alone("send", to))
    }

    fn receive(&self, _len: usize, from: usize) -> Result<Vec<u8>> {
        Err(alone("receive", from))
    }
}

fn alone(op: &'static str, peer: usize) -> Error {
    let reason = format!("the group has one rank: there is no rank {peer}");
    ErrorKind::Comm {
        rank: 0,
        op,
        reason,
    }
    .into()
}

/// Every rank's value, in rank order.
pub fn all_gather_values<T: bytemuck::Pod>(comm: &dyn Communicator, value: T) -> Result<Vec<T>> {
    let mut all = vec![value; comm.size()];
    comm.all_gather(
        bytemuck::bytes_of(&value),
        bytemuck::cast_slice_mut(&mut all),
    )?;
    Ok(all)
}

/// Every rank's bytes, of any length, in rank order.
pub fn all_gather_bytes(comm: &dyn Communicator, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let lengths = all_gather_values(comm, bytes.len() as u64)?;
    let longest = lengths.iter().max().map_or(0, |len| *len as usize);
    let mut send = bytes.to_vec();
    send.resize(longest, 0);
    let mut all = vec![0; longest * comm.size()];
    comm.all_gather(&send, &mut all)?;
    let parts = lengths.iter().enumerate().map(|(rank, len)| {
        let start = rank * longest;
        all[start..start + *len as usize].to_vec()
    });
    Ok(parts.collect())
}

/// Carries a communication error out of code that cannot return one: a layer's forward, or a step
/// of the backward pass. [`crate::launch::run_ranks`] turns it into the rank's error again.
///
/// It unwinds without calling the panic hook: the error is reported once, where it is handled.
pub fn raise(error: Error) -> ! {
    std::panic::resume_unwind(Box::new(error))
}
