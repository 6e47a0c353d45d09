//! The core of causal attention, with its backward: `softmax(Q Kᵀ · scale, masked) V`.
//!
//! Shapes: `n` heads of keys and values of all samples, `r` query heads for each, `s` sequence, `d` head
//! width. Megatron's `transformer/dot_product_attention.py`; saved for the backward: `q`, `k`, `v` and,
//! unless they are recomputed, the probabilities `[n, r s, s]`. Scores and softmax are computed in f32.
//!
//! The query heads that share a head of keys and values stand one below the other in one matrix: one
//! product serves them all, and its transpose sums their gradients.

use super::{ParallelOps, narrowed, widened};
use crate::dropout::AttentionDropout;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Tensor, TensorData};

/// What Megatron fills masked scores with: its exponential is 0 in f32.
const MASKED_SCORE: f64 = -10_000.0;

/// Attention of each query head by itself, in which a position sees itself and what came before.
///
/// # Shapes
/// - `q`: `[n, r s, d]`, the positions of one query head after another's; `r` is 1 without grouped
///   queries
/// - `k`, `v`: `[n, s, d]`
/// - output: `[n, r s, d]`
pub fn causal_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    options: AttentionOptions,
) -> Tensor<3> {
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    Tensor::from_dispatch(Dispatch::causal_attention(q, k, v, options))
}

/// What the scores are multiplied by, and which probabilities are dropped.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions {
    pub scale: f64,
    /// Its mask is made again in the backward, not kept.
    pub dropout: Option<AttentionDropout>,
    /// Make the probabilities again in the backward instead of keeping them: `n r s²` values less, for
    /// one more product and softmax. (Korthikanti et al. 2022, section 5.)
    pub recompute: bool,
}

/// Returns the output and the probabilities `[n, r s, s]` before dropout.
pub(super) fn forward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: AttentionOptions,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let probabilities = probabilities::<B>(q, k, options.scale);
    let kept = dropped::<B>(probabilities.clone(), options.dropout);
    (B::float_matmul(kept, v), probabilities)
}

fn probabilities<B: Backend>(q: FloatTensor<B>, k: FloatTensor<B>, scale: f64) -> FloatTensor<B> {
    let (rows, s) = (q.shape()[1], k.shape()[1]);
    let (device, dtype) = (q.device(), q.dtype());
    let (q, k) = (widened::<B>(q), widened::<B>(k));
    let scores = B::float_mul_scalar(B::float_matmul(q, B::float_transpose(k)), scale.into());
    let later: Vec<bool> = (0..rows * s).map(|i| i % s > i / s % s).collect();
    let later = B::bool_from_data(TensorData::new(later, [1, rows, s]), &device);
    let later = B::bool_expand(later, scores.shape());
    let scores = B::float_mask_fill(scores, later, MASKED_SCORE.into());
    narrowed::<B>(B::softmax(scores, 2), dtype)
}

/// `x [n, r s, s]` with the dropout's mask applied.
fn dropped<B: Backend>(x: FloatTensor<B>, dropout: Option<AttentionDropout>) -> FloatTensor<B> {
    let Some(dropout) = dropout else { return x };
    let (n, s, device, dtype) = (x.shape()[0], x.shape()[2], x.device(), x.dtype());
    let factors = B::float_from_data(dropout.factors(n, s), &device);
    narrowed::<B>(B::float_mul(widened::<B>(x), factors), dtype)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    q: FloatTensor<Autodiff<B, C>>,
    k: FloatTensor<Autodiff<B, C>>,
    v: FloatTensor<Autodiff<B, C>>,
    options: AttentionOptions,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct AttentionBackward;

    impl<B: ParallelOps> Backward<B, 3> for AttentionBackward {
        /// `q`, `k`, `v`, the probabilities before dropout unless they are to be made again, and the
        /// options.
        type State = (
            [FloatTensor<B>; 3],
            Option<FloatTensor<B>>,
            AttentionOptions,
        );

        /// With `P` the probabilities and `M` the dropout's mask: `dV = (P ∘ M)ᵀ dO`,
        /// `dP = dO Vᵀ ∘ M`, `dS = P ∘ (dP - rowsum(dP ∘ P)) · scale`, `dQ = dS K`, `dK = dSᵀ Q`.
        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            let ([q, k, v], p, options) = ops.state;
            let AttentionOptions { scale, dropout, .. } = options;
            let p = p.unwrap_or_else(|| probabilities::<B>(q.clone(), k.clone(), scale));
            let d_out = grads.consume::<B>(&ops.node);
            let kept = dropped::<B>(p.clone(), dropout);
            let dv = B::float_matmul(B::float_transpose(kept), d_out.clone());
            let (d_out, v) = (widened::<B>(d_out), widened::<B>(v));
            let dp = B::float_matmul(d_out, B::float_transpose(v));
            let dp = dropped::<B>(dp, dropout);
            let (dtype, p) = (p.dtype(), widened::<B>(p));
            let weighted = B::float_mul(dp, p.clone());
            let sums = B::float_sum_dim(weighted.clone(), 2);
            let ds = B::float_sub(weighted, B::float_mul(p, sums));
            let ds = narrowed::<B>(B::float_mul_scalar(ds, scale.into()), dtype);
            let dq = B::float_matmul(ds.clone(), k);
            let dk = B::float_matmul(B::float_transpose(ds), q);
            for (parent, gradient) in ops.parents.into_iter().zip([dq, dk, dv]) {
                if let Some(node) = parent {
                    grads.register::<B>(node.id, gradient);
                }
            }
        }
    }

    let ((q, qn), (k, kn), (v, vn)) = (q.into_parts(), k.into_parts(), v.into_parts());
    match AttentionBackward
        .prepare::<C>([qn, kn, vn])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => {
            let (out, p) = forward::<B>(q.clone(), k.clone(), v.clone(), options);
            let kept = (!options.recompute).then_some(p);
            prep.finish(([q, k, v], kept, options), out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::causal_attention(q, k, v, options)),
    }
}
