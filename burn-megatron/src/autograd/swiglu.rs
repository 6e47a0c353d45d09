//! SwiGLU (Shazeer 2020) with its backward: `silu(gate) ∘ up` of `[gate | up]`.

use super::{ParallelOps, narrowed, widened};
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
pub fn swiglu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::swiglu(x.into_dispatch()))
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

pub(super) fn forward<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    let [gate, up] = halves::<B>(widened::<B>(x));
    let y = B::float_mul(B::float_mul(gate.clone(), B::sigmoid(gate)), up);
    narrowed::<B>(y, dtype)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct SwigluBackward;

    impl<B: ParallelOps> Backward<B, 1> for SwigluBackward {
        /// The input; the rest is cheap to make again.
        type State = FloatTensor<B>;

        /// With `σ` the sigmoid of the gate: `dup = dy ∘ gate σ`,
        /// `dgate = dy ∘ up ∘ σ (1 + gate (1 - σ))`.
        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [gate, up] = halves::<B>(widened::<B>(ops.state));
            unary::<B, _>(ops.parents, ops.node, grads, |dy| {
                let (dtype, dy) = (dy.dtype(), widened::<B>(dy));
                let last = dy.shape().num_dims() - 1;
                let sigmoid = B::sigmoid(gate.clone());
                let d_up = B::float_mul(dy.clone(), B::float_mul(gate.clone(), sigmoid.clone()));
                let rest = B::float_add_scalar(B::float_neg(sigmoid.clone()), 1f64.into());
                let slope = B::float_add_scalar(B::float_mul(gate, rest), 1f64.into());
                let slope = B::float_mul(sigmoid, slope);
                let d_gate = B::float_mul(B::float_mul(dy, up), slope);
                narrowed::<B>(B::float_cat(vec![d_gate, d_up], last), dtype)
            });
        }
    }

    let (x, node) = x.into_parts();
    let out = B::swiglu(x.clone());
    match SwigluBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(x, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
