//! What a step reports, and the burn-train metrics made from it.

use burn::backend::ExecutionError;
use burn::tensor::TensorReadError;
use burn::train::ItemLazy;
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Adaptor, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes,
    NumericEntry, SerializedEntry,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The metrics' names, as they stand on the dashboard's tabs and in the run's log files.
pub const LOSS: &str = "Loss";
pub const GRAD_NORM: &str = "Grad Norm";
pub const LEARNING_RATE: &str = "Learning Rate";
pub const TOKENS_PER_SECOND: &str = "Tokens per Second";
pub const STEP_TIME: &str = "Step Time";

/// One step, as `--metrics-file` holds it. Numbers are written with as many digits as it takes to
/// read the same bits back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The step, from 1.
    pub iteration: usize,
    /// Mean loss per token of the global batch, before the step.
    pub lm_loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// The rate the step used.
    pub learning_rate: f64,
    /// Samples consumed since the start of training.
    pub consumed_samples: u64,
    /// Steps so far that updated nothing, for gradients that were not finite.
    #[serde(default)]
    pub skipped_iterations: u64,
    /// What the step's loss was multiplied by, under fp16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Tokens of the global batch over the step's time.
    pub tokens_per_second: f64,
    /// Wall time of the step, waiting for data included.
    pub step_time_s: f64,
}

/// One global batch of an evaluation.
#[derive(Debug, Clone)]
pub struct EvalReport {
    /// Mean loss per token.
    pub loss: f64,
    /// The tokens it is the mean of.
    pub tokens: usize,
}

/// Nothing is lazy here: a rank has read its loss back before it reports.
impl ItemLazy for StepReport {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl ItemLazy for EvalReport {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<StepReport> for StepReport {
    fn adapt(&self) -> StepReport {
        self.clone()
    }
}

impl Adaptor<EvalReport> for EvalReport {
    fn adapt(&self) -> EvalReport {
        self.clone()
    }
}

/// A burn-train metric that picks one number, and how many units it is a mean of, from a report.
///
/// burn-train's own loss metric reads a tensor on a device; ours are numbers on the host already.
#[derive(Clone)]
pub struct Reading<I> {
    name: MetricName,
    unit: Option<&'static str>,
    higher_is_better: bool,
    read: fn(&I) -> (f64, usize),
    state: NumericMetricState,
}

impl<I> Reading<I> {
    fn new(name: &str, read: fn(&I) -> (f64, usize)) -> Self {
        Reading {
            name: Arc::new(name.into()),
            unit: None,
            higher_is_better: false,
            read,
            state: NumericMetricState::new(),
        }
    }

    fn format(&self) -> FormatOptions {
        let options = FormatOptions::new(self.name.clone()).precision(4);
        match self.unit {
            Some(unit) => options.unit(unit),
            None => options,
        }
    }
}

/// The metrics of the training split, in the dashboard's order.
pub fn training() -> [Reading<StepReport>; 5] {
    let mut speed = Reading::new(TOKENS_PER_SECOND, |r: &StepReport| (r.tokens_per_second, 1));
    speed.higher_is_better = true;
    let mut time = Reading::new(STEP_TIME, |r: &StepReport| (r.step_time_s, 1));
    time.unit = Some("s");
    [
        Reading::new(LOSS, |r| (f64::from(r.lm_loss), 1)),
        Reading::new(GRAD_NORM, |r| (r.grad_norm, 1)),
        Reading::new(LEARNING_RATE, |r| (r.learning_rate, 1)),
        speed,
        time,
    ]
}

/// The metric of the validation split; same name, so that the dashboard draws both in one plot.
pub fn validation() -> Reading<EvalReport> {
    Reading::new(LOSS, |r| (r.loss, r.tokens))
}

impl<I: Clone + Send + Sync> Metric for Reading<I> {
    type Input = I;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        MetricAttributes::Numeric(NumericAttributes {
            unit: self.unit.map(String::from),
            higher_is_better: self.higher_is_better,
        })
    }

    fn update(&mut self, item: &I, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let (value, count) = (self.read)(item);
        self.state.update(value, count);
        Ok(self.state.compute_update(self.format()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.state.compute_final(self.format()))
    }

    fn clear(&mut self) {
        self.state.reset();
    }
}

impl<I> Numeric for Reading<I> {
    fn value(&self) -> Option<NumericEntry> {
        Some(self.state.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        Some(self.state.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.state.final_value()
    }
}
