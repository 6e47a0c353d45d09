//! Rank 0's reports: to burn-train's event processor, to the metrics file, and to the summary.
//!
//! burn-train counts in epochs of a training and a validation split; Megatron counts in steps and
//! evaluates every so many. So an *interval*, the steps up to an evaluation and the evaluation
//! itself, is what burn-train sees as an epoch.

use super::metrics::{EvalReport, StepReport};
use super::strategy::Shim;
use burn::data::dataloader::Progress;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EventProcessorTraining, Interrupter, LearnerEvent, SupervisedTrainingEventProcessor,
    TrainingItem,
};
use burn_megatron::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Where rank 0 reports.
pub struct Feed {
    processor: SupervisedTrainingEventProcessor<Shim>,
    store: Arc<EventStoreClient>,
    interrupter: Interrupter,
    metrics: Option<MetricsFile>,
    remarks: Remarks,
    /// Every step's speed, loss and place, for the summary.
    pub history: History,
}

/// What the summary at the end is made from.
#[derive(Debug, Default, Clone)]
pub struct History {
    pub first: Option<StepReport>,
    pub last: Option<StepReport>,
    /// Tokens per second of every step.
    pub speeds: Vec<f64>,
    /// The best mean validation loss, and the interval (from 1) it was measured at the end of.
    pub best_validation: Option<(f64, usize)>,
}

/// A split's position, as burn-train wants it.
fn progress(done: usize, total: usize) -> Progress {
    Progress::new(done, total, Some("steps".into()))
}

impl Feed {
    pub fn new(
        processor: SupervisedTrainingEventProcessor<Shim>,
        store: Arc<EventStoreClient>,
        interrupter: Interrupter,
        metrics: Option<MetricsFile>,
        remarks: Remarks,
    ) -> Self {
        Feed {
            processor,
            store,
            interrupter,
            metrics,
            remarks,
            history: History::default(),
        }
    }

    /// The event processor, which burn-train wants back, and what the summary needs.
    pub fn into_parts(self) -> (SupervisedTrainingEventProcessor<Shim>, History) {
        (self.processor, self.history)
    }

    /// Hands an event to burn-train; a metric that failed stops the run through the interrupter.
    fn train(&mut self, event: LearnerEvent<StepReport>) {
        let done = self.processor.process_train(event);
        self.interrupter.fail_on_error(done);
    }

    fn valid(&mut self, event: LearnerEvent<EvalReport>) {
        let done = self.processor.process_valid(event);
        self.interrupter.fail_on_error(done);
    }

    /// Has lines printed below the next step's, where lines are printed.
    pub fn remark(&self, lines: Vec<String>) {
        self.remarks.add(lines);
    }

    pub fn start_interval(&mut self, interval: usize, steps: usize) {
        self.train(LearnerEvent::StartSplit {
            epoch_number: interval,
            total_items: steps,
        });
    }

    /// Reports step `done` of the interval's `total`.
    ///
    /// # Errors
    /// The metrics file could not be written.
    pub fn step(&mut self, report: StepReport, done: usize, total: usize) -> Result<()> {
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&report)?;
        }
        if !report.grad_norm.is_finite() {
            let (iteration, skipped) = (report.iteration, report.skipped_iterations);
            let line = match report.loss_scale {
                Some(scale) => format!(
                    "iteration {iteration} updated nothing: its gradients overflow at a loss scale of {scale} \
                     ({skipped} so far)"
                ),
                None => format!(
                    "warning: the gradients of iteration {iteration} are not finite: it updated nothing, the \
                     {skipped}. such"
                ),
            };
            self.remark(vec![line]);
        }
        self.history.speeds.push(report.tokens_per_second);
        self.history.first.get_or_insert_with(|| report.clone());
        self.history.last = Some(report.clone());
        let (at, iteration) = (progress(done, total), Some(report.iteration));
        let rate = Some(report.learning_rate.into());
        let item = TrainingItem::new(report, at, iteration, rate);
        self.train(LearnerEvent::ProcessedItem(item));
        Ok(())
    }

    pub fn end_steps(&mut self, interval: usize) {
        self.train(LearnerEvent::EndSplit(interval));
    }

    pub fn start_evaluation(&mut self, interval: usize, batches: usize) {
        self.valid(LearnerEvent::StartSplit {
            epoch_number: interval,
            total_items: batches,
        });
    }

    pub fn evaluated(&mut self, report: EvalReport, done: usize, total: usize) {
        let item = TrainingItem::new(report, progress(done, total), None, None);
        self.valid(LearnerEvent::ProcessedItem(item));
    }

    pub fn end_evaluation(&mut self, interval: usize) {
        self.valid(LearnerEvent::EndSplit(interval));
    }

    pub fn end_interval(&mut self, interval: usize) {
        self.train(LearnerEvent::EndEpoch(interval));
    }

    /// Waits until everything reported is stored, and looks up the best validation loss.
    pub fn finish(&mut self) {
        use burn::train::metric::store::{Aggregate, Direction, Split};
        let flushed = self.processor.flush();
        self.interrupter.fail_on_error(flushed);
        let (name, mean) = (super::metrics::LOSS, Aggregate::Mean);
        let best = self
            .store
            .find_epoch(name, mean, Direction::Lowest, &Split::Valid);
        self.history.best_validation = best.and_then(|interval| {
            let loss = self.store.find_metric(name, interval, mean, &Split::Valid);
            loss.map(|loss| (loss, interval))
        });
    }
}

/// What is said beside the metrics, on its way to the renderer, whose events have no place for it.
#[derive(Debug, Default, Clone)]
pub struct Remarks(Arc<Mutex<Vec<String>>>);

impl Remarks {
    fn add(&self, lines: Vec<String>) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(lines);
    }

    /// What waits to be printed.
    pub fn take(&self) -> Vec<String> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *waiting)
    }
}

/// `--metrics-file`: a JSON line per step, on disk as soon as the step is done.
pub struct MetricsFile {
    file: File,
    path: PathBuf,
}

impl MetricsFile {
    /// Creates the file, replacing one of that name; of a run that goes on after `iteration`, the lines up
    /// to it stay.
    ///
    /// # Errors
    /// It could not be created.
    pub fn after(path: &Path, iteration: usize) -> Result<Self> {
        let failed = |e| Error::io(path, e);
        let before = match iteration {
            0 => String::new(),
            _ => std::fs::read_to_string(path).unwrap_or_default(),
        };
        let mut file = File::create(path).map_err(failed)?;
        for line in before.lines() {
            let step: Option<StepReport> = serde_json::from_str(line).ok();
            if step.is_some_and(|step| step.iteration <= iteration) {
                file.write_all(format!("{line}\n").as_bytes())
                    .map_err(failed)?;
            }
        }
        let path = path.to_path_buf();
        Ok(MetricsFile { file, path })
    }

    fn write(&mut self, report: &StepReport) -> Result<()> {
        let mut line = serde_json::to_vec(report).map_err(|e| Error::io(&self.path, e.into()))?;
        line.push(b'\n');
        // One unbuffered write per line: whoever reads the file never sees half of one.
        let written = self.file.write_all(&line);
        written.map_err(|e| Error::io(&self.path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_survive_the_metrics_file_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut metrics = MetricsFile::after(&path, 0).unwrap();
        let losses = [5.084_334_f32, f32::MIN_POSITIVE, 1.0 / 3.0, 7.25e-12];
        for (i, &lm_loss) in losses.iter().enumerate() {
            let report = StepReport {
                iteration: i + 1,
                lm_loss,
                grad_norm: 0.1 + 0.2,
                learning_rate: 1e-4 / 3.0,
                consumed_samples: 8,
                skipped_iterations: 0,
                loss_scale: None,
                tokens_per_second: 1234.5,
                step_time_s: 0.01,
            };
            metrics.write(&report).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let read: Vec<StepReport> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(read.len(), losses.len());
        for (report, loss) in read.iter().zip(losses) {
            assert_eq!(report.lm_loss.to_bits(), loss.to_bits());
            assert_eq!(report.grad_norm.to_bits(), (0.1_f64 + 0.2).to_bits());
        }
    }
}
