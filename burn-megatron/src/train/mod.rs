//! Training: a validated configuration, and one rank's trainer, whose
//! [`train_step`](Trainer::train_step) is the whole of a step in order.

mod checkpoint;
mod config;
mod generate;
mod memory;
mod microbatch;
mod parameters;
mod passes;
mod rampup;
mod step;
mod trainer;
mod volume;

pub use checkpoint::LoadOptions;
pub use config::{BatchConfig, ResolvedConfig, TrainConfig, TrainerConfig};
pub use generate::Sampling;
pub use memory::{MeasuredMemory, RankMemory};
pub use microbatch::{LossSum, MicroBatch};
pub use rampup::{BatchSizes, RampupBatchSize};
pub use step::StepOutput;
pub use trainer::{PipelineRecord, Trainer};
pub use volume::{StepVolume, StepVolumes};
