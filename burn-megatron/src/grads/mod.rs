//! Gradients after the backward passes of a step, in the order in which they are finished:
//! data-parallel sum, sum of tied embeddings, sum of partial gradients over tensor-parallel ranks, global
//! norm, clipping. Megatron's `distributed/finalize_model_grads.py` and
//! `optimizer/clip_grads.py`.

use crate::comm::{Communicator, ReduceOp, all_reduce_f64};
use crate::error::Result;
use crate::launch::ProcessGroups;
use crate::shard::ParamRecord;

/// Elements per all-reduce (Megatron's `--ddp-bucket-size`).
pub const DEFAULT_BUCKET_ELEMENTS: usize = 40_000_000;

/// Keeps clipping finite for a norm of 0, as Megatron's `1e-6`.
const NORM_EPSILON: f64 = 1e-6;

/// Sums flat gradients over the data-parallel group, bucket by bucket.
pub fn all_reduce_buckets(
    gradients: &mut [f32],
    dp: &dyn Communicator,
    bucket: usize,
) -> Result<()> {
    if dp.size() == 1 {
        return Ok(());
    }
    gradients
        .chunks_mut(bucket.max(1))
        .try_for_each(|bucket| dp.all_reduce(bucket, ReduceOp::Sum))
}

/// Sums the gradients of what the first and the last pipeline stage both hold, over these two.
/// Nothing to do on the ranks between them.
pub fn all_reduce_tied(
    gradients: &mut [f32],
    params: &[ParamRecord],
    embedding: &dyn Communicator,
) -> Result<()> {
    let tied = params.iter().filter(|param| param.spec.tied_over_stages);
    tied.map(|param| param.range.clone())
        .try_for_each(|range| embedding.all_reduce(&mut gradients[range], ReduceOp::Sum))
}

/// Sums over the tensor-parallel group the gradients of the replicated parameters of which each rank
/// computes a part (Megatron's `_allreduce_non_tensor_model_parallel_grads`), in one call.
pub fn all_reduce_partial(
    gradients: &mut [f32],
    params: &[ParamRecord],
    tp: &dyn Communicator,
) -> Result<()> {
    let partial = || params.iter().filter(|param| param.spec.partial_gradient);
    let mut packed: Vec<f32> = partial()
        .flat_map(|param| &gradients[param.range.clone()])
        .copied()
        .collect();
    if tp.size() == 1 || packed.is_empty() {
        return Ok(());
    }
    tp.all_reduce(&mut packed, ReduceOp::Sum)?;
    let mut rest = &packed[..];
    for param in partial() {
        let (sums, later) = rest.split_at(param.range.len());
        gradients[param.range.clone()].copy_from_slice(sums);
        rest = later;
    }
    Ok(())
}

/// The 2-norm of the whole model's gradient, each parameter counted once: see
/// [`ParamRecord::counts_at`]. The same on every rank of the tensor- and pipeline-parallel groups.
pub fn global_norm(
    gradients: &[f32],
    params: &[ParamRecord],
    groups: &ProcessGroups,
) -> Result<f64> {
    let mine = params.iter().filter(|param| param.counts_at(groups));
    let squares = mine
        .map(|param| sum_of_squares(&gradients[param.range.clone()]))
        .sum();
    let stage = all_reduce_f64(&*groups.tp.comm, squares)?;
    Ok(all_reduce_f64(&*groups.pp.comm, stage)?.sqrt())
}

/// Sums in eight independent f64 lanes: vectorises, and loses nothing at any length.
fn sum_of_squares(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0f64; 8];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    let rest: f64 = rest.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    lanes.iter().sum::<f64>() + rest
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

    #[test]
    fn squares_are_summed_whatever_the_length() {
        for len in 0..40 {
            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let want: f64 = (0..len).map(|i| (i * i) as f64).sum();
            assert_eq!(sum_of_squares(&values), want);
        }
    }
}
