//! Messages between two ranks of a group: one queue for each direction of each pair.

use super::rendezvous::lock;
use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

/// A rank's messages to another that are under way, in the order sent.
type Queue = VecDeque<Vec<u8>>;

/// The messages of one group that were sent and not yet received.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    /// By sender and receiver.
    queues: Mutex<HashMap<(usize, usize), Queue>>,
    arrived: Condvar,
}

impl Mailbox {
    /// Leaves a message.
    pub(super) fn post(&self, from: usize, to: usize, message: Vec<u8>) {
        let mut queues = lock(&self.queues);
        queues.entry((from, to)).or_default().push_back(message);
        self.arrived.notify_all();
    }

    /// The next message; `None` if there is none by `deadline`. What was sent is delivered even if
    /// its sender failed later; `check` ends the wait where none can come any more.
    pub(super) fn take<E>(
        &self,
        from: usize,
        to: usize,
        deadline: Instant,
        check: impl Fn() -> Result<(), E>,
    ) -> Result<Option<Vec<u8>>, E> {
        let mut queues = lock(&self.queues);
        loop {
            if let Some(message) = queues.get_mut(&(from, to)).and_then(Queue::pop_front) {
                return Ok(Some(message));
            }
            check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.arrived.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes every waiting rank look again whether it still has something to wait for.
    pub(super) fn wake(&self) {
        // Taking the lock orders this after a waiter's check and before its sleep.
        let _queues = lock(&self.queues);
        self.arrived.notify_all();
    }
}
