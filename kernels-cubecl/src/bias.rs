//! A bias as an argument of operations that work with or without one.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, ExtensionType, TensorMetadata};
use burn::tensor::{Shape, Tensor};

/// A bias `[n]`, or none.
#[derive(ExtensionType)]
pub enum Bias<B: Backend> {
    None,
    Some(FloatTensor<B>),
}

impl From<Option<Tensor<1>>> for Bias<Dispatch> {
    fn from(bias: Option<Tensor<1>>) -> Self {
        match bias {
            Some(bias) => Bias::Some(bias.into_dispatch()),
            None => Bias::None,
        }
    }
}

impl<B: Backend> Bias<B> {
    pub fn tensor(self) -> Option<FloatTensor<B>> {
        match self {
            Bias::None => None,
            Bias::Some(bias) => Some(bias),
        }
    }
}

impl<B: Backend, C: CheckpointStrategy> Bias<Autodiff<B, C>> {
    /// Its values and its node in the graph of `x`: of none, a constant.
    pub fn into_parts(self, x: &FloatTensor<B>) -> (Option<FloatTensor<B>>, NodeGuard) {
        match self {
            Bias::Some(bias) => {
                let (bias, node) = bias.into_parts();
                (Some(bias), node)
            }
            Bias::None => {
                let none = B::float_empty(Shape::new([0]), &x.device(), x.dtype().into());
                let none = <Autodiff<B, C> as AutodiffBackend>::from_inner(none);
                (None, none.into_parts().1)
            }
        }
    }
}

/// `x [.., n]` and a bias, if there is one, in primitives.
pub(crate) fn added<B: Backend>(x: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> FloatTensor<B> {
    let Some(bias) = bias else { return x };
    let mut shape = vec![1; x.shape().num_dims() - 1];
    shape.push(bias.shape()[0]);
    B::float_add(x, B::float_reshape(bias, Shape::from(shape)))
}
