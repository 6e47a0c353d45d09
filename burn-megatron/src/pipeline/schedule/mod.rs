//! A pipeline's schedule as data: what each rank does, in order.
//!
//! One list serves everything: the checker (`check.rs`) proves that it cannot deadlock and leaves nothing
//! out, the [simulator](super::simulate()) times it, the [executor](super::execute) runs it, and
//! `megatron schedule` draws it.
//!
//! `p` ranks hold `v` stages each, their *chunks*: stage `s` is chunk `s / p` of rank `s % p`.

mod action;
mod check;
mod orders;
mod transfers;

pub use action::{Action, Kind};

use crate::error::{Error, Result};
use crate::topology::{PipelineSchedule, PipelineShape, schedule_violations};

/// What each rank of a pipeline does in one step. Every value of this type has passed the checker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    shape: PipelineShape,
    /// Whether it trains, rather than runs forward only.
    trains: bool,
    /// Of each rank, in order.
    actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// The schedule of that kind.
    ///
    /// # Errors
    /// If it cannot run that shape, with the nearest ones that it can.
    pub fn new(kind: PipelineSchedule, shape: PipelineShape) -> Result<Self> {
        let violations = schedule_violations(kind, &shape);
        if !violations.is_empty() {
            return Err(Error::config(violations));
        }
        let orders = (0..shape.ranks).map(|rank| match kind {
            PipelineSchedule::GPipe => orders::gpipe(&shape, rank),
            PipelineSchedule::OneForwardOneBackward => orders::one_f_one_b(&shape, rank),
            PipelineSchedule::Interleaved => orders::interleaved(&shape, rank),
        });
        Schedule::from_orders(shape, orders.collect(), true)
    }

    /// A schedule of your own, from what each rank computes in order; sends and receives are put in.
    ///
    /// # Errors
    /// If a forward or backward is missing, or comes twice, or if the ranks would wait for one
    /// another for ever.
    pub fn from_compute(shape: PipelineShape, orders: Vec<Vec<Action>>) -> Result<Self> {
        Schedule::from_orders(shape, orders, true)
    }

    /// A schedule of your own, from all that each rank does in order, sends and receives included.
    ///
    /// # Errors
    /// As for [`from_compute`](Schedule::from_compute), and if a send does not meet its receive.
    pub fn from_actions(shape: PipelineShape, actions: Vec<Vec<Action>>) -> Result<Self> {
        Schedule::checked(shape, actions, true)
    }

    /// Its forwards alone, in the same order: what an evaluation runs.
    pub fn forward_only(&self) -> Self {
        let forwards = |rank| {
            self.compute(rank)
                .filter(|action| action.kind == Kind::Forward)
                .collect()
        };
        let orders = (0..self.shape.ranks).map(forwards).collect();
        Schedule::from_orders(self.shape, orders, false)
            .expect("what runs with its backwards runs without them")
    }

    fn from_orders(shape: PipelineShape, orders: Vec<Vec<Action>>, trains: bool) -> Result<Self> {
        check::each_once(&shape, &orders, trains)?;
        let actions = transfers::with_transfers(&shape, &orders)?;
        Schedule::checked(shape, actions, trains)
    }

    fn checked(shape: PipelineShape, actions: Vec<Vec<Action>>, trains: bool) -> Result<Self> {
        check::check(&shape, &actions, trains)?;
        Ok(Schedule {
            shape,
            trains,
            actions,
        })
    }

    /// The pipeline that it is for.
    pub fn shape(&self) -> &PipelineShape {
        &self.shape
    }

    /// Whether it has backwards.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// All that `rank` does, in order.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// What `rank` computes, in order.
    pub fn compute(&self, rank: usize) -> impl Iterator<Item = Action> {
        let actions = self.actions[rank].iter().copied();
        actions.filter(|action| action.kind.computes())
    }

    /// Messages that `rank` sends.
    pub fn sends(&self, rank: usize) -> usize {
        let sends =
            |action: &&Action| matches!(action.kind, Kind::SendForward | Kind::SendBackward);
        self.actions[rank].iter().filter(sends).count()
    }

    /// The most micro batches whose forward `rank` has run and whose backward it has not, counted
    /// once for each of its chunks: what it holds activations of.
    pub fn max_in_flight(&self, rank: usize) -> usize {
        let mut held = 0usize;
        let after = self.compute(rank).map(|action| {
            match action.kind {
                Kind::Forward => held += 1,
                _ => held -= 1,
            }
            held
        });
        after.max().unwrap_or(0)
    }
}

impl PipelineShape {
    /// The rank that holds `stage`.
    pub fn rank_of(&self, stage: usize) -> usize {
        stage % self.ranks
    }

    /// Which of its rank's chunks `stage` is.
    pub fn chunk_of(&self, stage: usize) -> usize {
        stage / self.ranks
    }

    /// The rank that a send goes to, or that a receive comes from.
    pub fn peer(&self, action: &Action) -> Option<usize> {
        self.counterpart(action)
            .map(|other| self.rank_of(other.stage))
    }

    /// The receive that meets a send, or the send that meets a receive.
    fn counterpart(&self, action: &Action) -> Option<Action> {
        let next = || (action.stage + 1 < self.num_stages()).then_some(action.stage + 1);
        let previous = || action.stage.checked_sub(1);
        let (stage, kind) = match action.kind {
            Kind::SendForward => (next()?, Kind::ReceiveForward),
            Kind::ReceiveForward => (previous()?, Kind::SendForward),
            Kind::SendBackward => (previous()?, Kind::ReceiveBackward),
            Kind::ReceiveBackward => (next()?, Kind::SendBackward),
            Kind::Forward | Kind::Backward => return None,
        };
        Some(Action::new(stage, kind, action.microbatch))
    }

    /// The send that follows a forward or backward, unless it is the last of its direction.
    pub(super) fn send_after(&self, compute: &Action) -> Option<Action> {
        let kind = match compute.kind {
            Kind::Forward => Kind::SendForward,
            Kind::Backward => Kind::SendBackward,
            _ => return None,
        };
        let send = Action::new(compute.stage, kind, compute.microbatch);
        self.counterpart(&send).map(|_| send)
    }

    /// The receive that a forward or backward starts from, unless it is the first of its direction.
    pub(super) fn receive_before(&self, compute: &Action) -> Option<Action> {
        let kind = match compute.kind {
            Kind::Forward => Kind::ReceiveForward,
            Kind::Backward => Kind::ReceiveBackward,
            _ => return None,
        };
        let receive = Action::new(compute.stage, kind, compute.microbatch);
        self.counterpart(&receive).map(|_| receive)
    }
}

#[cfg(test)]
mod tests;
