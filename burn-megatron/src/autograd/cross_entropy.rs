//! Cross entropy over logits that are split by vocabulary, without ever gathering them.
//!
//! Shapes: `n` tokens (any leading dimensions, flattened), `v` this rank's vocabulary rows, `K` the
//! vocabulary without padding. Megatron's `tensor_parallel/cross_entropy.py`, with two differences:
//! padding rows are masked, so that the loss does not depend on tp (Megatron-LM #1754, #1736), and
//! label smoothing averages over all `K` entries instead of the rank's own.

use super::{ParallelOps, read_sync, to_host};
use crate::comm::{CommRef, ReduceOp, raise};
use crate::topology::shard_range;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{DType, IndexingUpdateOp, Int, Shape, Tensor, TensorData};
use burn_megatron_kernels::{narrowed, widened};
use std::ops::Range;

/// Which part of the vocabulary a rank's logits cover, and who holds the rest.
#[derive(Debug, Clone)]
pub struct VocabShard {
    /// Global ids of this rank's rows, padding included.
    pub rows: Range<usize>,
    /// Entries of the vocabulary; rows from here on are padding and take no probability.
    pub vocab_size: usize,
    /// `a` of label smoothing, `0 <= a < 1`; 0 for none.
    pub label_smoothing: f64,
    pub tp: CommRef,
}

impl VocabShard {
    /// This rank's part of a vocabulary that is split evenly, without label smoothing.
    ///
    /// # Panics
    /// If `padded_vocab_size` is not a multiple of the group's size.
    pub fn new(vocab_size: usize, padded_vocab_size: usize, tp: &CommRef) -> Self {
        VocabShard {
            rows: shard_range(padded_vocab_size, tp.size(), tp.rank()),
            vocab_size,
            label_smoothing: 0.0,
            tp: tp.clone(),
        }
    }
}

/// Cross entropy per token, in f32.
///
/// # Shapes
/// - `logits`: `[n, v]`, this rank's columns
/// - `target`: `[n]`, global ids below `vocab_size`
/// - output: `[n]`, the same on every rank
///
/// Two all-reduces of `n` and `2n` values (`3n` with label smoothing).
pub fn vocab_parallel_cross_entropy(
    logits: Tensor<2>,
    target: Tensor<1, Int>,
    shard: &VocabShard,
) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::vocab_parallel_cross_entropy(
        logits.into_dispatch(),
        target.into_dispatch(),
        shard.clone(),
    ))
}

/// What the backward needs: the softmax over the whole vocabulary, this rank's columns `[n, v]`;
/// each token's local column `[n, 1]`; and `-(1 - smoothing)` where that column is the target's,
/// else 0, `[n, 1]`.
type Saved<B> = (FloatTensor<B>, IntTensor<B>, FloatTensor<B>);

pub(super) fn forward<B: Backend>(
    logits: FloatTensor<B>,
    target: IntTensor<B>,
    shard: &VocabShard,
) -> (FloatTensor<B>, Saved<B>) {
    let device = logits.device();
    let n = logits.shape()[0];
    let logits = widened::<B>(logits);
    let column = |values: Vec<f32>| B::float_from_data(TensorData::new(values, [n, 1]), &device);

    let logits = match padding_bias::<B>(shard, &device) {
        Some(bias) => B::float_add(logits, bias),
        None => logits,
    };
    let mut max = host_column::<B>(B::float_max_dim(logits.clone(), 1));
    shard
        .tp
        .all_reduce(&mut max, ReduceOp::Max)
        .unwrap_or_else(|e| raise(e));
    let shifted = B::float_sub(logits, column(max));

    let (local, owned) = local_targets::<B>(target, shard);
    let index = B::int_from_data(TensorData::new(local, [n, 1]), &device);
    let at_target = host_column::<B>(B::float_gather(1, shifted.clone(), index.clone()));
    let exp = B::float_exp(shifted.clone());
    let sum_exp = host_column::<B>(B::float_sum_dim(exp.clone(), 1));

    // One message: sums of exponentials, the targets' logits, and for smoothing all logits' sums.
    let mut message = sum_exp;
    // Not a product: a column of padding is -inf, and another rank's target may point to one.
    let contribution = |(x, owned): (&f32, &f32)| if *owned > 0.0 { *x } else { 0.0 };
    message.extend(at_target.iter().zip(&owned).map(contribution));
    if shard.label_smoothing > 0.0 {
        message.extend(sum_of_entries::<B>(shifted, shard));
    }
    shard
        .tp
        .all_reduce(&mut message, ReduceOp::Sum)
        .unwrap_or_else(|e| raise(e));

    let (smoothing, entries) = (smoothing(shard), shard.vocab_size as f32);
    let loss = (0..n).map(|i| {
        let log_sum = message[i].ln();
        let loss = log_sum - message[n + i];
        match message.get(2 * n + i) {
            Some(sum) => (1.0 - smoothing) * loss - smoothing * (sum / entries - log_sum),
            None => loss,
        }
    });
    let loss = B::float_from_data(TensorData::new(loss.collect(), [n]), &device);
    message.truncate(n);
    let softmax = B::float_div(exp, column(message));
    let at_target = owned
        .iter()
        .map(|owned| -(1.0 - smoothing) * owned)
        .collect();
    (loss, (softmax, index, column(at_target)))
}

/// Megatron's `a K / (K - 1)`: the weight of the uniform part.
fn smoothing(shard: &VocabShard) -> f32 {
    let entries = shard.vocab_size as f64;
    (shard.label_smoothing * entries / (entries - 1.0).max(1.0)) as f32
}

/// `-inf` for this rank's padding columns, `[1, v]`; `None` where there are none.
fn padding_bias<B: Backend>(shard: &VocabShard, device: &B::Device) -> Option<FloatTensor<B>> {
    if shard.rows.end <= shard.vocab_size {
        return None;
    }
    let bias: Vec<f32> = (shard.rows.clone())
        .map(|row| {
            if row < shard.vocab_size {
                0.0
            } else {
                f32::NEG_INFINITY
            }
        })
        .collect();
    let shape = [1, bias.len()];
    Some(B::float_from_data(TensorData::new(bias, shape), device))
}

/// Each target's column on this rank (0 where another rank owns it), and 1.0 where it is owned.
fn local_targets<B: Backend>(target: IntTensor<B>, shard: &VocabShard) -> (Vec<i64>, Vec<f32>) {
    read_sync(B::int_into_data(target))
        .iter::<i64>()
        .map(|id| {
            let owned = id >= shard.rows.start as i64 && id < shard.rows.end as i64;
            if owned {
                (id - shard.rows.start as i64, 1.0)
            } else {
                (0, 0.0)
            }
        })
        .unzip()
}

/// The sum of each row `[n, v]` over the columns that are entries of the vocabulary.
fn sum_of_entries<B: Backend>(shifted: FloatTensor<B>, shard: &VocabShard) -> Vec<f32> {
    let n = shifted.shape()[0];
    let entries = shard
        .vocab_size
        .saturating_sub(shard.rows.start)
        .min(shard.rows.len());
    if entries == 0 {
        return vec![0.0; n];
    }
    let valid = B::float_slice(shifted, &[(0..n).into(), (0..entries).into()]);
    host_column::<B>(B::float_sum_dim(valid, 1))
}

fn host_column<B: Backend>(x: FloatTensor<B>) -> Vec<f32> {
    to_host::<B>(x).try_into_vec().expect("computed in f32")
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    logits: FloatTensor<Autodiff<B, C>>,
    target: IntTensor<Autodiff<B, C>>,
    shard: VocabShard,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct CrossEntropyBackward;

    impl<B: ParallelOps> Backward<B, 1> for CrossEntropyBackward {
        type State = (Saved<B>, VocabShard, DType);

        /// `softmax - (1 - smoothing) onehot - smoothing / K`, times each token's gradient.
        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let ((softmax, index, at_target), shard, dtype) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                let n = softmax.shape()[0];
                let mut d = B::float_scatter(1, softmax, index, at_target, IndexingUpdateOp::Add);
                if shard.label_smoothing > 0.0 {
                    let uniform = uniform_part::<B>(&shard, &d.device());
                    d = B::float_add(d, uniform);
                }
                let d = B::float_mul(d, B::float_reshape(grad, Shape::new([n, 1])));
                narrowed::<B>(d, dtype)
            });
        }
    }

    let (logits, node) = logits.into_parts();
    match CrossEntropyBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let dtype = logits.dtype();
            let (loss, saved) = forward::<B>(logits, target, &shard);
            prep.finish((saved, shard, dtype), loss)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(B::vocab_parallel_cross_entropy(logits, target, shard))
        }
    }
}

/// `-smoothing / K` for entries of the vocabulary, 0 for padding, `[1, v]`.
fn uniform_part<B: Backend>(shard: &VocabShard, device: &B::Device) -> FloatTensor<B> {
    let each = -smoothing(shard) / shard.vocab_size as f32;
    let part: Vec<f32> = (shard.rows.clone())
        .map(|row| if row < shard.vocab_size { each } else { 0.0 })
        .collect();
    let shape = [1, part.len()];
    B::float_from_data(TensorData::new(part, shape), device)
}
