//! Differentiable operations that Burn does not have, each with its backward written beside it.
//!
//! The functions re-exported here work on plain [`Tensor`](burn::tensor::Tensor)s, with autodiff or
//! without. [`ParallelOps`] is the seam below them: one default body in backend primitives per
//! operation, which a backend may replace, and one implementation for Burn's autodiff decorator.

mod attention;
mod collective;
mod cross_entropy;
mod embedding;
mod gelu;
mod grad_hook;
mod layer_norm;
mod linear;
mod mappings;
mod recompute;
mod rms_norm;
mod rotary;
mod seed;
mod swiglu;

pub use attention::{AttentionOptions, causal_attention};
pub use collective::{Collective, CollectivePair};
pub use cross_entropy::{VocabShard, vocab_parallel_cross_entropy};
pub use embedding::embedding_rows;
pub use gelu::{GeluApproximation, gelu};
pub use grad_hook::{GradHook, take_gradient};
pub use layer_norm::layer_norm;
pub use linear::{gathered_linear, linear};
pub use mappings::*;
pub use recompute::{Replay, recompute};
pub use rms_norm::rms_norm;
pub use rotary::{RotaryTable, rotary_embedding};
pub use seed::{BackwardSeed, GradientSlot};
pub use swiglu::swiglu;

use crate::comm::CommRef;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, Backend, BackendTensor, DispatchKindConversion, DispatchTensor, ExecutionError, Flex,
    TensorMetadata, backend_extension,
};
use burn::tensor::{DType, FloatDType, TensorData};

/// The operations of this module as an extension of Burn's backends.
///
/// The default bodies are made of backend primitives; the `Autodiff` implementations delegate to
/// the file of each operation, where its backward stands.
#[backend_extension(Flex, Autodiff)]
pub trait ParallelOps: Backend {
    /// Runs the pair's forward collective on `x`; under autodiff its conjugate runs on the gradient.
    fn collective(x: FloatTensor<Self>, pair: CollectivePair) -> FloatTensor<Self> {
        collective::run::<Self>(x, pair.forward, &pair.comm)
    }

    /// `x [.., in] · weightᵀ [in, out] -> [.., out]`, the weight stored as `[out, in]`.
    fn linear_transposed(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::forward::<Self>(x, weight).0
    }

    /// The same for an input of which each rank of `tp` has a part of the sequence.
    fn gathered_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        tp: CommRef,
    ) -> FloatTensor<Self> {
        linear::gathered_forward::<Self>(x, weight, &tp)
    }

    /// GELU in the given approximation.
    fn gelu_with(x: FloatTensor<Self>, approximation: GeluApproximation) -> FloatTensor<Self> {
        gelu::forward::<Self>(x, approximation).0
    }

    /// SwiGLU of `x [.., 2 f]`.
    fn swiglu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        swiglu::forward::<Self>(x)
    }

    /// The heads `x [heads, s, d]` turned by their positions' angles, forth or `back`.
    fn rotary(x: FloatTensor<Self>, table: RotaryTable, back: bool) -> FloatTensor<Self> {
        rotary::forward::<Self>(x, &table, back)
    }

    /// Causal attention of `n` groups of heads: `q [n, r s, d]`, `k, v [n, s, d]`.
    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        attention::forward::<Self>(q, k, v, options).0
    }

    /// Layer normalisation of `x [.., h]` with `weight` and `bias` `[h]`.
    fn layer_norm_with(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        layer_norm::forward::<Self>(x, weight, bias, epsilon).0
    }

    /// Root-mean-square normalisation of `x [.., h]` with `weight [h]`.
    fn rms_norm_with(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        rms_norm::forward::<Self>(x, weight, epsilon).0
    }

    /// Cross entropy `[n]` of `logits [n, vocabulary shard]` for global `target` ids `[n]`.
    fn vocab_parallel_cross_entropy(
        logits: FloatTensor<Self>,
        target: IntTensor<Self>,
        shard: VocabShard,
    ) -> FloatTensor<Self> {
        cross_entropy::forward::<Self>(logits, target, &shard).0
    }

    /// A `[1]` from which a backward starts with the gradient in `slot` for `output`.
    fn backward_seed(output: FloatTensor<Self>, _slot: GradientSlot) -> FloatTensor<Self> {
        Self::float_zeros([1].into(), &output.device(), FloatDType::F32)
    }

    /// The rows `index` of `table [rows, h]`.
    fn embedding_rows(table: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        Self::float_select(table, 0, index)
    }

    /// `x`, whose gradient goes to `hook` under autodiff.
    fn grad_hook(x: FloatTensor<Self>, _hook: GradHook) -> FloatTensor<Self> {
        x
    }

    /// `output` as what the parents' graph gives, whose backward `replay` runs.
    fn recomputed(
        _x: FloatTensor<Self>,
        _parameters: FloatTensor<Self>,
        output: FloatTensor<Self>,
        _replay: Replay,
    ) -> FloatTensor<Self> {
        output
    }
}

impl ParallelOps for Flex {}

impl<B: ParallelOps, C: CheckpointStrategy> ParallelOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn collective(x: FloatTensor<Self>, pair: CollectivePair) -> FloatTensor<Self> {
        collective::autodiff::<B, C>(x, pair)
    }

    fn linear_transposed(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::autodiff::<B, C>(x, weight)
    }

    fn gathered_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        tp: CommRef,
    ) -> FloatTensor<Self> {
        linear::gathered_autodiff::<B, C>(x, weight, tp)
    }

    fn gelu_with(x: FloatTensor<Self>, approximation: GeluApproximation) -> FloatTensor<Self> {
        gelu::autodiff::<B, C>(x, approximation)
    }

    fn swiglu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        swiglu::autodiff::<B, C>(x)
    }

    fn rotary(x: FloatTensor<Self>, table: RotaryTable, back: bool) -> FloatTensor<Self> {
        rotary::autodiff::<B, C>(x, table, back)
    }

    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
    ) -> FloatTensor<Self> {
        attention::autodiff::<B, C>(q, k, v, options)
    }

    fn layer_norm_with(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        layer_norm::autodiff::<B, C>(x, weight, bias, epsilon)
    }

    fn rms_norm_with(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        rms_norm::autodiff::<B, C>(x, weight, epsilon)
    }

    fn vocab_parallel_cross_entropy(
        logits: FloatTensor<Self>,
        target: IntTensor<Self>,
        shard: VocabShard,
    ) -> FloatTensor<Self> {
        cross_entropy::autodiff::<B, C>(logits, target, shard)
    }

    fn backward_seed(output: FloatTensor<Self>, slot: GradientSlot) -> FloatTensor<Self> {
        seed::autodiff::<B, C>(output, slot)
    }

    fn embedding_rows(table: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        embedding::autodiff::<B, C>(table, index)
    }

    fn grad_hook(x: FloatTensor<Self>, hook: GradHook) -> FloatTensor<Self> {
        grad_hook::autodiff::<B, C>(x, hook)
    }

    fn recomputed(
        x: FloatTensor<Self>,
        parameters: FloatTensor<Self>,
        output: FloatTensor<Self>,
        replay: Replay,
    ) -> FloatTensor<Self> {
        recompute::autodiff::<B, C>(x, parameters, output, replay)
    }
}

/// A tensor of Burn's run-time choice of backend as one of the backend that it is known to be of.
fn from_dispatch<B: Backend>(x: DispatchTensor) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let x = <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(x);
    x.expect("a tensor of the graph's own backend").float()
}

/// The way back.
fn into_dispatch<B: Backend>(x: FloatTensor<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::from_backend(BackendTensor::<B>::Float(x))
}

/// `x` in f32, if it has 16 bits: for arithmetic of which the result alone is to be rounded.
fn widened<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match x.dtype() {
        DType::BF16 | DType::F16 => B::float_cast(x, FloatDType::F32),
        _ => x,
    }
}

/// `x` rounded to `dtype`.
fn narrowed<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    match x.dtype() == dtype {
        true => x,
        false => B::float_cast(x, dtype.into()),
    }
}

/// Reads a float tensor back to the host, as contiguous data.
fn to_host<B: Backend>(x: FloatTensor<B>) -> TensorData {
    read_sync(B::float_into_data(x))
}

/// Waits for a device's answer to a read.
fn read_sync(read: impl Future<Output = Result<TensorData, ExecutionError>> + Send) -> TensorData {
    burn::backend::try_read_sync(read)
        .expect("the device supports synchronous reads")
        .expect("the device returns its data")
}
