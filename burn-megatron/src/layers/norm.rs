//! Normalisation layers.

use super::block::Sublayer;
use crate::Kernels;
use crate::autograd::{added_layer_norm, added_rms_norm, layer_norm, rms_norm};
use crate::dropout::PassContext;
use crate::shard::{Init, ParallelBuilder, ParamSpec};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// Configuration of a [`LayerNorm`].
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    pub hidden_size: usize,
    /// Added to the variance.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Each tensor-parallel rank normalises something else, such as its own heads.
    #[config(default = false)]
    pub partial_gradient: bool,
}

impl LayerNormConfig {
    /// The layer, whole on every rank.
    pub fn init(&self, builder: &ParallelBuilder) -> LayerNorm {
        let param = |init| {
            let spec = ParamSpec::replicated([self.hidden_size], init);
            builder.param(spec.with_partial_gradient(self.partial_gradient))
        };
        LayerNorm {
            weight: param(Init::Ones),
            bias: param(Init::Zeros),
            epsilon: self.epsilon,
            kernels: builder.kernels(),
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
    #[module(skip)]
    kernels: Kernels,
}

impl LayerNorm {
    /// `[.., h] -> [.., h]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let (weight, bias) = (self.weight.val(), self.bias.val());
        layer_norm(x, weight, bias, self.epsilon, self.kernels)
    }
}

impl Sublayer for LayerNorm {
    fn forward(&self, x: Tensor<3>, _: &PassContext) -> Tensor<3> {
        LayerNorm::forward(self, x)
    }

    fn forward_added(
        &self,
        x: Tensor<3>,
        residual: Tensor<3>,
        _: &PassContext,
    ) -> (Tensor<3>, Tensor<3>) {
        let (weight, bias) = (self.weight.val(), self.bias.val());
        added_layer_norm(x, residual, weight, bias, self.epsilon, self.kernels)
    }
}

/// Configuration of an [`RmsNorm`].
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    pub hidden_size: usize,
    /// Added to the mean square.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Each tensor-parallel rank normalises something else, such as its own heads.
    #[config(default = false)]
    pub partial_gradient: bool,
}

impl RmsNormConfig {
    /// The layer, whole on every rank.
    pub fn init(&self, builder: &ParallelBuilder) -> RmsNorm {
        let spec = ParamSpec::replicated([self.hidden_size], Init::Ones);
        RmsNorm {
            weight: builder.param(spec.with_partial_gradient(self.partial_gradient)),
            epsilon: self.epsilon,
            kernels: builder.kernels(),
        }
    }
}

/// `x / √(mean(x²) + ε) · weight` over the last dimension (Zhang and Sennrich 2019).
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[h]`
    pub weight: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
    #[module(skip)]
    kernels: Kernels,
}

impl RmsNorm {
    /// `[.., h] -> [.., h]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(x, self.weight.val(), self.epsilon, self.kernels)
    }
}

impl Sublayer for RmsNorm {
    fn forward(&self, x: Tensor<3>, _: &PassContext) -> Tensor<3> {
        RmsNorm::forward(self, x)
    }

    fn forward_added(
        &self,
        x: Tensor<3>,
        residual: Tensor<3>,
        _: &PassContext,
    ) -> (Tensor<3>, Tensor<3>) {
        added_rms_norm(x, residual, self.weight.val(), self.epsilon, self.kernels)
    }
}

/// Which normalisation a model uses, under Megatron's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Normalization {
    #[default]
    LayerNorm,
    #[serde(rename = "RMSNorm")]
    RmsNorm,
}

/// Configuration of a [`Norm`].
#[derive(Debug, Clone)]
pub struct NormConfig {
    pub kind: Normalization,
    pub hidden_size: usize,
    pub epsilon: f64,
    /// Each tensor-parallel rank normalises something else, such as its own heads.
    pub partial_gradient: bool,
}

impl NormConfig {
    /// The layer, whole on every rank.
    pub fn init(&self, builder: &ParallelBuilder) -> Norm {
        match self.kind {
            Normalization::LayerNorm => Norm::LayerNorm(
                LayerNormConfig::new(self.hidden_size)
                    .with_epsilon(self.epsilon)
                    .with_partial_gradient(self.partial_gradient)
                    .init(builder),
            ),
            Normalization::RmsNorm => Norm::RmsNorm(
                RmsNormConfig::new(self.hidden_size)
                    .with_epsilon(self.epsilon)
                    .with_partial_gradient(self.partial_gradient)
                    .init(builder),
            ),
        }
    }
}

/// Either normalisation, chosen at run time. Which one is no part of the parameters' names.
#[derive(Module, Debug)]
pub enum Norm {
    LayerNorm(LayerNorm),
    RmsNorm(RmsNorm),
}

impl Norm {
    /// `[.., h] -> [.., h]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Norm::LayerNorm(norm) => norm.forward(x),
            Norm::RmsNorm(norm) => norm.forward(x),
        }
    }
}

impl Sublayer for Norm {
    fn forward(&self, x: Tensor<3>, _: &PassContext) -> Tensor<3> {
        Norm::forward(self, x)
    }

    fn forward_added(
        &self,
        x: Tensor<3>,
        residual: Tensor<3>,
        context: &PassContext,
    ) -> (Tensor<3>, Tensor<3>) {
        match self {
            Norm::LayerNorm(norm) => norm.forward_added(x, residual, context),
            Norm::RmsNorm(norm) => norm.forward_added(x, residual, context),
        }
    }
}
