//! What a model of your own usually needs.

pub use crate::autograd::{
    GeluApproximation, VocabShard, copy_to_tensor_parallel_region,
    gather_from_tensor_parallel_region, gelu, linear, reached, recompute,
    reduce_from_tensor_parallel_region, scatter_to_tensor_parallel_region,
    vocab_parallel_cross_entropy,
};
pub use crate::comm::{CommRef, Communicator};
pub use crate::dropout::PassContext;
pub use crate::launch::{DEFAULT_TIMEOUT, RankContext, run_ranks};
pub use crate::layers::*;
pub use crate::models::{Stage, StageInput};
pub use crate::optim::{MixedPrecisionConfig, OptimizerConfig};
pub use crate::shard::{FullWeights, Init, ParallelBuilder, ParamSpec, ShardedModel};
pub use crate::topology::{Axes, DEFAULT_ORDER, RankGrid, StageLayers};
pub use crate::train::{BatchConfig, MicroBatch, StepOutput, Trainer, TrainerConfig};
pub use crate::{Error, Kernels, Precision, Result};
