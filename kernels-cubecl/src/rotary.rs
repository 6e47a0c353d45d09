//! Rotary position embedding (Su et al. 2021) with its backward: the rotation the other way.

use crate::{Fused, KernelOps, Kernels, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor, TensorData};
use std::fmt;
use std::ops::Range;
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
    /// Copies on devices, cosines and sines.
    #[cfg(feature = "cube")]
    copies: std::sync::Mutex<Vec<[burn_cubecl::tensor::CubeTensor; 2]>>,
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
            #[cfg(feature = "cube")]
            copies: Default::default(),
        }))
    }

    /// Cosines and sines of a position.
    pub(crate) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let n = self.0.frequencies;
        let here = position * n..(position + 1) * n;
        (&self.0.cos[here.clone()], &self.0.sin[here])
    }

    /// Cosines and sines on a device, `[positions, frequencies]` each: copied there once.
    #[cfg(feature = "cube")]
    pub(crate) fn on(
        &self,
        device: &burn_cubecl::CubeDevice,
    ) -> [burn_cubecl::tensor::CubeTensor; 2] {
        let mut copies = self.0.copies.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(there) = copies.iter().find(|copy| copy[0].device == *device) {
            return there.clone();
        }
        let shape = [self.0.positions, self.0.frequencies];
        let copy = [&self.0.cos, &self.0.sin].map(|values| {
            let values = TensorData::new(values.clone(), shape);
            <burn_cubecl::CubeBackend as burn::backend::ops::FloatTensorOps<_>>::float_from_data(
                values, device,
            )
        });
        copies.push(copy.clone());
        copy
    }

    /// Angles of a position.
    #[cfg(feature = "cube")]
    pub(crate) fn frequencies(&self) -> usize {
        self.0.frequencies
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

/// Heads of one width one after another in the last dimension of a tensor, of which the first ones turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub width: usize,
    /// How many turn: a group's queries and its key, and not its value.
    pub turned: usize,
}

/// Turns the pairs `(i, i + n)` of the first `2n` features of each turned head by its position's `n` angles
/// (Megatron's rotate-half form), in f32; what is beyond them stays. Megatron's
/// `models/common/embeddings/rope_utils.py`.
///
/// # Shapes
/// - `x`: `[s, groups, heads · width]`, with `width >= 2n` and `s` the table's positions
/// - output: the same
pub fn rotary_embedding(
    x: Tensor<3>,
    heads: Heads,
    table: &RotaryTable,
    kernels: Kernels,
) -> Tensor<3> {
    let (x, table) = (x.into_dispatch(), table.clone());
    Tensor::from_dispatch(Dispatch::rotary_op(x, heads, table, false, kernels))
}

/// Turns forth, or `back`.
pub(crate) fn forward<B: Fused>(
    x: FloatTensor<B>,
    heads: Heads,
    table: &RotaryTable,
    back: bool,
    kernels: Kernels,
) -> FloatTensor<B> {
    assert_eq!(
        x.shape()[0],
        table.positions(),
        "the rotary table is for another sequence length"
    );
    match kernels.fuse::<B>(&x) {
        true => B::fused_rotary(x, heads, table, back),
        false => reference::<B>(x, heads, table, back),
    }
}

fn reference<B: Backend>(
    x: FloatTensor<B>,
    heads: Heads,
    table: &RotaryTable,
    back: bool,
) -> FloatTensor<B> {
    let (shape, device, dtype) = (x.shape(), x.device(), x.dtype());
    let (s, groups, d) = (shape[0], shape[1], heads.width);
    let count = shape[2] / d;
    let x = B::float_reshape(widened::<B>(x), Shape::new([s, groups, count, d]));
    let Angles {
        cos,
        sin,
        frequencies: n,
        ..
    } = &*table.0;
    let part = |which: Range<usize>, features: Range<usize>| {
        let slices = [0..s, 0..groups, which, features].map(Slice::from);
        B::float_slice(x.clone(), &slices)
    };
    let constant = |values: &[f32]| {
        let values = TensorData::new(values.to_vec(), [s, 1, 1, *n]);
        narrowed::<B>(B::float_from_data(values, &device), x.dtype())
    };
    let (cos, sin) = (constant(cos), constant(sin));
    let sin = if back { B::float_neg(sin) } else { sin };
    let turned = 0..heads.turned;
    let (first, second) = (part(turned.clone(), 0..*n), part(turned.clone(), *n..2 * n));
    let pairs = [
        B::float_sub(
            B::float_mul(first.clone(), cos.clone()),
            B::float_mul(second.clone(), sin.clone()),
        ),
        B::float_add(B::float_mul(second, cos), B::float_mul(first, sin)),
    ];
    let beyond = (2 * n < d).then(|| part(turned.clone(), 2 * n..d));
    let turned = B::float_cat(pairs.into_iter().chain(beyond).collect(), 3);
    let rest = (heads.turned < count).then(|| part(heads.turned..count, 0..d));
    let all = B::float_cat([turned].into_iter().chain(rest).collect(), 2);
    narrowed::<B>(B::float_reshape(all, shape), dtype)
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    heads: Heads,
    table: RotaryTable,
    back: bool,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RotaryBackward;

    impl<B: KernelOps + Fused> Backward<B, 1> for RotaryBackward {
        type State = (Heads, RotaryTable, bool, Kernels);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (heads, table, back, kernels) = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |dy| {
                forward::<B>(dy, heads, &table, !back, kernels)
            });
        }
    }

    let (x, node) = x.into_parts();
    let out = forward::<B>(x, heads, &table, back, kernels);
    match RotaryBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((heads, table, back, kernels), out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
