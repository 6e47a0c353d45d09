//! The operations of a transformer for Burn: on plain [`Tensor`](burn::tensor::Tensor)s, with autodiff or
//! without, each with its backward written by hand.
//!
//! Every operation exists twice: as a *reference* in primitives of Burn's backends, which runs on all of them in
//! any float type, and as *fused* kernels of one pass over memory where a backend has them ([`Fused`]).
//! [`Kernels`] says which runs.

mod activation;
mod choice;
#[cfg(feature = "cube")]
pub mod cube;
pub mod dropout;
mod flex;
mod fused;
mod ops;
pub mod random;

pub mod activated_linear;
pub mod adamw;
pub mod added_norm;
pub mod attention;
pub mod backward;
pub mod bias;
pub mod dropout_add;
pub mod embedding;
pub mod flat;
pub mod gelu;
pub mod head_loss;
pub mod layer_norm;
pub mod linear;
pub mod rms_norm;
pub mod rotary;
pub mod swiglu;

#[cfg(test)]
mod tests;

pub use activation::Activation;
pub use choice::Kernels;
pub use fused::Fused;
pub use ops::KernelOps;

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, DispatchKindConversion, DispatchTensor, TensorMetadata,
};
use burn::tensor::{DType, FloatDType, Shape};

/// `x` in f32, if it has 16 bits: for arithmetic of which the result alone is to be rounded.
pub fn widened<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match x.dtype() {
        DType::BF16 | DType::F16 => B::float_cast(x, FloatDType::F32),
        _ => x,
    }
}

/// `x` rounded to `dtype`.
pub fn narrowed<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    match x.dtype() == dtype {
        true => x,
        false => B::float_cast(x, dtype.into()),
    }
}

/// A tensor of Burn's run-time choice of backend as one of the backend that it is known to be of.
///
/// # Panics
/// If it is of another, or has a graph that the backend has not.
pub fn from_dispatch<B: Backend>(x: DispatchTensor) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let x = <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(x);
    x.expect("a tensor of the graph's own backend").float()
}

/// The way back.
pub fn into_dispatch<B: Backend>(x: FloatTensor<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::from_backend(BackendTensor::<B>::Float(x))
}

/// The shape of `[.., n]` as a matrix of rows.
fn rows(shape: &Shape, n: usize) -> Shape {
    Shape::new([shape.num_elements() / n, n])
}

/// The last dimension.
fn width(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// `[.., n] -> [n]` in primitives: the sum over rows, in f32 and rounded to `dtype`.
fn column_sums<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let (shape, n) = (x.shape(), width(&x.shape()));
    let x = widened::<B>(B::float_reshape(x, rows(&shape, n)));
    let sums = narrowed::<B>(B::float_sum_dim(x, 0), dtype);
    B::float_reshape(sums, Shape::new([n]))
}
