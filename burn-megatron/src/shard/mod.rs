//! Which part of each parameter a rank holds.
//!
//! A layer asks its [`ParallelBuilder`] for parameters and declares how each is sharded; a
//! [`ShardedModel`] then knows every parameter of a model by name, full shape and shard, and fills,
//! flattens, loads and gathers them all in one way. Sharding is a record beside the module: nothing
//! is attached to tensors.

mod builder;
mod flat;
mod model;
mod spec;
mod weights;

pub use builder::ParallelBuilder;
pub use flat::FlatBuffer;
pub(crate) use flat::{slice, upload};
pub use model::{ParamRecord, ShardedModel};
pub(crate) use model::{f32s, host_data};
pub use spec::{Init, ParamSpec, Sharding};
pub use weights::FullWeights;
