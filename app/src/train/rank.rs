//! One rank's run: steps, evaluations, and what is left behind at the end.

use super::feed::Feed;
use super::memory;
use super::metrics::{EvalReport, StepReport};
use super::plan::Plan;
use super::saving::{Outcome, Saving, Stop, stop_agreed};
use crate::data::BatchSource;
use crate::units::bytes;
use burn::train::Interrupter;
use burn_megatron::Result;
use burn_megatron::checkpoint::Saved;
use burn_megatron::comm::counted::{Account, Collective};
use burn_megatron::launch::{ProcessGroup, ProcessGroups, RankContext};
use burn_megatron::pipeline::{Schedule, Span};
use burn_megatron::train::{MeasuredMemory, MicroBatch, StepVolume, StepVolumes, Trainer};
use std::ops::Range;
use std::time::Instant;

/// How a rank's run ended; the same on every rank, but for the times.
#[derive(Debug, Default, Clone)]
pub struct RankEnd {
    /// Why it ended before the last step, if it did.
    pub stop: Option<Stop>,
    /// The sample's new tokens.
    pub sample: Option<Vec<i64>>,
    pub communication: Communication,
    /// What this rank did in the pipeline in the last step, in seconds of one clock.
    pub spans: Vec<Span>,
    /// The schedule of that step.
    pub schedule: Option<Schedule>,
    /// What every rank's memory went to in the first step.
    pub memory: Vec<MeasuredMemory>,
    /// The newest checkpoint of this run.
    pub saved: Option<Saved>,
    /// Why the last save failed, if it did.
    pub save_failed: Option<String>,
}

/// A kind of communication that is predicted and counted.
pub struct Kind {
    /// The group, as the report names it.
    pub axis: &'static str,
    pub call: Collective,
    group: fn(&ProcessGroups) -> &ProcessGroup,
    pub predicted: fn(&StepVolumes) -> StepVolume,
}

/// Every kind, in the report's order.
pub const KINDS: [Kind; 9] = [
    kind("tp", Collective::AllReduce, |g| &g.tp, |v| v.tp),
    kind("tp", Collective::AllGather, |g| &g.tp, |v| v.tp_gather),
    kind("tp", Collective::ReduceScatter, |g| &g.tp, |v| v.tp_scatter),
    kind("tp", Collective::Broadcast, |g| &g.tp, |v| v.tp_data),
    kind("dp", Collective::AllReduce, |g| &g.dp, |v| v.dp),
    kind("dp", Collective::ReduceScatter, |g| &g.dp, |v| v.dp_scatter),
    kind("dp", Collective::AllGather, |g| &g.dp, |v| v.dp_gather),
    kind("pp", Collective::Send, |g| &g.pp, |v| v.pp),
    kind(
        "embedding",
        Collective::AllReduce,
        |g| &g.embedding,
        |v| v.embedding,
    ),
];

const fn kind(
    axis: &'static str,
    call: Collective,
    group: fn(&ProcessGroups) -> &ProcessGroup,
    predicted: fn(&StepVolumes) -> StepVolume,
) -> Kind {
    Kind {
        axis,
        call,
        group,
        predicted,
    }
}

/// What this rank's communication took over all steps, waiting for slower ranks included; by
/// [`KINDS`].
#[derive(Debug, Default, Clone, Copy)]
pub struct Communication(pub [Account; KINDS.len()]);

impl Communication {
    fn so_far(groups: &ProcessGroups) -> Self {
        Communication(KINDS.map(|kind| (kind.group)(groups).accounts.of(kind.call)))
    }

    /// Adds what was spent since `before`.
    fn add_since(&mut self, before: Communication, groups: &ProcessGroups) {
        let now = Communication::so_far(groups);
        for (total, (now, before)) in self.0.iter_mut().zip(now.0.into_iter().zip(before.0)) {
            *total += now - before;
        }
    }
}

/// The steps up to an evaluation, from 0, for each evaluation in turn; the last may be short.
pub fn intervals(train_iters: usize, eval_interval: usize) -> Vec<Range<usize>> {
    (0..train_iters)
        .step_by(eval_interval.max(1))
        .map(|start| start..train_iters.min(start.saturating_add(eval_interval)))
        .collect()
}

/// Trains on this rank; `feed` is rank 0's.
///
/// # Errors
/// The first thing that failed on this rank. The launcher ends the other ranks and keeps the cause.
pub fn run(
    plan: &Plan,
    rank: &RankContext,
    interrupter: &Interrupter,
    feed: Option<&mut Feed>,
) -> Result<RankEnd> {
    let share = plan.share(rank.groups.dp.comm.rank());
    let reads = rank.reads_data();
    let mut train = match reads {
        true => plan.data.train(share, plan.start.iteration as usize)?,
        false => Box::new(NoBatches),
    };
    let mut valid = match reads {
        true => plan.data.valid(share)?,
        false => plan.data.evaluates().then(|| Box::new(NoBatches) as _),
    };
    let mut this = Rank {
        trainer: Trainer::new(&plan.resolved, rank, plan.init.as_ref())?,
        saving: Saving::new(&plan.config.checkpoint, plan.saved_with(), rank),
        started: plan.started,
        plan,
        groups: &rank.groups,
        interrupter,
        feed,
        end: RankEnd::default(),
    };
    if let Some(checkpoint) = &plan.load {
        this.trainer.load(checkpoint, plan.load_options())?;
    }
    let config = &plan.config;
    let first = plan.start.iteration as usize;
    let all = intervals(config.training.train_iters, config.data.eval_interval);
    let left = (1..).zip(all).filter(|(_, steps)| steps.end > first);
    for (interval, steps) in left {
        let steps = steps.start.max(first)..steps.end;
        let stop = this.train(interval, steps, train.as_mut())?;
        if let (Some(valid), false) = (valid.as_deref_mut(), stop) {
            this.evaluate(interval, valid)?;
        }
        this.report(|feed| feed.end_interval(interval));
        if stop {
            break;
        }
    }
    this.report(Feed::finish);
    this.end.spans = this.trainer.last_step().spans.clone();
    this.end.schedule = Some(this.trainer.schedule().clone());
    this.leave()
}

/// The data of a rank that gets it from another, or needs none.
struct NoBatches;

impl BatchSource for NoBatches {
    fn next(&mut self) -> Result<Vec<MicroBatch>> {
        Ok(Vec::new())
    }
}

/// One rank at work.
struct Rank<'a> {
    plan: &'a Plan,
    groups: &'a ProcessGroups,
    interrupter: &'a Interrupter,
    feed: Option<&'a mut Feed>,
    trainer: Trainer,
    saving: Saving,
    started: Instant,
    end: RankEnd,
}

impl Rank<'_> {
    /// Reports, on the rank that does.
    fn report(&mut self, report: impl FnOnce(&mut Feed)) {
        if let Some(feed) = self.feed.as_deref_mut() {
            report(feed);
        }
    }

    /// Takes the interval's steps; whether the run stops there.
    fn train(
        &mut self,
        interval: usize,
        steps: Range<usize>,
        batches: &mut dyn BatchSource,
    ) -> Result<bool> {
        let total = steps.len();
        self.report(|feed| feed.start_interval(interval, total));
        let mut stop = false;
        let before = Communication::so_far(self.groups);
        for step in steps.clone() {
            let report = train_step(&mut self.trainer, batches)?;
            // What lies on a card, the allocator does not count.
            let counted = self.plan.config.training.device.is_host();
            if counted && self.end.memory.is_empty() {
                self.end.memory = self.trainer.memory_of_all()?.unwrap_or_default();
                let (plan, memory) = (self.plan, self.end.memory.clone());
                self.report(|feed| feed.remark(memory::table(plan, &memory)));
            }
            if let Some(feed) = self.feed.as_deref_mut() {
                feed.step(report, step - steps.start + 1, total)?;
            }
            let outcomes = self.saving.after_step(&self.trainer)?;
            self.tell(outcomes);
            let (config, iteration) = (&self.plan.config, step + 1);
            let world = &*self.groups.world.comm;
            let agreed = stop_agreed(
                world,
                self.interrupter,
                &config.checkpoint,
                iteration,
                self.started,
            )?;
            // After the last step there is nothing left to cut short.
            self.end.stop = agreed.filter(|_| iteration < config.training.train_iters);
            stop = self.end.stop.is_some();
            if stop {
                break;
            }
        }
        // What is still on its way is of these steps.
        self.trainer.wait_for_parameters()?;
        self.end.communication.add_since(before, self.groups);
        self.report(|feed| feed.end_steps(interval));
        Ok(stop)
    }

    /// Evaluates on the next batches of the validation data, as Megatron does, not on the same
    /// ones.
    fn evaluate(&mut self, interval: usize, valid: &mut dyn BatchSource) -> Result<()> {
        let batches = self.plan.config.data.eval_iters;
        self.report(|feed| feed.start_evaluation(interval, batches));
        for done in 1..=batches {
            let sum = self.trainer.evaluate(&valid.next()?)?;
            let report = EvalReport {
                loss: sum.sum / sum.tokens,
                tokens: sum.tokens as usize,
            };
            self.report(|feed| feed.evaluated(report, done, batches));
        }
        self.report(|feed| feed.end_evaluation(interval));
        Ok(())
    }

    /// Whether whoever stopped the run waits for its end and nothing else.
    fn leaves_at_once(&self) -> bool {
        self.plan.config.checkpoint.exit_signal_handler && self.end.stop == Some(Stop::Asked)
    }

    /// Keeps and reports what became of saves.
    fn tell(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            let line = match outcome {
                Outcome::Saved(saved, time) => {
                    let line = format!(
                        "saved iteration {} to {} ({}, {:.1} s)",
                        saved.iteration,
                        saved.path.display(),
                        bytes(saved.bytes),
                        time.as_secs_f64()
                    );
                    self.end.saved = Some(saved);
                    self.end.save_failed = None;
                    line
                }
                Outcome::Failed(iteration, reason) => {
                    let reason = format!("iteration {iteration} was not saved: {reason}");
                    let line = format!("warning: {reason}; the training goes on");
                    self.end.save_failed = Some(reason);
                    line
                }
            };
            self.report(|feed| feed.remark(vec![line]));
        }
    }

    /// Saves the weights and writes the sample.
    fn leave(mut self) -> Result<RankEnd> {
        let outcomes = self.saving.at_end(&self.trainer)?;
        self.tell(outcomes);
        if self.leaves_at_once() {
            return Ok(self.end);
        }
        if let Some(path) = &self.plan.config.training.save_weights {
            self.trainer.save_weights(path)?;
        }
        if let Some(sample) = &self.plan.sample {
            let (prompt, sampling) = (&sample.prompt, &sample.sampling);
            let tokens = self
                .trainer
                .generate(prompt, sample.max_new_tokens, sampling)?;
            self.end.sample = Some(tokens);
        }
        Ok(self.end)
    }
}

/// One step with its time, from waiting for the data to the last reduction.
fn train_step(trainer: &mut Trainer, batches: &mut dyn BatchSource) -> Result<StepReport> {
    let start = Instant::now();
    let batch = batches.next()?;
    let step = trainer.train_step(&batch)?;
    let step_time_s = start.elapsed().as_secs_f64();
    Ok(StepReport {
        iteration: step.iteration,
        lm_loss: step.lm_loss,
        grad_norm: step.grad_norm,
        learning_rate: step.learning_rate,
        consumed_samples: step.consumed_samples,
        skipped_iterations: step.skipped_iterations,
        loss_scale: step.loss_scale,
        tokens_per_second: step.tokens as f64 / step_time_s,
        step_time_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_cover_every_step_once() {
        assert_eq!(intervals(7, 3), [0..3, 3..6, 6..7]);
        assert_eq!(intervals(6, 3), [0..3, 3..6]);
        assert_eq!(intervals(2, usize::MAX).first(), Some(&(0..2)));
        assert!(intervals(0, 5).is_empty());
    }
}
