//! Rotary position embedding (Su et al. 2021) with its backward: the rotation the other way.

use super::{ParallelOps, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Slice, Tensor, TensorData};
use std::fmt;
use std::sync::Arc;

/// Cosines and sines of every position's angles.
#[derive(Clone)]
pub struct RotaryTable(Arc<Angles>);

struct Angles {
    /// `[positions, frequencies]`, row by row.
    cos: Vec<f32>,
    sin: Vec<f32>,
    positions: usize,
    frequencies: usize,
}

impl RotaryTable {
    /// Position `p` turns pair `i` of a head by `p · frequencies[i]`, in radians.
    pub fn new(frequencies: &[f32], positions: usize) -> Self {
        let angle = |p: usize| frequencies.iter().map(move |f| p as f32 * f);
        let angles: Vec<f32> = (0..positions).flat_map(angle).collect();
        RotaryTable(Arc::new(Angles {
            cos: angles.iter().map(|a| a.cos()).collect(),
            sin: angles.iter().map(|a| a.sin()).collect(),
            positions,
            frequencies: frequencies.len(),
        }))
    }

    /// Positions that it covers.
    pub fn positions(&self) -> usize {
        self.0.positions
    }
}

impl fmt::Debug for RotaryTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RotaryTable({} positions)", self.0.positions)
    }
}

/// Turns the pairs `(i, i + n)` of the first `2n` features of each head by its position's `n` angles
/// (Megatron's rotate-half form), in f32; what is beyond them stays. Megatron's
/// `models/common/embeddings/rope_utils.py`.
///
/// # Shapes
/// - `x`: `[heads, s, d]`, with `d >= 2n` and `s` the table's positions
/// - output: the same
pub fn rotary_embedding(x: Tensor<3>, table: &RotaryTable) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::rotary(x.into_dispatch(), table.clone(), false))
}

/// Turns forth, or `back`.
pub(super) fn forward<B: Backend>(
    x: FloatTensor<B>,
    table: &RotaryTable,
    back: bool,
) -> FloatTensor<B> {
    let (shape, device, dtype) = (x.shape(), x.device(), x.dtype());
    let x = widened::<B>(x);
    let (heads, s, d) = (shape[0], shape[1], shape[2]);
    let Angles {
        cos,
        sin,
        positions,
        frequencies: n,
    } = &*table.0;
    assert_eq!(
        s, *positions,
        "the rotary table is for another sequence length"
    );
    let part = |range: std::ops::Range<usize>| {
        let slices = [0..heads, 0..s, range].map(Slice::from);
        B::float_slice(x.clone(), &slices)
    };
    let constant =
        |values: &[f32]| B::float_from_data(TensorData::new(values.to_vec(), [1, s, *n]), &device);
    let (cos, sin) = (constant(cos), constant(sin));
    let sin = if back { B::float_neg(sin) } else { sin };
    let (first, second) = (part(0..*n), part(*n..2 * n));
    let turned = [
        B::float_sub(
            B::float_mul(first.clone(), cos.clone()),
            B::float_mul(second.clone(), sin.clone()),
        ),
        B::float_add(B::float_mul(second, cos), B::float_mul(first, sin)),
    ];
    let rest = (2 * n < d).then(|| part(2 * n..d));
    let turned = B::float_cat(turned.into_iter().chain(rest).collect(), 2);
    narrowed::<B>(turned, dtype)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    table: RotaryTable,
    back: bool,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RotaryBackward;

    impl<B: ParallelOps> Backward<B, 1> for RotaryBackward {
        type State = (RotaryTable, bool);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (table, back) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |dy| {
                B::rotary(dy, table, !back)
            });
        }
    }

    let (x, node) = x.into_parts();
    let out = B::rotary(x, table.clone(), back);
    match RotaryBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((table, back), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
