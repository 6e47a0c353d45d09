//! What a backend computes in one pass.

use crate::adamw::AdamWFactors;
use crate::attention::AttentionOptions;
use crate::dropout::HiddenKeep;
use crate::flat::{self, Part, Ranges};
use crate::gelu::GeluApproximation;
use crate::head_loss::{HeadLoss, HeadShard};
use crate::rotary::{Heads, RotaryTable};
use crate::{adamw, linear, widened};
use burn::backend::Backend;
use burn::backend::tensor::{Device, FloatTensor, IntTensor};
use burn::tensor::DType;
use std::ops::Range;

/// Fused kernels of a backend, for the types that it says. Forwards return what their backwards need beside the
/// input.
pub trait Fused: Backend {
    /// Whether it has kernels for tensors of that type on that device; the others are called for no other.
    fn fuses(device: &Device<Self>, dtype: DType) -> bool;

    /// `x [.., h]` to the output and each row's mean and `1/√(variance + ε)`, `[rows, 2]`.
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradients of input, weight and bias; `so_far`, what the input's is already, is added to it.
    fn fused_layer_norm_backward(
        x: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        so_far: Option<FloatTensor<Self>>,
    ) -> [FloatTensor<Self>; 3];

    /// `x [.., h]` to the output and each row's `1/√(mean(x²) + ε)`, `[rows, 1]`.
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradients of input and weight; `so_far` as for [`Self::fused_layer_norm_backward`].
    fn fused_rms_norm_backward(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        so_far: Option<FloatTensor<Self>>,
    ) -> [FloatTensor<Self>; 2];

    /// `residual + x`, that normalised, and the norm's statistics: a layer norm's, or without a bias RMSNorm's.
    fn fused_added_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3];

    /// `residual + dropout(x)`, `[s, b, h]`
    fn fused_dropout_add(
        x: FloatTensor<Self>,
        residual: Option<FloatTensor<Self>>,
        keep: &HiddenKeep,
    ) -> FloatTensor<Self>;

    /// `gelu(x + bias)`
    fn fused_gelu(
        x: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        how: GeluApproximation,
    ) -> FloatTensor<Self>;

    /// The gradients of input and bias.
    fn fused_gelu_backward(
        x: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        how: GeluApproximation,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);

    /// SwiGLU of `[.., 2 f]`.
    fn fused_swiglu(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Its gradient.
    fn fused_swiglu_backward(x: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Heads of `[s, n, width]` turned by their positions' angles, forth or `back`.
    fn fused_rotary(
        x: FloatTensor<Self>,
        heads: Heads,
        table: &RotaryTable,
        back: bool,
    ) -> FloatTensor<Self>;

    /// `[s, n, (r + 2) d]` to the output `[s, n, r d]` and the log-sum-exp of every row `[n r, s]`.
    fn fused_attention(
        qkv: FloatTensor<Self>,
        options: &AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradient of the packed input.
    fn fused_attention_backward(
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        options: &AttentionOptions,
        d_out: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `x [.., in] · weightᵀ + bias`, if there is one, for a weight `[out, in]`.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        linear::reference::<Self>(x, weight, bias)
    }

    /// `dy [.., out] · weight -> [.., in]`, for a weight `[out, in]`.
    fn fused_input_gradient(dy: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::input_gradient_reference::<Self>(dy, weight)
    }

    /// `dyᵀ · x`, `[out, in]`, for `dy [.., out]` and `x [.., in]`.
    fn fused_weight_gradient(dy: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::weight_gradient_reference::<Self>(dy, x)
    }

    /// The rows `index [n]` of `table [rows, h]`.
    fn fused_rows_at(table: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        Self::float_select(table, 0, index)
    }

    /// Adds rows `dy [n, h]` to the rows `index [n]` of `table`; in f32, and rounded once.
    fn fused_add_rows_at(
        table: FloatTensor<Self>,
        index: IntTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `[.., n] -> [n]`: the sum over rows.
    fn fused_column_sums(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Adds each part, of any float type, to its elements of the flat buffer `sums [n]`; in place where nobody else
    /// holds it.
    fn fused_gather(
        sums: FloatTensor<Self>,
        parts: Vec<Part<FloatTensor<Self>>>,
    ) -> FloatTensor<Self> {
        flat::gather_reference::<Self>(sums, parts)
    }

    /// The elements of the flat buffer in each of the ranges.
    fn fused_scatter(flat: FloatTensor<Self>, ranges: &[Range<usize>]) -> Vec<FloatTensor<Self>> {
        flat::scatter_reference::<Self>(flat, ranges)
    }

    /// A step of AdamW on flat buffers of f32, `[n]` each: weights and both moments (`state`), in place where nobody
    /// else holds them; and the weights rounded to `dtype`. Weights decay in the ranges alone.
    fn fused_adamw(
        state: [FloatTensor<Self>; 3],
        gradients: FloatTensor<Self>,
        factors: &AdamWFactors,
        decayed: &Ranges,
        dtype: DType,
    ) -> ([FloatTensor<Self>; 3], FloatTensor<Self>) {
        adamw::reference::<Self>(state, gradients, factors, decayed, dtype)
    }

    /// `Σ x²`, `[1]` in f32.
    fn fused_square_sum(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = widened::<Self>(x);
        Self::float_sum(Self::float_mul(x.clone(), x))
    }

    /// Cross entropy of `hidden [n, h] · weightᵀ` for a weight `[v, h]`, without ever holding all logits.
    fn fused_head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        shard: &HeadShard<'_>,
        gradients: bool,
    ) -> HeadLoss<Self>;

    /// `factor · x`
    fn fused_scaled(x: FloatTensor<Self>, factor: f32) -> FloatTensor<Self> {
        Self::float_mul_scalar(x, factor.into())
    }
}
