//! The optimizer over flat buffers, the schedules of learning rate and weight decay, and the loss scale.

mod config;
mod mixed_precision;
mod optimizer;
mod schedule;
mod weight_decay;

pub use config::{OptimizerConfig, OptimizerKind};
pub use mixed_precision::{LossScale, LossScaler, MixedPrecisionConfig};
pub use optimizer::{AdamWConfig, Optimizer, Rule, SgdConfig, StepFactors};
pub use schedule::{LrDecayStyle, LrSchedule, LrScheduleConfig, Warmup, WsdDecayStyle};
pub use weight_decay::{WeightDecayIncrStyle, WeightDecaySchedule};
