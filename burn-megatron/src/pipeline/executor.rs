//! Runs a rank's part of a schedule.

use super::schedule::{Action, Kind, Schedule};
use super::timeline::Span;
use crate::comm::Communicator;
use crate::error::Result;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// What a rank runs for the computations of its schedule. Activations and gradients between stages
/// travel as bytes.
pub trait Work {
    /// Bytes of every message between two stages.
    fn message_bytes(&self) -> usize;

    /// Runs `stage` on a micro batch, from what the stage before it sent; the first stage gets
    /// nothing. Returns what the next stage is to get; nothing on the last.
    fn forward(
        &mut self,
        stage: usize,
        microbatch: usize,
        input: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>>;

    /// Runs the stage's backward, from the gradient that the next stage sent; the last stage gets
    /// nothing. Returns the gradient for the stage before; nothing on the first.
    fn backward(
        &mut self,
        stage: usize,
        microbatch: usize,
        gradient: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>>;
}

/// Runs this rank's actions, in order, and returns when each ran, in seconds since `clock`. `pp` is
/// its end of the pipeline's group, where it has the place that its rank has in the schedule.
///
/// A receive is posted where it stands and waited for by the computation that needs it, so that a
/// late message holds up nothing else.
///
/// # Errors
/// What the work returns, or the failure or silence of another rank.
pub fn execute(
    schedule: &Schedule,
    pp: &dyn Communicator,
    work: &mut impl Work,
    clock: Instant,
) -> Result<Vec<Span>> {
    let mut run = Run {
        schedule,
        pp,
        clock,
        posted: vec![VecDeque::new(); pp.size()],
        arrived: HashMap::new(),
        made: HashMap::new(),
        spans: Vec::with_capacity(schedule.actions(pp.rank()).len()),
    };
    for action in schedule.actions(pp.rank()) {
        let Action {
            stage, microbatch, ..
        } = *action;
        match action.kind {
            Kind::Forward => {
                let input = run.input(action)?;
                run.compute(action, || work.forward(stage, microbatch, input))?;
            }
            Kind::Backward => {
                let gradient = run.input(action)?;
                run.compute(action, || work.backward(stage, microbatch, gradient))?;
            }
            Kind::SendForward | Kind::SendBackward => run.send(action)?,
            Kind::ReceiveForward | Kind::ReceiveBackward => run.post(action, work.message_bytes()),
        }
    }
    Ok(run.spans)
}

/// A rank's messages and times while it runs.
struct Run<'a> {
    schedule: &'a Schedule,
    pp: &'a dyn Communicator,
    clock: Instant,
    /// Receives that nobody has waited for yet, with their bytes, by peer and in the peer's order.
    posted: Vec<VecDeque<(Action, usize)>>,
    arrived: HashMap<Action, Vec<u8>>,
    /// What was computed and is to be sent, by its send.
    made: HashMap<Action, Vec<u8>>,
    spans: Vec<Span>,
}

impl Run<'_> {
    fn now(&self) -> f64 {
        self.clock.elapsed().as_secs_f64()
    }

    fn record(&mut self, action: &Action, start: f64) {
        let end = self.now();
        self.spans.push(Span {
            action: *action,
            start,
            end,
        });
    }

    fn peer(&self, action: &Action) -> usize {
        let peer = self.schedule.shape().peer(action);
        peer.expect("a checked schedule sends and receives between stages")
    }

    fn compute(
        &mut self,
        action: &Action,
        work: impl FnOnce() -> Result<Option<Vec<u8>>>,
    ) -> Result<()> {
        let start = self.now();
        let made = work()?;
        self.record(action, start);
        if let (Some(send), Some(made)) = (self.schedule.shape().send_after(action), made) {
            self.made.insert(send, made);
        }
        Ok(())
    }

    fn send(&mut self, action: &Action) -> Result<()> {
        let start = self.now();
        let message = self.made.remove(action);
        let message = message.expect("a checked schedule computes before it sends");
        self.pp.send(message, self.peer(action))?;
        self.record(action, start);
        Ok(())
    }

    fn post(&mut self, action: &Action, bytes: usize) {
        let peer = self.peer(action);
        self.posted[peer].push_back((*action, bytes));
    }

    /// Waits for what a computation starts from, if it starts from a message.
    fn input(&mut self, compute: &Action) -> Result<Option<Vec<u8>>> {
        let Some(wanted) = self.schedule.shape().receive_before(compute) else {
            return Ok(None);
        };
        let peer = self.peer(&wanted);
        loop {
            if let Some(message) = self.arrived.remove(&wanted) {
                return Ok(Some(message));
            }
            let next = self.posted[peer].pop_front();
            let (receive, bytes) = next.expect("a checked schedule receives before it computes");
            let start = self.now();
            let message = self.pp.receive(bytes, peer)?;
            self.record(&receive, start);
            self.arrived.insert(receive, message);
        }
    }
}
