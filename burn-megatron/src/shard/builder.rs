//! What a layer is built with: its groups, its device, and the register of its parameters.

use super::{Init, ParamSpec, Sharding};
use crate::comm::CommRef;
use crate::dropout::HiddenDropout;
use crate::launch::RankContext;
use crate::{Kernels, Precision};
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
    sequence_parallel: bool,
    precision: Precision,
    kernels: Kernels,
    /// Bytes that the rank had allocated before the model, where they are counted.
    memory_before: Option<u64>,
    specs: Arc<Mutex<HashMap<ParamId, ParamSpec>>>,
}

impl ParallelBuilder {
    /// A builder for the model of one rank.
    pub fn new(context: &RankContext) -> Self {
        ParallelBuilder {
            context: context.clone(),
            sequence_parallel: false,
            precision: Precision::default(),
            kernels: Kernels::default(),
            memory_before: context.memory.current(),
            specs: Arc::default(),
        }
    }

    /// Builds layers for sequence parallelism: outside of the tensor-parallel regions, each rank of the
    /// tensor-parallel group has its part of the sequence, `[s/t, b, h]`. (Korthikanti et al. 2022.)
    /// Without effect on a group of one.
    pub fn with_sequence_parallel(self, sequence_parallel: bool) -> Self {
        ParallelBuilder {
            sequence_parallel: sequence_parallel && self.tp().size() > 1,
            ..self
        }
    }

    /// Makes parameters of this type; activations follow them. What a forward joins with them, such as
    /// constants of your own, must have the same type: Burn refuses to mix.
    pub fn with_precision(self, precision: Precision) -> Self {
        ParallelBuilder { precision, ..self }
    }

    /// Which kernels the layers' operations take: fused ones where there are any, unless said otherwise.
    pub fn with_kernels(self, kernels: Kernels) -> Self {
        ParallelBuilder { kernels, ..self }
    }

    /// Which kernels the layers' operations take.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// The type of the model's parameters.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Bytes that the rank has allocated since the builder was made, where they are counted.
    pub(super) fn allocated(&self) -> Option<u64> {
        let now = self.context.memory.current()?;
        Some(now.saturating_sub(self.memory_before?))
    }

    /// Whether layers exchange parts of the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel
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

    /// A new parameter with this rank's shape of `spec`. Under sequence parallelism, the gradient of a
    /// replicated one is the sum of the ranks': each has seen its own positions, or its own heads.
    pub fn param<const D: usize>(&self, spec: ParamSpec) -> Param<Tensor<D>> {
        let spec = self.under_sequence_parallelism(spec);
        let options = (self.device(), self.precision.dtype());
        let value = Tensor::zeros(spec.local_shape(), options).require_grad();
        let param = Param::initialized(ParamId::new(), value);
        let mut specs = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        specs.insert(param.id, spec);
        param
    }

    /// Dropout of `p` on what layers pass on: `[s, b, h]`, or the rank's positions of it.
    pub fn hidden_dropout(&self, p: f64) -> HiddenDropout {
        let (part, parts) = self.sequence_part();
        HiddenDropout {
            p,
            part,
            parts,
            kernels: self.kernels,
        }
    }

    /// Which part of the sequence this rank has between the tensor-parallel regions, of how many.
    pub fn sequence_part(&self) -> (usize, usize) {
        match self.sequence_parallel {
            true => (self.tp().rank(), self.tp().size()),
            false => (0, 1),
        }
    }

    /// The record of a parameter that is split along `dim` over the tensor-parallel group.
    pub fn split(&self, full_shape: impl Into<Vec<usize>>, dim: usize, init: Init) -> ParamSpec {
        let place = (self.tp().rank(), self.tp().size());
        ParamSpec::split(full_shape, dim, place, init)
    }

    pub(super) fn under_sequence_parallelism(&self, spec: ParamSpec) -> ParamSpec {
        let partial = self.sequence_parallel && spec.sharding == Sharding::Replicated;
        let partial = partial || spec.partial_gradient;
        spec.with_partial_gradient(partial)
    }

    /// The declared record of a parameter; `None` for one that was not made by this builder.
    pub(super) fn spec(&self, id: ParamId) -> Option<ParamSpec> {
        let specs = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        specs.get(&id).cloned()
    }
}
