//! Megatron-LM's parallelism for models written in Burn.

mod allocator;
pub mod autograd;
pub mod comm;
pub mod data;
mod error;
pub mod grads;
pub mod launch;
pub mod layers;
pub mod models;
pub mod optim;
pub mod prelude;
pub mod random;
pub mod shard;
pub mod topology;
pub mod train;

pub use allocator::keep_freed_memory;
pub use error::{Error, ErrorKind, Result, Violation};
