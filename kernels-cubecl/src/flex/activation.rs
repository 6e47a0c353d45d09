//! Bias and GELU, and SwiGLU: one pass over memory each way.

use super::norm::added_up;
use super::simd::{Arithmetic, erf, exp, sigmoid, vectors};
use super::{Unwritten, Values, rows_at_once, rows_of, shape_of, tensor, written};
use crate::gelu::GeluApproximation;
use burn::tensor::Shape;
use burn_flex::FlexTensor;
use rayon::prelude::*;
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// 2 √(2/π)
const TWICE: f32 = 2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
const CUBIC: f32 = 0.044715;

/// What GELU multiplies `x` by.
#[inline(always)]
fn gate<M: Arithmetic>(x: f32, how: GeluApproximation) -> f32 {
    match how {
        GeluApproximation::Tanh => sigmoid::<M>(TWICE * x * M::mul_add(CUBIC * x, x, 1.0)),
        GeluApproximation::Erf => 0.5 + 0.5 * erf::<M>(x * FRAC_1_SQRT_2),
    }
}

/// `d gelu / dx`
#[inline(always)]
fn slope<M: Arithmetic>(x: f32, how: GeluApproximation) -> f32 {
    let gate = gate::<M>(x, how);
    let inner = match how {
        GeluApproximation::Tanh => {
            gate * (1.0 - gate) * TWICE * M::mul_add(3.0 * CUBIC * x, x, 1.0)
        }
        GeluApproximation::Erf => 0.25 * TWICE * exp::<M>(-0.5 * x * x),
    };
    M::mul_add(x, inner, gate)
}

vectors! {
    /// GELU of rows with the bias added.
    fn gelu_rows[M](x: &[f32], y: &mut [Unwritten], bias: &[f32], how: GeluApproximation) {
        let n = bias.len();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            match how {
                GeluApproximation::Tanh => for i in 0..n {
                    let v = x[i] + bias[i];
                    y[i].write(v * gate::<M>(v, GeluApproximation::Tanh));
                },
                GeluApproximation::Erf => for i in 0..n {
                    let v = x[i] + bias[i];
                    y[i].write(v * gate::<M>(v, GeluApproximation::Erf));
                },
            }
        }
    }
}

vectors! {
    /// The input's gradient of some rows, and these rows' part of the bias's.
    fn gelu_rows_backward[M](
        x: &[f32],
        dy: &[f32],
        dx: &mut [Unwritten],
        bias: &[f32],
        d_bias: &mut [f32],
        how: GeluApproximation,
    ) {
        let n = bias.len();
        let d_bias = &mut d_bias[..n];
        let rows = x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n));
        for ((x, dy), dx) in rows {
            match how {
                GeluApproximation::Tanh => for i in 0..n {
                    let d = dy[i] * slope::<M>(x[i] + bias[i], GeluApproximation::Tanh);
                    dx[i].write(d);
                    d_bias[i] += d;
                },
                GeluApproximation::Erf => for i in 0..n {
                    let d = dy[i] * slope::<M>(x[i] + bias[i], GeluApproximation::Erf);
                    dx[i].write(d);
                    d_bias[i] += d;
                },
            }
        }
    }
}

/// The bias, or zeros.
fn bias_of(bias: Option<&FlexTensor>, n: usize) -> Vec<f32> {
    bias.map_or_else(|| vec![0.0; n], |bias| Values::of(bias).to_vec())
}

pub fn gelu(x: &FlexTensor, bias: Option<&FlexTensor>, how: GeluApproximation) -> FlexTensor {
    let ((rows, n), shape) = (rows_of(x), shape_of(x));
    let (x, bias) = (Values::of(x), bias_of(bias, n));
    let at_once = rows_at_once(n) * n;
    // SAFETY: every row is written by the task that has it.
    let y = unsafe {
        written(rows * n, |y| {
            let tasks = x.par_chunks(at_once).zip(y.par_chunks_mut(at_once));
            tasks.for_each(|(x, y)| gelu_rows(x, y, &bias, how));
        })
    };
    tensor(y, shape)
}

pub fn gelu_backward(
    x: &FlexTensor,
    bias: Option<&FlexTensor>,
    how: GeluApproximation,
    dy: &FlexTensor,
) -> (FlexTensor, Option<FlexTensor>) {
    let ((rows, n), shape) = (rows_of(x), shape_of(x));
    let (x, dy, values) = (Values::of(x), Values::of(dy), bias_of(bias, n));
    let at_once = rows_at_once(n) * n;
    let mut sums = Vec::new();
    // SAFETY: every row is written by the task that has it.
    let dx = unsafe {
        written(rows * n, |dx| {
            let tasks = x.par_chunks(at_once).zip(dy.par_chunks(at_once));
            tasks
                .zip(dx.par_chunks_mut(at_once))
                .map(|((x, dy), dx)| {
                    let mut d_bias = vec![0f32; n];
                    gelu_rows_backward(x, dy, dx, &values, &mut d_bias, how);
                    d_bias
                })
                .collect_into_vec(&mut sums);
        })
    };
    let d_bias = bias.map(|_| tensor(added_up(sums, n), Shape::new([n])));
    (tensor(dx, shape), d_bias)
}

vectors! {
    /// `silu(gate) ∘ up` of rows `[gate | up]`.
    fn swiglu_rows[M](x: &[f32], y: &mut [Unwritten], f: usize) {
        for (x, y) in x.chunks_exact(2 * f).zip(y.chunks_exact_mut(f)) {
            let (gate, up) = x.split_at(f);
            for i in 0..f {
                y[i].write(gate[i] * sigmoid::<M>(gate[i]) * up[i]);
            }
        }
    }
}

vectors! {
    /// The gradient of rows `[gate | up]`.
    fn swiglu_rows_backward[M](x: &[f32], dy: &[f32], dx: &mut [Unwritten], f: usize) {
        let rows = x.chunks_exact(2 * f).zip(dy.chunks_exact(f));
        for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(2 * f)) {
            let (gate, up) = x.split_at(f);
            let (d_gate, d_up) = dx.split_at_mut(f);
            for i in 0..f {
                let s = sigmoid::<M>(gate[i]);
                d_up[i].write(dy[i] * gate[i] * s);
                d_gate[i].write(dy[i] * up[i] * s * M::mul_add(gate[i], 1.0 - s, 1.0));
            }
        }
    }
}

pub fn swiglu(x: &FlexTensor) -> FlexTensor {
    let ((rows, n), mut shape) = (rows_of(x), shape_of(x));
    let (x, f) = (Values::of(x), n / 2);
    let at_once = rows_at_once(n);
    // SAFETY: every row is written by the task that has it.
    let y = unsafe {
        written(rows * f, |y| {
            let tasks = x.par_chunks(at_once * n).zip(y.par_chunks_mut(at_once * f));
            tasks.for_each(|(x, y)| swiglu_rows(x, y, f));
        })
    };
    let last = shape.num_dims() - 1;
    shape[last] = f;
    tensor(y, shape)
}

pub fn swiglu_backward(x: &FlexTensor, dy: &FlexTensor) -> FlexTensor {
    let ((rows, n), shape) = (rows_of(x), shape_of(x));
    let (x, dy, f) = (Values::of(x), Values::of(dy), n / 2);
    let at_once = rows_at_once(n);
    // SAFETY: every row is written by the task that has it.
    let dx = unsafe {
        written(rows * n, |dx| {
            let tasks = x.par_chunks(at_once * n).zip(dy.par_chunks(at_once * f));
            let tasks = tasks.zip(dx.par_chunks_mut(at_once * n));
            tasks.for_each(|((x, dy), dx)| swiglu_rows_backward(x, dy, dx, f));
        })
    };
    tensor(dx, shape)
}
