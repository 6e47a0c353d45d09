//! Where the ranks of a group meet: each publishes its call, all do their share of the work on all of
//! the calls' buffers, and all leave.

use super::ThreadCommunicator;
use super::mailbox::Mailbox;
use crate::comm::ReduceOp;
use crate::error::{ErrorKind, Result};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What the ranks of one group share.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    /// World ranks, for messages.
    pub(super) members: Vec<usize>,
    pub(super) mail: Mailbox,
    state: Mutex<State>,
    changed: Condvar,
}

impl Group {
    pub(super) fn new(name: &str, members: &[usize]) -> Self {
        Group {
            name: name.to_string(),
            members: members.to_vec(),
            mail: Mailbox::default(),
            state: Mutex::new(State::new(members.len())),
            changed: Condvar::new(),
        }
    }

    /// Makes every waiting rank look again whether it still has something to wait for.
    pub(super) fn wake(&self) {
        // Taking the lock orders this after a waiter's check and before its sleep.
        let _state = lock(&self.state);
        self.changed.notify_all();
        self.mail.wake();
    }
}

/// The operation of one call; all ranks of a round must agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    AllReduce(ReduceOp, NumberType),
    AllGather,
    ReduceScatter(NumberType),
    Broadcast { root: usize },
    Barrier,
}

/// What the buffers of a reduction hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NumberType {
    F32,
    Bf16,
    F16,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::AllReduce(ReduceOp::Sum, _) => "all-reduce (sum)",
            Op::AllReduce(ReduceOp::Max, _) => "all-reduce (max)",
            Op::AllGather => "all-gather",
            Op::ReduceScatter(_) => "reduce-scatter",
            Op::Broadcast { .. } => "broadcast",
            Op::Barrier => "barrier",
        }
    }
}

/// One rank's call: what it asks for and where its buffers are. `len` counts the elements of the
/// buffer that all ranks must agree on (bytes or numbers, by operation).
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) op: Op,
    pub(super) buffer: *mut u8,
    pub(super) len: usize,
}

// SAFETY: a Call only carries the address of a buffer to the group's other ranks. They touch the
// buffer during the round alone, while the thread that lent it waits inside `round`.
unsafe impl Send for Call {}

#[derive(Debug)]
struct State {
    /// Counts finished rounds.
    round: u64,
    calls: Vec<Option<Call>>,
    arrived: usize,
    /// Ranks that finished their share of this round's work.
    done: usize,
    /// Every rank has arrived, and shares of the work are under way.
    working: bool,
    /// The group can complete no further round.
    broken: Option<String>,
}

impl State {
    fn new(size: usize) -> Self {
        State {
            round: 0,
            calls: vec![None; size],
            arrived: 0,
            done: 0,
            working: false,
            broken: None,
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A rank that panics holds none of these locks across user code, so the data is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends this rank's share of a round, also when the work unwinds: the others wait for it.
struct Finish<'a>(&'a Group);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.done += 1;
        if state.done == self.0.members.len() {
            state.calls.fill(None);
            (state.arrived, state.done, state.working) = (0, 0, false);
            state.round += 1;
            self.0.changed.notify_all();
            return;
        }
        // No timeout: the others only copy and add, and none of them waits for anything. This
        // thread must not leave before: they may still be using its buffers.
        let round = state.round;
        while state.round == round {
            state = self
                .0
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl ThreadCommunicator {
    /// Publishes `call`, waits for the other ranks' calls, and runs `share` on all of them in rank
    /// order; returns when every rank has run its share.
    pub(super) fn round(&self, call: Call, share: impl FnOnce(&[Call])) -> Result<()> {
        let calls = self.meet(call)?;
        let finish = Finish(&self.group);
        share(&calls);
        drop(finish);
        Ok(())
    }

    /// Waits until every rank of the group has called, and checks that they agree.
    fn meet(&self, call: Call) -> Result<Vec<Call>> {
        let group = &*self.group;
        let deadline = Instant::now() + self.world.timeout;
        let mut state = lock(&group.state);
        // A fast rank may be here before slower ones have left the round before.
        while state.working {
            state = group
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let round = state.round;
        self.check(&state, call.op)?;
        state.calls[self.rank] = Some(call);
        state.arrived += 1;
        if state.arrived == group.members.len() {
            match disagreement(&group.members, &state.calls) {
                Some(reason) => state.broken = Some(reason),
                None => state.working = true,
            }
            group.changed.notify_all();
        }
        loop {
            if state.working && state.round == round {
                return Ok(state.calls.iter().copied().flatten().collect());
            }
            self.check(&state, call.op)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.give_up(state, call.op));
            }
            let waited = group.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// An error if this group can never complete another round.
    fn check(&self, state: &State, op: Op) -> Result<()> {
        if let Some(reason) = &state.broken {
            return Err(self.error(op.name(), reason.clone()));
        }
        self.check_world(op.name())
    }

    /// An error if some rank of the world has failed.
    pub(super) fn check_world(&self, op: &'static str) -> Result<()> {
        match self.world.failure() {
            Some((rank, reason)) => Err(self.error(op, format!("rank {rank} failed: {reason}"))),
            None => Ok(()),
        }
    }

    /// Breaks the group after a timeout: its rounds can no longer be told apart.
    fn give_up(&self, mut state: MutexGuard<'_, State>, op: Op) -> crate::Error {
        let missing: Vec<String> = (self.group.members.iter())
            .zip(&state.calls)
            .filter(|(_, call)| call.is_none())
            .map(|(member, _)| member.to_string())
            .collect();
        let reason = format!(
            "no call from rank{} {} within {:.1} s",
            if missing.len() == 1 { "" } else { "s" },
            missing.join(", "),
            self.world.timeout.as_secs_f64(),
        );
        state.broken = Some(reason.clone());
        self.group.changed.notify_all();
        self.error(op.name(), reason)
    }

    pub(super) fn error(&self, op: &'static str, reason: String) -> crate::Error {
        let reason = format!(
            "in group {} {:?}: {reason}",
            self.group.name, self.group.members
        );
        ErrorKind::Comm {
            rank: self.group.members[self.rank],
            op,
            reason,
        }
        .into()
    }
}

/// Says how the ranks' calls differ, if they do.
fn disagreement(members: &[usize], calls: &[Option<Call>]) -> Option<String> {
    let calls: Vec<Call> = calls.iter().copied().flatten().collect();
    let same = |a: &Call, b: &Call| a.op == b.op && a.len == b.len;
    if calls.iter().all(|call| same(call, &calls[0])) {
        return None;
    }
    let told: Vec<String> = (members.iter().zip(&calls))
        .map(|(rank, call)| format!("rank {rank} calls {:?} of {}", call.op, call.len))
        .collect();
    Some(format!("the ranks do not agree: {}", told.join("; ")))
}
