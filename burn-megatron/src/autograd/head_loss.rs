//! The output layer and its cross entropy as one operation: logits exist for some tokens at a time, and their
//! gradients' products with weight and hidden states are made at once, in the forward.

use super::cross_entropy::VocabShard;
use super::{ParallelOps, to_host};
use crate::comm::{ReduceOp, raise};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch};
use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::Fused;
use burn_megatron_kernels::backward::give_gradients;
use burn_megatron_kernels::flat::is_host;
use burn_megatron_kernels::head_loss::{HeadLoss, HeadShard, Reduce};
use std::sync::Arc;

/// Tokens whose logits exist at once, for a shard of so many rows: on the host 256 for a vocabulary of fifty thousand, 50
/// megabytes of logits, and on a card, whose products want to be large, 4096. Fewer would add to the weight's gradient more
/// often.
fn tokens_at_once(rows: usize, host: bool) -> usize {
    let (logits, least, most) = match host {
        true => (1 << 24, 128, 512),
        false => (1 << 28, 512, 8192),
    };
    let tokens: usize = logits / rows.max(1);
    let power = 1 << tokens.max(1).ilog2();
    usize::clamp(power, least, most)
}

/// Blocks of tokens that are computed, and reduced over the vocabulary's shards, one after another.
pub(crate) fn blocks(tokens: usize, rows: usize, host: bool) -> usize {
    tokens.div_ceil(tokens_at_once(rows, host))
}

/// What the loss needs beside hidden states and weight.
#[derive(Debug, Clone)]
pub struct HeadLossShard {
    vocab: VocabShard,
    /// Global ids.
    targets: Arc<Vec<i64>>,
    /// What each loss is multiplied by in the end.
    d_losses: Arc<Vec<f32>>,
    tokens_at_once: usize,
}

/// Cross entropy of each token, in f32, as
/// [`vocab_parallel_cross_entropy`](super::vocab_parallel_cross_entropy) of `hidden · weightᵀ`, without ever
/// holding all logits; for tensors that have fused kernels, without label smoothing.
///
/// `d_loss` says what each token's loss will be multiplied by on its way to the one that the backward starts from.
/// Where a gradient comes out otherwise, the backward computes everything again.
///
/// # Shapes
/// - `hidden`: `[n, h]`, the same on every rank of the shard's group
/// - `weight`: `[v, h]`, this rank's rows
/// - `target`, `d_loss`: `[n]`
/// - output: `[n]`, the same on every rank
///
/// Two all-reduces of `n` and `2n` values, of some hundreds of tokens at a time; of thousands on a card.
pub fn head_loss(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    target: Tensor<1, Int>,
    d_loss: Vec<f32>,
    vocab: &VocabShard,
) -> Tensor<1> {
    let target = target.into_data();
    let shard = HeadLossShard {
        vocab: vocab.clone(),
        targets: Arc::new(target.iter::<i64>().collect()),
        d_losses: Arc::new(d_loss),
        tokens_at_once: tokens_at_once(vocab.rows.len(), is_host(&hidden.device())),
    };
    let (hidden, weight) = (hidden.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::head_loss(hidden, weight, shard))
}

/// The losses; with `d_losses` as their gradients, also what follows for hidden states and weight.
pub(super) fn forward<B: Fused>(
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    shard: &HeadLossShard,
    d_losses: Option<&[f32]>,
) -> HeadLoss<B> {
    let VocabShard {
        rows,
        vocab_size,
        tp,
        ..
    } = &shard.vocab;
    let local = |id: &i64| usize::try_from(*id).ok().filter(|id| rows.contains(id));
    let targets = shard.targets.iter().map(|id| Some(local(id)? - rows.start));
    let targets: Vec<Option<usize>> = targets.collect();
    let reduce = |values: &mut [f32], how: Reduce| {
        let how = match how {
            Reduce::Sum => ReduceOp::Sum,
            Reduce::Max => ReduceOp::Max,
        };
        tp.all_reduce(values, how).unwrap_or_else(|e| raise(e));
    };
    let kernel = HeadShard {
        targets: &targets,
        known: vocab_size.saturating_sub(rows.start).min(rows.len()),
        d_losses: d_losses.unwrap_or_default(),
        tokens_at_once: shard.tokens_at_once,
        reduce: (tp.size() > 1).then_some(&reduce as _),
    };
    B::fused_head_loss(hidden, weight, &kernel, d_losses.is_some())
}

pub(super) fn autodiff<B: ParallelOps + Fused, C: CheckpointStrategy>(
    hidden: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    shard: HeadLossShard,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct HeadLossBackward;

    impl<B: ParallelOps + Fused> Backward<B, 2> for HeadLossBackward {
        /// Hidden states and weight, their gradients for the losses' expected ones, and the shard.
        type State = (Box<[FloatTensor<B>; 4]>, HeadLossShard);

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |(saved, shard): Self::State, d_losses, _| {
                let [hidden, weight, d_hidden, d_weight] = *saved;
                let d_losses = to_host::<B>(d_losses).try_into_vec();
                let d_losses: Vec<f32> = d_losses.expect("the loss is f32");
                let gradients: [FloatTensor<B>; 2] = match factor(&d_losses, &shard.d_losses) {
                    Some(factor) => [d_hidden, d_weight].map(|d| B::fused_scaled(d, factor)),
                    None => {
                        let loss = forward::<B>(hidden, weight, &shard, Some(&d_losses));
                        loss.gradients.expect("they were asked for").into()
                    }
                };
                gradients.map(Some)
            });
        }
    }

    let ((hidden, hidden_node), (weight, weight_node)) = (hidden.into_parts(), weight.into_parts());
    match HeadLossBackward
        .prepare::<C>([hidden_node, weight_node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let d_losses = Some(&shard.d_losses[..]);
            let loss = forward::<B>(hidden.clone(), weight.clone(), &shard, d_losses);
            let (d_hidden, d_weight) = loss.gradients.expect("they were asked for");
            let saved = Box::new([hidden, weight, d_hidden, d_weight]);
            prep.finish((saved, shard), loss.losses)
        }
        OpsKind::UnTracked(prep) => prep.finish(forward::<B>(hidden, weight, &shard, None).losses),
    }
}

/// The one number that makes `b` to `a`, where there is one.
fn factor(a: &[f32], b: &[f32]) -> Option<f32> {
    let first = b.iter().position(|b| *b != 0.0);
    let factor = first.map_or(1.0, |i| a[i] / b[i]);
    let mut all = a.iter().zip(b);
    all.all(|(a, b)| *a == factor * b).then_some(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_logits_are_of_a_size_that_the_device_likes() {
        let (gpt2, llama3) = (50304, 128_256);
        assert_eq!(tokens_at_once(gpt2, true), 256);
        assert_eq!(tokens_at_once(gpt2 / 8, true), 512);
        assert_eq!(tokens_at_once(llama3, true), 128);
        assert_eq!(tokens_at_once(gpt2, false), 4096);
        assert_eq!(tokens_at_once(llama3 / 8, false), 8192);
        assert_eq!(blocks(2048, gpt2, true), 8);
        assert_eq!(blocks(1, 0, true), 1);
    }
}
