//! The fused kernels on the CPU, over Flex's tensors of f32: parallel over rayon's threads, vectorised for the
//! processor at hand. Results do not depend on the number of threads: sums over rows are added up in parts of
//! fixed size.

mod activation;
mod attention;
mod dropout;
mod flat;
mod gemm;
mod head;
mod linear;
mod norm;
mod rotary;
pub mod simd;

use crate::Fused;
use crate::adamw::AdamWFactors;
use crate::attention::AttentionOptions;
use crate::dropout::HiddenKeep;
use crate::flat::Ranges;
use crate::gelu::GeluApproximation;
use crate::head_loss::{HeadLoss, HeadShard};
use crate::rotary::{Heads, RotaryTable};
use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{Flex, FlexDevice, FlexTensor, Layout};
use std::mem::MaybeUninit;

impl Fused for Flex {
    fn fuses(_: &FlexDevice, dtype: DType) -> bool {
        dtype == DType::F32
    }

    fn fused_layer_norm(
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        epsilon: f64,
    ) -> (FlexTensor, FlexTensor) {
        norm::layer_norm(&x, &weight, &bias, epsilon as f32)
    }

    fn fused_layer_norm_backward(
        x: FlexTensor,
        stats: FlexTensor,
        weight: FlexTensor,
        dy: FlexTensor,
        so_far: Option<FlexTensor>,
    ) -> [FlexTensor; 3] {
        norm::layer_norm_backward(&x, &stats, &weight, &dy, so_far.as_ref())
    }

    fn fused_rms_norm(x: FlexTensor, weight: FlexTensor, epsilon: f64) -> (FlexTensor, FlexTensor) {
        norm::rms_norm(&x, &weight, epsilon as f32)
    }

    fn fused_rms_norm_backward(
        x: FlexTensor,
        scale: FlexTensor,
        weight: FlexTensor,
        dy: FlexTensor,
        so_far: Option<FlexTensor>,
    ) -> [FlexTensor; 2] {
        norm::rms_norm_backward(&x, &scale, &weight, &dy, so_far.as_ref())
    }

    fn fused_added_norm(
        x: FlexTensor,
        residual: FlexTensor,
        weight: FlexTensor,
        bias: Option<FlexTensor>,
        epsilon: f64,
    ) -> [FlexTensor; 3] {
        match bias {
            Some(bias) => norm::added_layer_norm(&x, &residual, &weight, &bias, epsilon as f32),
            None => norm::added_rms_norm(&x, &residual, &weight, epsilon as f32),
        }
    }

    fn fused_dropout_add(
        x: FlexTensor,
        residual: Option<FlexTensor>,
        keep: &HiddenKeep,
    ) -> FlexTensor {
        dropout::dropout_add(&x, residual.as_ref(), keep)
    }

    fn fused_gelu(x: FlexTensor, bias: Option<FlexTensor>, how: GeluApproximation) -> FlexTensor {
        activation::gelu(&x, bias.as_ref(), how)
    }

    fn fused_gelu_backward(
        x: FlexTensor,
        bias: Option<FlexTensor>,
        how: GeluApproximation,
        dy: FlexTensor,
    ) -> (FlexTensor, Option<FlexTensor>) {
        activation::gelu_backward(&x, bias.as_ref(), how, &dy)
    }

    fn fused_swiglu(x: FlexTensor) -> FlexTensor {
        activation::swiglu(&x)
    }

    fn fused_swiglu_backward(x: FlexTensor, dy: FlexTensor) -> FlexTensor {
        activation::swiglu_backward(&x, &dy)
    }

    fn fused_rotary(x: FlexTensor, heads: Heads, table: &RotaryTable, back: bool) -> FlexTensor {
        rotary::rotary(x, heads, table, back)
    }

    fn fused_attention(qkv: FlexTensor, options: &AttentionOptions) -> (FlexTensor, FlexTensor) {
        attention::forward(&qkv, options)
    }

    fn fused_attention_backward(
        qkv: FlexTensor,
        out: FlexTensor,
        lse: FlexTensor,
        options: &AttentionOptions,
        d_out: FlexTensor,
    ) -> FlexTensor {
        attention::backward(&qkv, &out, &lse, options, &d_out)
    }

    fn fused_linear(x: FlexTensor, weight: FlexTensor, bias: Option<FlexTensor>) -> FlexTensor {
        linear::linear(&x, &weight, bias.as_ref())
    }

    fn fused_input_gradient(dy: FlexTensor, weight: FlexTensor) -> FlexTensor {
        linear::input_gradient(&dy, &weight)
    }

    fn fused_weight_gradient(dy: FlexTensor, x: FlexTensor) -> FlexTensor {
        linear::weight_gradient(&dy, &x)
    }

    fn fused_rows_at(table: FlexTensor, index: FlexTensor) -> FlexTensor {
        linear::rows_at(&table, &row_numbers(index))
    }

    fn fused_add_rows_at(table: FlexTensor, index: FlexTensor, dy: FlexTensor) -> FlexTensor {
        linear::add_rows_at(table, &row_numbers(index), &dy)
    }

    fn fused_column_sums(x: FlexTensor) -> FlexTensor {
        linear::column_sums(&x)
    }

    fn fused_adamw(
        state: [FlexTensor; 3],
        gradients: FlexTensor,
        factors: &AdamWFactors,
        decayed: &Ranges,
        dtype: DType,
    ) -> ([FlexTensor; 3], FlexTensor) {
        flat::adamw(state, &gradients, factors, decayed, dtype)
    }

    fn fused_head_loss(
        hidden: FlexTensor,
        weight: FlexTensor,
        shard: &HeadShard<'_>,
        gradients: bool,
    ) -> HeadLoss<Flex> {
        head::head_loss(&hidden, &weight, shard, gradients)
    }

    fn fused_scaled(x: FlexTensor, factor: f32) -> FlexTensor {
        head::scaled(x, factor)
    }
}

/// A tensor's values, one after another.
struct Values(FlexTensor);

impl Values {
    /// A part of a larger buffer stays where it is, if its values lie one after another.
    fn of(x: &FlexTensor) -> Self {
        match x.is_contiguous() {
            true => Values(x.clone()),
            false => Values(x.to_contiguous()),
        }
    }
}

impl std::ops::Deref for Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_slice().expect("contiguous f32")
    }
}

/// Indices of rows.
fn row_numbers(index: FlexTensor) -> Vec<usize> {
    let index = index.into_data();
    index.iter::<i64>().map(|row| row as usize).collect()
}

/// `[.., n]` as rows of `n`.
fn rows_of(x: &FlexTensor) -> (usize, usize) {
    let shape = x.layout().shape();
    let n = shape[shape.num_dims() - 1];
    (shape.num_elements() / n.max(1), n)
}

fn shape_of(x: &FlexTensor) -> Shape {
    x.layout().shape().clone()
}

/// Memory whose values are yet to be written.
type Unwritten = MaybeUninit<f32>;

/// `len` values that `write` makes.
///
/// # Safety
/// `write` writes every one of them.
unsafe fn written(len: usize, write: impl FnOnce(&mut [Unwritten])) -> Vec<f32> {
    let mut values: Vec<f32> = Vec::with_capacity(len);
    write(&mut values.spare_capacity_mut()[..len]);
    // SAFETY: the capacity is there, and the caller says that the values are.
    unsafe { values.set_len(len) };
    values
}

fn tensor(values: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::new(
        Bytes::from_elems(values),
        Layout::contiguous(shape),
        DType::F32,
    )
}

/// `x`, or a copy where somebody else holds it.
fn owned(mut x: FlexTensor) -> FlexTensor {
    let whole = size_of::<f32>() * x.layout().num_elements() == x.bytes().len();
    if whole && x.is_contiguous() && x.try_storage_mut::<f32>().is_some() {
        return x;
    }
    tensor(Values::of(&x).to_vec(), shape_of(&x))
}

/// `x` after `change`: in place where nobody else holds it, else a copy.
fn changed(x: FlexTensor, change: impl FnOnce(&mut [f32])) -> FlexTensor {
    let mut x = owned(x);
    change(x.try_storage_mut::<f32>().expect("its only holder"));
    x
}

/// Rows that one task takes: of about so many values.
fn rows_at_once(width: usize) -> usize {
    (16384 / width.max(1)).clamp(1, 256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_nobody_else_holds_is_changed_in_place() {
        let address = |x: &FlexTensor| x.bytes().as_ptr();
        let add = |x: FlexTensor| changed(x, |values| values.iter_mut().for_each(|v| *v += 1.0));
        let x = tensor(vec![1.0, 2.0, 3.0, 4.0], Shape::new([2, 2]));
        let before = address(&x);
        let x = add(x);
        assert_eq!(address(&x), before);
        // Somebody else holds it, or more of it.
        let held = x.clone();
        assert_ne!(address(&add(x)), before);
        let part = add(held.narrow(0, 1, 1));
        assert_eq!(*Values::of(&part), [5.0, 6.0]);
        assert_eq!(*Values::of(&held), [2.0, 3.0, 4.0, 5.0]);
        let turned = add(held.transpose(0, 1));
        assert_eq!(*Values::of(&turned), [3.0, 5.0, 4.0, 6.0]);
        assert_eq!(address(&held), before);
        // And alone again.
        assert_eq!(address(&add(held)), before);
    }
}
