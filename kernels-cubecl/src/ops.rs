//! The operations as an extension of Burn's backends.

use crate::attention::{self, AttentionOptions};
use crate::bias::Bias;
use crate::dropout::HiddenKeep;
use crate::gelu::{self, GeluApproximation};
use crate::rotary::{self, Heads, RotaryTable};
use crate::{
    Activation, Fused, Kernels, activated_linear, added_norm, dropout_add, embedding, layer_norm,
    linear, rms_norm, swiglu,
};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Flex, backend_extension};

/// One method for each operation: the functions of this crate call them. A backend runs an operation's forward;
/// its decorator with autodiff records what the operation's file says.
#[backend_extension(
    Flex,
    Cube: cfg(any(feature = "cuda", feature = "wgpu", feature = "cpu")),
    Autodiff
)]
pub trait KernelOps: Backend {
    fn added_norm_op(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        epsilon: f64,
        kernels: Kernels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    fn attention_op(
        qkv: FloatTensor<Self>,
        options: AttentionOptions,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn dropout_op(x: FloatTensor<Self>, keep: HiddenKeep, kernels: Kernels) -> FloatTensor<Self>;

    fn dropout_add_op(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        keep: HiddenKeep,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn embedding_rows(
        table: FloatTensor<Self>,
        index: IntTensor<Self>,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn gelu_op(
        x: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        how: GeluApproximation,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn layer_norm_op(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn activated_linear(
        x: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] out_bias: Bias<Self>,
        activation: Activation,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn linear_op(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn rms_norm_op(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn rotary_op(
        x: FloatTensor<Self>,
        heads: Heads,
        table: RotaryTable,
        back: bool,
        kernels: Kernels,
    ) -> FloatTensor<Self>;

    fn swiglu_op(x: FloatTensor<Self>, kernels: Kernels) -> FloatTensor<Self>;
}

/// Without autodiff.
macro_rules! forwards {
    ($backend:ty) => {
        impl KernelOps for $backend {
            fn added_norm_op(
                x: FloatTensor<Self>,
                residual: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: Bias<Self>,
                epsilon: f64,
                kernels: Kernels,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let bias = bias.tensor();
                let [sum, y, _] =
                    added_norm::forward::<Self>(x, residual, weight, bias, epsilon, kernels);
                (sum, y)
            }

            fn attention_op(
                qkv: FloatTensor<Self>,
                options: AttentionOptions,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                attention::forward::<Self>(qkv, options, kernels).0
            }

            fn dropout_op(
                x: FloatTensor<Self>,
                keep: HiddenKeep,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                dropout_add::forward::<Self>(x, None, keep, kernels)
            }

            fn dropout_add_op(
                x: FloatTensor<Self>,
                residual: FloatTensor<Self>,
                keep: HiddenKeep,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                dropout_add::forward::<Self>(x, Some(residual), keep, kernels)
            }

            fn embedding_rows(
                table: FloatTensor<Self>,
                index: IntTensor<Self>,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                embedding::forward::<Self>(table, index, kernels)
            }

            fn gelu_op(
                x: FloatTensor<Self>,
                bias: Bias<Self>,
                how: GeluApproximation,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                gelu::forward::<Self>(x, bias.tensor(), how, kernels)
            }

            fn layer_norm_op(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: FloatTensor<Self>,
                epsilon: f64,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                layer_norm::forward::<Self>(x, weight, bias, epsilon, kernels).0
            }

            fn activated_linear(
                x: FloatTensor<Self>,
                bias: Bias<Self>,
                weight: FloatTensor<Self>,
                out_bias: Bias<Self>,
                activation: Activation,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                let (bias, out_bias) = (bias.tensor(), out_bias.tensor());
                activated_linear::forward::<Self>(x, bias, weight, out_bias, activation, kernels)
            }

            fn linear_op(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: Bias<Self>,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                linear::forward::<Self>(x, weight, bias.tensor(), kernels)
            }

            fn rms_norm_op(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                epsilon: f64,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                rms_norm::forward::<Self>(x, weight, epsilon, kernels).0
            }

            fn rotary_op(
                x: FloatTensor<Self>,
                heads: Heads,
                table: RotaryTable,
                back: bool,
                kernels: Kernels,
            ) -> FloatTensor<Self> {
                rotary::forward::<Self>(x, heads, &table, back, kernels)
            }

            fn swiglu_op(x: FloatTensor<Self>, kernels: Kernels) -> FloatTensor<Self> {
                swiglu::forward::<Self>(x, kernels)
            }
        }
    };
}

forwards!(Flex);
#[cfg(feature = "cube")]
forwards!(burn_cubecl::CubeBackend);
#[cfg(feature = "cube")]
forwards!(burn::backend::fusion::Fusion<burn_cubecl::CubeBackend>);

impl<B: KernelOps + Fused, C: CheckpointStrategy> KernelOps for Autodiff<B, C> {
    fn added_norm_op(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        epsilon: f64,
        kernels: Kernels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        added_norm::autodiff::<B, C>(x, residual, weight, bias, epsilon, kernels).into()
    }

    fn attention_op(
        qkv: FloatTensor<Self>,
        options: AttentionOptions,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        attention::autodiff::<B, C>(qkv, options, kernels)
    }

    fn dropout_op(x: FloatTensor<Self>, keep: HiddenKeep, kernels: Kernels) -> FloatTensor<Self> {
        dropout_add::autodiff::<B, C>(x, keep, kernels)
    }

    fn dropout_add_op(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        keep: HiddenKeep,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        dropout_add::add_autodiff::<B, C>(x, residual, keep, kernels)
    }

    fn embedding_rows(
        table: FloatTensor<Self>,
        index: IntTensor<Self>,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        embedding::autodiff::<B, C>(table, index, kernels)
    }

    fn gelu_op(
        x: FloatTensor<Self>,
        bias: Bias<Self>,
        how: GeluApproximation,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        gelu::autodiff::<B, C>(x, bias, how, kernels)
    }

    fn layer_norm_op(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        layer_norm::autodiff::<B, C>(x, weight, bias, epsilon, kernels)
    }

    fn activated_linear(
        x: FloatTensor<Self>,
        bias: Bias<Self>,
        weight: FloatTensor<Self>,
        out_bias: Bias<Self>,
        activation: Activation,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        activated_linear::autodiff::<B, C>(x, bias, weight, out_bias, activation, kernels)
    }

    fn linear_op(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        linear::autodiff::<B, C>(x, weight, bias, kernels)
    }

    fn rms_norm_op(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        rms_norm::autodiff::<B, C>(x, weight, epsilon, kernels)
    }

    fn rotary_op(
        x: FloatTensor<Self>,
        heads: Heads,
        table: RotaryTable,
        back: bool,
        kernels: Kernels,
    ) -> FloatTensor<Self> {
        rotary::autodiff::<B, C>(x, heads, table, back, kernels)
    }

    fn swiglu_op(x: FloatTensor<Self>, kernels: Kernels) -> FloatTensor<Self> {
        swiglu::autodiff::<B, C>(x, kernels)
    }
}
