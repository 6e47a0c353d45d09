//! Megatron-LM's parallelism for models written in Burn: tensor, sequence, pipeline and data
//! parallelism, with the collectives placed by hand inside the model.
//!
//! In the order of one training step:
//! [`launch`] starts the ranks of a [`topology`]; [`layers`] are built with a
//! [`ParallelBuilder`](shard::ParallelBuilder), which keeps the [`shard`] of every parameter;
//! [`data`] brings a rank's samples; [`train::Trainer::train_step`] runs the stages of a
//! [model](models) as the [`pipeline`]'s schedule says, forward and, through the operations of
//! [`autograd`], backward; [`grads`] sums and clips the gradients; [`optim`] updates the weights. [`comm`] is below them all.
//!
//! Start from [`prelude`], and implement [`models::Stage`] for a model of your own.

pub mod autograd;
pub mod checkpoint;
pub mod comm;
pub mod data;
mod device;
pub mod dropout;
mod error;
pub mod grads;
pub mod launch;
pub mod layers;
pub mod memory;
pub mod models;
pub mod optim;
pub mod pipeline;
mod precision;
pub mod prelude;
pub mod shard;
pub mod topology;
pub mod train;

pub use burn_megatron_kernels::{Kernels, random};
pub use device::RankDevice;
pub use error::{Error, ErrorKind, Result, Violation};
pub use memory::keep_freed_memory;
pub use precision::Precision;
