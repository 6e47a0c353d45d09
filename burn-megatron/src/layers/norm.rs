//! Layer normalisation.

use super::block::Sublayer;
use crate::autograd::layer_norm;
use crate::shard::{Init, ParallelBuilder, ParamSpec};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// Configuration of a [`LayerNorm`].
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    pub hidden_size: usize,
    /// Added to the variance.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl LayerNormConfig {
    /// The layer, whole on every rank.
    pub fn init(&self, builder: &ParallelBuilder) -> LayerNorm {
        let param = |init| builder.param(ParamSpec::replicated([self.hidden_size], init));
        LayerNorm {
            weight: param(Init::Ones),
            bias: param(Init::Zeros),
            epsilon: self.epsilon,
        }
    }
}

/// `(x - mean) / √(variance + ε) · weight + bias` over the last dimension (Ba et al. 2016).
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// `[h]`
    pub weight: Param<Tensor<1>>,
    /// `[h]`
    pub bias: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl LayerNorm {
    /// `[.., h] -> [.., h]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        layer_norm(x, self.weight.val(), self.bias.val(), self.epsilon)
    }
}

impl Sublayer for LayerNorm {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        LayerNorm::forward(self, x)
    }
}
