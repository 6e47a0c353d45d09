//! What a layer is built with: its groups, its device, and the register of its parameters.

use super::{Init, ParamSpec};
use crate::comm::CommRef;
use crate::launch::RankContext;
use burn::module::{Param, ParamId};
use burn::tensor::{Device, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Hands out parameters to the layers of one rank's model and keeps each one's [`ParamSpec`].
///
/// Parameters start as zeros; [`ShardedModel`](super::ShardedModel) fills them once the model is
/// whole, when each has a name.
#[derive(Debug, Clone)]
pub struct ParallelBuilder {
    context: RankContext,
    specs: Arc<Mutex<HashMap<ParamId, ParamSpec>>>,
}

impl ParallelBuilder {
    /// A builder for the model of one rank.
    pub fn new(context: &RankContext) -> Self {
        ParallelBuilder {
            context: context.clone(),
            specs: Arc::default(),
        }
    }

    /// A builder for a model on one rank, with every layer whole.
    pub fn single(device: Device) -> Self {
        ParallelBuilder::new(&RankContext::single(device))
    }

    /// The device of the rank's tensors, with autodiff.
    pub fn device(&self) -> &Device {
        &self.context.device
    }

    /// The rank that builds.
    pub fn context(&self) -> &RankContext {
        &self.context
    }

    /// The tensor-parallel group.
    pub fn tp(&self) -> &CommRef {
        &self.context.groups.tp.comm
    }

    /// A new parameter with this rank's shape of `spec`.
    pub fn param<const D: usize>(&self, spec: ParamSpec) -> Param<Tensor<D>> {
        let value = Tensor::zeros(spec.local_shape(), self.device()).require_grad();
        let param = Param::initialized(ParamId::new(), value);
        let mut specs = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        specs.insert(param.id, spec);
        param
    }

    /// The record of a parameter that is split along `dim` over the tensor-parallel group.
    pub fn split(&self, full_shape: impl Into<Vec<usize>>, dim: usize, init: Init) -> ParamSpec {
        let place = (self.tp().rank(), self.tp().size());
        ParamSpec::split(full_shape, dim, place, init)
    }

    /// The declared record of a parameter; `None` for one that was not made by this builder.
    pub(super) fn spec(&self, id: ParamId) -> Option<ParamSpec> {
        let specs = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        specs.get(&id).cloned()
    }
}
