//! The progress lines: a burn-train renderer for logs, pipes and `--no-tui`.

use super::feed::Remarks;
use super::metrics::{GRAD_NORM, LEARNING_RATE, LOSS, STEP_TIME, TOKENS_PER_SECOND};
use crate::units::{duration, grouped};
use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use burn_megatron::checkpoint::Progress;
use burn_megatron::train::BatchSizes;
use std::collections::HashMap;
use std::io::Write;
use std::time::Duration;

/// Batches of an evaluation that need no word before it: it is over soon.
const QUICK_EVALUATION: usize = 10;

/// What the lines need beside the metrics.
#[derive(Debug, Clone, Copy)]
pub struct LineConfig {
    /// Steps and samples before the run, of a checkpoint.
    pub start: Progress,
    pub train_iters: usize,
    pub log_interval: usize,
    pub sizes: BatchSizes,
}

/// Prints one line per log interval, and one per evaluation.
///
/// Loss, norm and rate are the step's own; tokens/s and ms/step are means since the last line.
pub struct Lines<W> {
    config: LineConfig,
    remarks: Remarks,
    out: W,
    names: HashMap<MetricId, String>,
    /// The latest value of each metric of the split under way.
    values: HashMap<String, f64>,
    iteration: usize,
    /// Samples of all steps so far.
    consumed: u64,
    validating: bool,
    /// Steps, tokens and seconds since the last line.
    since: (usize, f64, f64),
    /// Steps and seconds in all; the first step, which pays for warming up, left out.
    all: (usize, f64),
}

impl<W: Write> Lines<W> {
    pub fn new(config: LineConfig, remarks: Remarks, out: W) -> Self {
        Lines {
            config,
            remarks,
            out,
            names: HashMap::new(),
            values: HashMap::new(),
            iteration: config.start.iteration as usize,
            consumed: config.start.consumed_samples,
            validating: false,
            since: (0, 0.0, 0.0),
            all: (0, 0.0),
        }
    }

    fn value(&self, name: &str) -> f64 {
        self.values.get(name).copied().unwrap_or(f64::NAN)
    }

    /// A reader that went away (a closed pipe) must not end a training.
    fn print(&mut self, line: &str) {
        let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
    }

    fn keep(&mut self, state: MetricState) {
        let MetricState::Numeric(entry, Some(value)) = state else {
            return;
        };
        // At the end of a split burn-train adds the split's mean: what an evaluation is about, but
        // not one more step.
        if matches!(value, NumericEntry::Final(_)) != self.validating {
            return;
        }
        if let Some(name) = self.names.get(&entry.metric_id) {
            self.values.insert(name.clone(), value.current());
        }
    }

    fn step_done(&mut self) {
        self.iteration += 1;
        self.consumed += self.config.sizes.at(self.consumed) as u64;
        let seconds = self.value(STEP_TIME);
        let tokens = self.value(TOKENS_PER_SECOND) * seconds;
        let (steps, t, s) = self.since;
        self.since = (steps + 1, t + tokens, s + seconds);
        let first = self.config.start.iteration as usize + 1;
        if self.iteration > first {
            self.all = (self.all.0 + 1, self.all.1 + seconds);
        }
        let i = self.iteration;
        let due = i.is_multiple_of(self.config.log_interval);
        if i == first || due || i == self.config.train_iters {
            let line = self.line();
            self.print(&line);
            self.since = (0, 0.0, 0.0);
        }
        for remark in self.remarks.take() {
            self.print(&remark);
        }
    }

    fn line(&self) -> String {
        let LineConfig { train_iters, .. } = self.config;
        let (steps, tokens, seconds) = self.since;
        let remaining = train_iters.saturating_sub(self.iteration);
        let per_step = match self.all {
            (0, _) => seconds / steps as f64,
            (n, s) => s / n as f64,
        };
        let eta = Duration::try_from_secs_f64(per_step * remaining as f64).unwrap_or_default();
        format!(
            "iteration {:>width$}/{train_iters} | loss {:.4} | grad norm {:.3} | lr {:.2e} | \
             {} tokens/s | {:.0} ms/step | consumed {} samples | ETA {}",
            self.iteration,
            self.value(LOSS),
            self.value(GRAD_NORM),
            self.value(LEARNING_RATE),
            grouped((tokens / seconds) as u64),
            1000.0 * seconds / steps as f64,
            grouped(self.consumed),
            duration(eta),
            width = train_iters.to_string().len(),
        )
    }
}

impl<W: Write + Send + Sync> MetricsRendererTraining for Lines<W> {
    fn update_train(&mut self, state: MetricState) {
        self.keep(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.keep(state);
    }

    /// The program prints its own report.
    fn on_train_end(
        &mut self,
        _: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl<W: Write + Send> TrainingProgressLogger for Lines<W> {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn start_split(&mut self, split: &str, batches: usize) {
        self.validating = split == "valid";
        self.values.clear();
        if self.validating && batches > QUICK_EVALUATION {
            let line = format!(
                "validating after iteration {} on {batches} global batches",
                self.iteration
            );
            self.print(&line);
        }
    }

    fn update_split(&mut self, _: usize) {
        if !self.validating {
            self.step_done();
        }
    }

    fn end_split(&mut self) {
        if self.validating {
            let line = format!(
                "validation after iteration {} | loss {:.4}",
                self.iteration,
                self.value(LOSS)
            );
            self.print(&line);
        }
        self.validating = false;
    }

    fn update_epoch(&mut self, _: usize) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl<W: Write + Send + Sync> MetricsRenderer for Lines<W> {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        let name = definition.name.to_string();
        self.names.insert(definition.metric_id, name);
    }
}

/// A renderer must also serve burn-train's evaluator, which the program does not use.
impl<W: Write + Send + Sync> MetricsRendererEvaluation for Lines<W> {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl<W: Write + Send> EvaluationProgressLogger for Lines<W> {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::train::metric::{MetricAttributes, MetricEntry, SerializedEntry};
    use std::sync::Arc;

    const NAMES: [&str; 5] = [LOSS, GRAD_NORM, LEARNING_RATE, TOKENS_PER_SECOND, STEP_TIME];

    fn id(name: &str) -> MetricId {
        MetricId::new(Arc::new(name.into()))
    }

    fn state(name: &str, value: NumericEntry) -> MetricState {
        let text = SerializedEntry::new(String::new(), String::new());
        MetricState::Numeric(MetricEntry::new(id(name), text), Some(value))
    }

    fn step(lines: &mut Lines<Vec<u8>>, values: [f64; 5]) {
        for (name, value) in NAMES.into_iter().zip(values) {
            lines.update_train(state(name, NumericEntry::Value(value)));
        }
        lines.update_split(0);
    }

    #[test]
    fn one_line_per_interval_and_evaluation() {
        let config = LineConfig {
            start: Progress::default(),
            train_iters: 300,
            log_interval: 2,
            sizes: BatchSizes {
                whole: 16,
                rampup: None,
            },
        };
        let mut lines = Lines::new(config, Remarks::default(), Vec::new());
        for name in NAMES {
            lines.register_metric(MetricDefinition {
                metric_id: id(name),
                name: Arc::new(name.into()),
                description: None,
                attributes: MetricAttributes::None,
            });
        }
        lines.start_split("train", 3);
        step(&mut lines, [6.5, 1.25, 0.0, 1000.0, 2.0]);
        step(&mut lines, [6.25, 1.5, 1e-3, 5000.0, 0.4]);
        step(&mut lines, [6.0, 1.5, 1e-3, 5000.0, 0.4]);
        // A split's mean is not a step.
        lines.update_train(state(LOSS, NumericEntry::Final(9.0)));
        lines.end_split();
        lines.start_split("valid", 1);
        lines.update_valid(state(LOSS, NumericEntry::Value(5.5)));
        lines.update_split(1);
        lines.update_valid(state(LOSS, NumericEntry::Final(5.75)));
        lines.end_split();
        let expected = "\
iteration   1/300 | loss 6.5000 | grad norm 1.250 | lr 0.00e0 | 1,000 tokens/s | 2000 ms/step | \
consumed 16 samples | ETA 9m58s
iteration   2/300 | loss 6.2500 | grad norm 1.500 | lr 1.00e-3 | 5,000 tokens/s | 400 ms/step | \
consumed 32 samples | ETA 1m59s
validation after iteration 3 | loss 5.7500
";
        assert_eq!(String::from_utf8(lines.out).unwrap(), expected);
    }
}
