//! Gradients after the backward passes of a step, in the order in which they are finished:
//! data-parallel sum, sum of tied embeddings, sum of partial gradients over tensor-parallel ranks, global
//! norm, clipping. Megatron's `distributed/finalize_model_grads.py` and
//! `optimizer/clip_grads.py`.

mod as_they_come;
mod buckets;
mod data_parallel;
mod norm;
mod overlap;

pub use as_they_come::HostSums;
pub use buckets::{Buckets, Owned, OwnedPart};
pub use data_parallel::{DataParallel, DataParallelConfig};
pub use norm::SumOfSquares;
pub use overlap::{OverlappedGather, OverlappedReduce};

use crate::comm::{Communicator, ReduceOp};
use crate::error::Result;
use crate::launch::ProcessGroups;
use crate::shard::{FlatBuffer, ParamRecord};

/// Keeps clipping finite for a norm of 0, as Megatron's `1e-6`.
const NORM_EPSILON: f64 = 1e-6;

/// Sums the gradients of what the first and the last pipeline stage both hold, over these two: the elements
/// that this rank owns, which are the same on both. Nothing to do on the ranks between them.
pub fn all_reduce_tied(
    gradients: &mut FlatBuffer,
    params: &[ParamRecord],
    owned: &Owned,
    embedding: &dyn Communicator,
) -> Result<()> {
    if embedding.size() == 1 {
        return Ok(());
    }
    let parts = owned.parts().iter();
    let tied = parts.filter(|part| params[part.param].spec.tied_over_stages);
    tied.map(|part| part.flat.clone()).try_for_each(|range| {
        gradients.change(range, |part| embedding.all_reduce(part, ReduceOp::Sum))
    })
}

/// Sums over the tensor-parallel group the gradients of the replicated parameters of which each rank computes
/// a part (Megatron's `_allreduce_non_tensor_model_parallel_grads`), in one call. They are few: a rank sums
/// those that it does not own as well.
pub fn all_reduce_partial(
    gradients: &mut FlatBuffer,
    params: &[ParamRecord],
    tp: &dyn Communicator,
) -> Result<()> {
    let partial = params.iter().filter(|param| param.spec.partial_gradient);
    let partial: Vec<_> = partial.map(|param| param.range.clone()).collect();
    if tp.size() == 1 || partial.is_empty() {
        return Ok(());
    }
    let mut packed = gradients.slices(&partial).into_host();
    tp.all_reduce(&mut packed, ReduceOp::Sum)?;
    let mut rest = &packed[..];
    for range in partial {
        let (sums, later) = rest.split_at(range.len());
        gradients.change(range, |part| part.copy_from_slice(sums));
        rest = later;
    }
    Ok(())
}

/// The 2-norm of the whole model's gradient from the sums of squares of the ranks' parts: the same on every
/// rank.
pub fn global_norm(squares: SumOfSquares, groups: &ProcessGroups) -> Result<f64> {
    let stage = squares.all_reduce(&*groups.tp.comm)?;
    Ok(stage.all_reduce(&*groups.pp.comm)?.value().sqrt())
}

/// The factor that brings a gradient of norm `norm` down to `clip_grad`: at most 1, and 1 where
/// `clip_grad` is 0 (no clipping).
pub fn clip_coefficient(norm: f64, clip_grad: f64) -> f64 {
    match clip_grad > 0.0 {
        true => (clip_grad / (norm + NORM_EPSILON)).min(1.0),
        false => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_scales_down_and_never_up() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(50.0, 0.0), 1.0);
        assert!((clip_coefficient(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
    }
}
