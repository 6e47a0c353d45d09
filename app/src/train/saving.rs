//! A rank's checkpoints, and when a run ends before its last step.

use crate::config::CheckpointConfig;
use burn::train::Interrupter;
use burn_megatron::Result;
use burn_megatron::checkpoint::{Retention, SaveTo, Saved, Saver};
use burn_megatron::comm::{Communicator, ReduceOp};
use burn_megatron::launch::RankContext;
use burn_megatron::train::Trainer;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Why a run ended before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Somebody asked, by a signal or from the dashboard.
    Asked,
    /// `--exit-duration-in-mins`
    Duration,
    /// `--exit-interval`
    Interval,
}

/// What became of a save, for whoever watches.
#[derive(Debug, Clone)]
pub enum Outcome {
    Saved(Saved, Duration),
    Failed(u64, String),
}

/// One rank's saves.
pub struct Saving {
    saver: Option<Saver>,
    config: CheckpointConfig,
    run: Value,
    /// The last step that was saved, or tried.
    last: Option<u64>,
    /// The background save under way: its step, and since when.
    under_way: Option<(u64, Instant)>,
}

impl Saving {
    pub fn new(config: &CheckpointConfig, run: Value, rank: &RankContext) -> Self {
        let saver = config.save.as_ref().map(|dir| {
            let to = SaveTo {
                dir: dir.clone(),
                retention: Retention {
                    keep_last: config.keep_last,
                    save_retain_interval: config.save_retain_interval,
                },
            };
            Saver::new(to, rank.groups.saver.comm.clone())
        });
        Saving {
            saver,
            config: config.clone(),
            run,
            last: None,
            under_way: None,
        }
    }

    /// Saves after a step, if it is time to. Returns what has become of saves since.
    pub fn after_step(&mut self, trainer: &Trainer) -> Result<Vec<Outcome>> {
        let iteration = trainer.progress().iteration;
        let mut outcomes: Vec<Outcome> = self.finished().into_iter().collect();
        let interval = self.config.save_interval;
        if interval.is_some_and(|interval| iteration.is_multiple_of(interval as u64)) {
            outcomes.extend(self.save(trainer, self.config.async_save)?);
        }
        Ok(outcomes)
    }

    /// Saves the last step, if it was not, and waits until everything is on the disk.
    pub fn at_end(&mut self, trainer: &Trainer) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        if self.last != Some(trainer.progress().iteration) {
            outcomes.extend(self.save(trainer, false)?);
        }
        outcomes.extend(self.wait());
        Ok(outcomes)
    }

    fn save(&mut self, trainer: &Trainer, in_background: bool) -> Result<Vec<Outcome>> {
        let mut outcomes: Vec<Outcome> = self.wait().into_iter().collect();
        let Some(saver) = &mut self.saver else {
            return Ok(outcomes);
        };
        let iteration = trainer.progress().iteration;
        self.last = Some(iteration);
        let (snapshot, start) = (trainer.snapshot(self.run.clone()), Instant::now());
        if in_background {
            // The one before was waited for.
            saver.save_in_background(snapshot)?;
            self.under_way = Some((iteration, start));
        } else {
            let saved = saver.save(&snapshot);
            outcomes.push(outcome(saved, iteration, start));
        }
        Ok(outcomes)
    }

    fn finished(&mut self) -> Option<Outcome> {
        let saved = self.saver.as_mut()?.finished()?;
        let (iteration, start) = self.under_way.take()?;
        Some(outcome(saved, iteration, start))
    }

    fn wait(&mut self) -> Option<Outcome> {
        let saved = self.saver.as_mut()?.wait()?;
        let (iteration, start) = self.under_way.take()?;
        Some(outcome(saved, iteration, start))
    }
}

fn outcome(saved: Result<Saved>, iteration: u64, start: Instant) -> Outcome {
    match saved {
        Ok(saved) => Outcome::Saved(saved, start.elapsed()),
        Err(error) => Outcome::Failed(iteration, error.to_string()),
    }
}

/// Why all ranks stop after this step, if they do.
///
/// The interrupter is set at any moment, by a signal or by the dashboard, and the ranks look at it, and
/// at their clocks, at different moments: acting on one's own view would leave a rank waiting in a
/// collective that the others never enter. So each rank contributes what it saw and all act on the
/// maximum, which is one value for the whole world at one step, whatever the transport.
pub fn stop_agreed(
    world: &dyn Communicator,
    interrupter: &Interrupter,
    config: &CheckpointConfig,
    iteration: usize,
    started: Instant,
) -> Result<Option<Stop>> {
    let minutes = config.exit_duration_in_mins;
    let over = minutes.is_some_and(|minutes| started.elapsed().as_secs_f64() >= 60.0 * minutes);
    let mine = match (interrupter.should_stop(), over) {
        (true, _) => 2.0,
        (_, true) => 1.0,
        _ => 0.0,
    };
    let mut all = [mine];
    world.all_reduce(&mut all, ReduceOp::Max)?;
    let interval = config.exit_interval;
    Ok(match all[0] {
        2.0 => Some(Stop::Asked),
        1.0 => Some(Stop::Duration),
        _ if interval.is_some_and(|n| iteration.is_multiple_of(n)) => Some(Stop::Interval),
        _ => None,
    })
}
