//! Differentiable operations that Burn does not have, each with its backward written beside it: those that
//! communicate or steer a backward here, those that compute in `burn-megatron-kernels`.
//!
//! The functions re-exported here work on plain [`Tensor`](burn::tensor::Tensor)s, with autodiff or
//! without. [`ParallelOps`] is the seam below them: one default body in backend primitives per
//! operation, which a backend may replace, and one implementation for Burn's autodiff decorator.

mod collective;
mod cross_entropy;
mod gathered_linear;
mod grad_hook;
mod head_loss;
mod mappings;
mod recompute;
mod seed;

pub use burn_megatron_kernels::activated_linear::activated_linear;
pub use burn_megatron_kernels::added_norm::{added_layer_norm, added_rms_norm};
pub use burn_megatron_kernels::attention::{AttentionOptions, causal_attention};
pub use burn_megatron_kernels::embedding::embedding_rows;
pub use burn_megatron_kernels::gelu::{GeluApproximation, gelu};
pub use burn_megatron_kernels::layer_norm::layer_norm;
pub use burn_megatron_kernels::linear::linear;
pub use burn_megatron_kernels::rms_norm::rms_norm;
pub use burn_megatron_kernels::rotary::{Heads, RotaryTable, rotary_embedding};
pub use burn_megatron_kernels::swiglu::swiglu;
pub use collective::{Collective, CollectivePair};
pub use cross_entropy::{VocabShard, vocab_parallel_cross_entropy};
pub use gathered_linear::gathered_linear;
pub use grad_hook::{GradHook, HooksFollow, reached, take_gradient};
pub(crate) use head_loss::blocks as head_loss_blocks;
pub use head_loss::{HeadLossShard, head_loss};
pub use mappings::*;
pub use recompute::{Replay, recompute};
pub use seed::{BackwardSeed, GradientSlot};

use crate::comm::CommRef;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, Backend, DispatchKindConversion, DispatchTensor, ExecutionError, Flex,
    TensorMetadata, backend_extension,
};
use burn::tensor::{FloatDType, TensorData};
use burn_megatron_kernels::bias::Bias;
use burn_megatron_kernels::{Fused, Kernels, from_dispatch, into_dispatch};

/// The operations of this module as an extension of Burn's backends.
///
/// The default bodies are made of backend primitives; the `Autodiff` implementations delegate to
/// the file of each operation, where its backward stands.
#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "wgpu")), Autodiff)]
pub trait ParallelOps: Backend {
    /// Runs the pair's forward collective on `x`; under autodiff its conjugate runs on the gradient.
    fn collective(x: FloatTensor<Self>, pair: CollectivePair) -> FloatTensor<Self> {
        collective::run::<Self>(x, pair.forward, &pair.comm)
    }

    /// `gather(x) · weightᵀ`, where each rank of `tp` has a part of the sequence.
    fn gathered_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        tp: CommRef,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    /// Cross entropy `[n]` of `logits [n, vocabulary shard]` for global `target` ids `[n]`.
    fn vocab_parallel_cross_entropy(
        logits: FloatTensor<Self>,
        target: IntTensor<Self>,
        shard: VocabShard,
    ) -> FloatTensor<Self> {
        cross_entropy::forward::<Self>(logits, target, &shard).0
    }

    /// Cross entropy `[n]` of `hidden [n, h]` under the output layer's `weight [v, h]`.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        shard: HeadLossShard,
    ) -> FloatTensor<Self>;

    /// A `[1]` from which a backward starts with the gradient in `slot` for `output`.
    fn backward_seed(output: FloatTensor<Self>, _slot: GradientSlot) -> FloatTensor<Self> {
        Self::float_zeros([1].into(), &output.device(), FloatDType::F32)
    }

    /// `x`, whose gradient goes to `hook` under autodiff: a node deeper than `after`.
    fn grad_hook(
        x: FloatTensor<Self>,
        _after: FloatTensor<Self>,
        _hook: GradHook,
    ) -> FloatTensor<Self> {
        x
    }

    /// A `[1]` of no value, as deep as `x` under autodiff.
    fn place(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_empty([1].into(), &x.device(), x.dtype().into())
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

/// Without autodiff.
macro_rules! forwards {
    ($backend:ty) => {
        impl ParallelOps for $backend {
            fn gathered_linear(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: Bias<Self>,
                tp: CommRef,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                gathered_linear::forward::<Self>(x, weight, bias.tensor(), &tp, kernels)
            }

            fn head_loss(
                hidden: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                shard: HeadLossShard,
            ) -> FloatTensor<Self> {
                head_loss::forward::<Self>(hidden, weight, &shard, None).losses
            }
        }
    };
}

forwards!(Flex);
#[cfg(any(feature = "cuda", feature = "wgpu"))]
forwards!(burn::backend::Cube);

impl<B: ParallelOps + Fused, C: CheckpointStrategy> ParallelOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn collective(x: FloatTensor<Self>, pair: CollectivePair) -> FloatTensor<Self> {
        collective::autodiff::<B, C>(x, pair)
    }

    fn gathered_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        tp: CommRef,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        gathered_linear::autodiff::<B, C>(x, weight, bias, tp, kernels)
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

    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        shard: HeadLossShard,
    ) -> FloatTensor<Self> {
        head_loss::autodiff::<B, C>(hidden, weight, shard)
    }

    fn grad_hook(
        x: FloatTensor<Self>,
        after: FloatTensor<Self>,
        hook: GradHook,
    ) -> FloatTensor<Self> {
        grad_hook::autodiff::<B, C>(x, after, hook)
    }

    fn place(x: FloatTensor<Self>) -> FloatTensor<Self> {
        grad_hook::place::<B, C>(x)
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
