//! The core of causal attention: scores, softmax and the weighted sum of values.
//!
//! Queries, keys and values come packed, as one column-parallel layer makes them: `[s, n, (r + 2) d]`, with `n`
//! groups over all samples, and in each the `d` features of `r` query heads, of a key and of a value. Megatron's
//! `transformer/dot_product_attention.py`. Scores and softmax are computed in f32.

use crate::dropout::AttentionDropout;
use crate::{Fused, KernelOps, Kernels, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor, TensorData};

/// What Megatron fills masked scores with: its exponential is 0 in f32.
const MASKED_SCORE: f64 = -10_000.0;

/// Attention of each query head by itself, in which a position sees itself and what came before.
///
/// # Shapes
/// - `qkv`: `[s, n, (r + 2) d]`
/// - output: `[s, n, r d]`
pub fn causal_attention(qkv: Tensor<3>, options: AttentionOptions, kernels: Kernels) -> Tensor<3> {
    let qkv = qkv.into_dispatch();
    Tensor::from_dispatch(Dispatch::attention_op(qkv, options, kernels))
}

/// How the heads lie, what the scores are multiplied by, and which probabilities are dropped.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions {
    /// `r`
    pub queries_per_group: usize,
    /// `d`
    pub head_width: usize,
    pub scale: f64,
    /// Its mask is made again in the backward, not kept.
    pub dropout: Option<AttentionDropout>,
    /// In the reference: make the probabilities again in the backward instead of keeping them, `n r s²` values
    /// less for one more product and softmax. (Korthikanti et al. 2022, section 5.) Fused kernels never keep
    /// them.
    pub recompute: bool,
}

/// What the backward needs beside the options.
#[derive(Debug, Clone)]
pub(crate) enum Saved<B: Backend> {
    /// The input, the output and the log-sum-exp of every row of scores.
    Fused(Box<[FloatTensor<B>; 3]>),
    /// `q [n, r s, d]`, `k`, `v` `[n, s, d]`, and the probabilities `[n, r s, s]` before dropout unless they are
    /// to be made again.
    Reference(Box<[FloatTensor<B>; 3]>, Option<FloatTensor<B>>),
}

pub(crate) fn forward<B: Fused>(
    qkv: FloatTensor<B>,
    options: AttentionOptions,
    kernels: Kernels,
) -> (FloatTensor<B>, Saved<B>) {
    if kernels.fuse::<B>(&qkv) {
        let (out, lse) = B::fused_attention(qkv.clone(), &options);
        let saved = Saved::Fused(Box::new([qkv, out.clone(), lse]));
        return (out, saved);
    }
    let [q, k, v] = split::<B>(qkv, options);
    let (out, p) = reference::<B>(q.clone(), k.clone(), v.clone(), options);
    let kept = (!options.recompute).then_some(p);
    let (n, s) = (k.shape()[0], k.shape()[1]);
    let out = joined::<B>(out, [n, s], options.queries_per_group);
    (out, Saved::Reference(Box::new([q, k, v]), kept))
}

/// `[s, n, (r + 2) d]` as `q [n, r s, d]`, `k`, `v` `[n, s, d]`.
fn split<B: Backend>(qkv: FloatTensor<B>, options: AttentionOptions) -> [FloatTensor<B>; 3] {
    let (s, n) = (qkv.shape()[0], qkv.shape()[1]);
    let (r, d) = (options.queries_per_group, options.head_width);
    [(0, r), (r, 1), (r + 1, 1)].map(|(first, count)| {
        let features = first * d..(first + count) * d;
        let slices = [0..s, 0..n, features].map(Slice::from);
        let part = B::float_slice(qkv.clone(), &slices);
        let heads = B::float_reshape(part, Shape::new([s, n * count, d]));
        let heads = B::float_swap_dims(heads, 0, 1);
        B::float_reshape(heads, Shape::new([n, count * s, d]))
    })
}

/// `[n, count s, d]` as `[s, n, count d]`.
fn joined<B: Backend>(x: FloatTensor<B>, [n, s]: [usize; 2], count: usize) -> FloatTensor<B> {
    let d = x.shape()[2];
    let x = B::float_reshape(x, Shape::new([n * count, s, d]));
    let x = B::float_swap_dims(x, 0, 1);
    B::float_reshape(x, Shape::new([s, n, count * d]))
}

/// The gradient of the packed input.
fn backward<B: Fused>(
    saved: Saved<B>,
    options: AttentionOptions,
    d_out: FloatTensor<B>,
) -> FloatTensor<B> {
    match saved {
        Saved::Fused(saved) => {
            let [qkv, out, lse] = *saved;
            B::fused_attention_backward(qkv, out, lse, &options, d_out)
        }
        Saved::Reference(saved, p) => {
            let r = options.queries_per_group;
            let (n, s) = (saved[1].shape()[0], saved[1].shape()[1]);
            let d_out = heads_first::<B>(d_out, options);
            let [dq, dk, dv] = reference_backward::<B>(*saved, p, options, d_out);
            let parts = [(dq, r), (dk, 1), (dv, 1)];
            let parts = parts.map(|(x, count)| joined::<B>(x, [n, s], count));
            B::float_cat(parts.into(), 2)
        }
    }
}

/// `[s, n, r d]` as `[n, r s, d]`.
fn heads_first<B: Backend>(x: FloatTensor<B>, options: AttentionOptions) -> FloatTensor<B> {
    let (s, n) = (x.shape()[0], x.shape()[1]);
    let (r, d) = (options.queries_per_group, options.head_width);
    let x = B::float_reshape(x, Shape::new([s, n * r, d]));
    B::float_reshape(B::float_swap_dims(x, 0, 1), Shape::new([n, r * s, d]))
}

/// Returns the output and the probabilities `[n, r s, s]` before dropout.
fn reference<B: Backend>(
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
    let factors = dropout.factors(n, s);
    let factors = B::float_from_data(TensorData::new(factors, [n, x.shape()[1], s]), &device);
    let x = widened::<B>(x);
    let factors = narrowed::<B>(factors, x.dtype());
    narrowed::<B>(B::float_mul(x, factors), dtype)
}

/// With `P` the probabilities and `M` the dropout's mask: `dV = (P ∘ M)ᵀ dO`, `dP = dO Vᵀ ∘ M`,
/// `dS = P ∘ (dP - rowsum(dP ∘ P)) · scale`, `dQ = dS K`, `dK = dSᵀ Q`.
///
/// The query heads that share a head of keys and values stand one below the other in one matrix: one product serves
/// them all, and its transpose sums their gradients.
fn reference_backward<B: Backend>(
    [q, k, v]: [FloatTensor<B>; 3],
    p: Option<FloatTensor<B>>,
    options: AttentionOptions,
    d_out: FloatTensor<B>,
) -> [FloatTensor<B>; 3] {
    let AttentionOptions { scale, dropout, .. } = options;
    let p = p.unwrap_or_else(|| probabilities::<B>(q.clone(), k.clone(), scale));
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
    [dq, dk, dv]
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    qkv: FloatTensor<Autodiff<B, C>>,
    options: AttentionOptions,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct AttentionBackward;

    impl<B: KernelOps + Fused> Backward<B, 1> for AttentionBackward {
        type State = (Saved<B>, AttentionOptions);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (saved, options) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |d_out| {
                backward::<B>(saved, options, d_out)
            });
        }
    }

    let (qkv, node) = qkv.into_parts();
    let (out, saved) = forward::<B>(qkv, options, kernels);
    match AttentionBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((saved, options), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
