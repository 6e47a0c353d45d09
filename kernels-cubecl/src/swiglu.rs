//! SwiGLU (Shazeer 2020) with its backward: `silu(gate) ∘ up` of `[gate | up]`.

use crate::{Fused, KernelOps, Kernels, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Slice, Tensor};

/// `silu(gate) ∘ up`, with `silu(x) = x · sigmoid(x)`, computed in f32. Megatron's `fusions/fused_bias_swiglu.py`.
///
/// # Shapes
/// - `x`: `[.., 2 f]`, the gate before what it gates
/// - output: `[.., f]`
pub fn swiglu<const D: usize>(x: Tensor<D>, kernels: Kernels) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::swiglu_op(x.into_dispatch(), kernels))
}

/// The gate, and what it gates.
fn halves<B: Backend>(x: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let shape = x.shape();
    let last = shape.num_dims() - 1;
    let half = shape[last] / 2;
    [0, half].map(|start| {
        let dims = 0..shape.num_dims();
        let slices: Vec<Slice> = dims
            .map(|dim| match dim == last {
                true => Slice::from(start..start + half),
                false => Slice::from(0..shape[dim]),
            })
            .collect();
        B::float_slice(x.clone(), &slices)
    })
}

pub(crate) fn forward<B: Fused>(x: FloatTensor<B>, kernels: Kernels) -> FloatTensor<B> {
    match kernels.fuse::<B>(&x) {
        true => B::fused_swiglu(x),
        false => reference::<B>(x),
    }
}

pub(crate) fn backward<B: Fused>(
    x: FloatTensor<B>,
    kernels: Kernels,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    match kernels.fuse::<B>(&x) {
        true => B::fused_swiglu_backward(x, dy),
        false => reference_backward::<B>(x, dy),
    }
}

fn reference<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    let [gate, up] = halves::<B>(widened::<B>(x));
    let y = B::float_mul(B::float_mul(gate.clone(), B::sigmoid(gate)), up);
    narrowed::<B>(y, dtype)
}

/// With `σ` the sigmoid of the gate: `dup = dy ∘ gate σ`, `dgate = dy ∘ up ∘ σ (1 + gate (1 - σ))`.
fn reference_backward<B: Backend>(x: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
    let [gate, up] = halves::<B>(widened::<B>(x));
    let (dtype, dy) = (dy.dtype(), widened::<B>(dy));
    let last = dy.shape().num_dims() - 1;
    let sigmoid = B::sigmoid(gate.clone());
    let d_up = B::float_mul(dy.clone(), B::float_mul(gate.clone(), sigmoid.clone()));
    let rest = B::float_add_scalar(B::float_neg(sigmoid.clone()), 1f64.into());
    let slope = B::float_add_scalar(B::float_mul(gate, rest), 1f64.into());
    let slope = B::float_mul(sigmoid, slope);
    let d_gate = B::float_mul(B::float_mul(dy, up), slope);
    narrowed::<B>(B::float_cat(vec![d_gate, d_up], last), dtype)
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct SwigluBackward;

    impl<B: KernelOps + Fused> Backward<B, 1> for SwigluBackward {
        /// The input; the rest is cheap to make again.
        type State = (FloatTensor<B>, Kernels);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (x, kernels) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |dy| {
                backward::<B>(x, kernels, dy)
            });
        }
    }

    let (x, node) = x.into_parts();
    let out = forward::<B>(x.clone(), kernels);
    match SwigluBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((x, kernels), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
