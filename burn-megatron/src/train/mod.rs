//! Training: a validated configuration, and one rank's trainer, whose
//! [`train_step`](Trainer::train_step) is the whole of a step in order.

mod checkpoint;
mod config;
mod generate;
mod memory;
mod microbatch;
mod passes;
mod rampup;
mod step;
mod volume;

pub use checkpoint::LoadOptions;
pub use config::{BatchConfig, ResolvedConfig, TrainConfig, TrainerConfig};
pub use generate::Sampling;
pub use memory::{MeasuredMemory, RankMemory};
pub use microbatch::{LossSum, MicroBatch};
pub use rampup::{BatchSizes, RampupBatchSize};
pub use step::{PipelineRecord, StepOutput, Trainer};
pub use volume::{StepVolume, StepVolumes};
