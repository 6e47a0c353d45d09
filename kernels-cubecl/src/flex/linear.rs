//! A product with its bias, and sums over rows.

use super::gemm::{Matrix, Shared, Threads, multiply};
use super::norm::added_up;
use super::simd::vectors;
use super::{Values, changed, rows_at_once, rows_of, shape_of, tensor, written};
use burn::tensor::Shape;
use burn_flex::FlexTensor;
use rayon::prelude::*;

/// `x [.., in] · weightᵀ + bias` for a weight `[out, in]`: the product is added to rows of the bias.
pub fn linear(x: &FlexTensor, weight: &FlexTensor, bias: &FlexTensor) -> FlexTensor {
    let ((rows, inner), mut shape) = (rows_of(x), shape_of(x));
    let (x, bias) = (Values::of(x), Values::of(bias));
    let (weight, out) = (Values::of(weight), bias.len());
    // SAFETY: every row is written by the task that has it, and the product is added to what has values.
    let y = unsafe {
        written(rows * out, |y| {
            y.par_chunks_mut(rows_at_once(out) * out).for_each(|y| {
                for y in y.chunks_exact_mut(out) {
                    y.iter_mut().zip(bias.iter()).for_each(|(y, bias)| {
                        y.write(*bias);
                    });
                }
            });
            let x = Matrix::new(&x, [rows, inner], inner);
            let weight = Matrix::new(&weight, [out, inner], inner).transposed();
            let y = Shared::new(y).at(0);
            multiply(y, out, (x, weight), 1.0, true, Threads::All);
        })
    };
    let last = shape.num_dims() - 1;
    shape[last] = out;
    tensor(y, shape)
}

/// `dyᵀ · x`, `[out, in]`, for `dy [.., out]` and `x [.., in]`.
pub fn weight_gradient(dy: &FlexTensor, x: &FlexTensor) -> FlexTensor {
    let ((rows, out), (_, inner)) = (rows_of(dy), rows_of(x));
    if rows == 0 {
        return tensor(vec![0.0; out * inner], Shape::new([out, inner]));
    }
    let (dy, x) = (Values::of(dy), Values::of(x));
    // SAFETY: the product writes all of it.
    let dw = unsafe {
        written(out * inner, |dw| {
            let dy = Matrix::new(&dy, [rows, out], out).transposed();
            let x = Matrix::new(&x, [rows, inner], inner);
            let dw = Shared::new(dw).at(0);
            multiply(dw, inner, (dy, x), 1.0, false, Threads::All);
        })
    };
    tensor(dw, Shape::new([out, inner]))
}

/// The rows `index` of `table [rows, h]`.
pub fn rows_at(table: &FlexTensor, index: &[usize]) -> FlexTensor {
    let ((_, h), table) = (rows_of(table), Values::of(table));
    let mut rows = Vec::with_capacity(index.len() * h);
    for row in index {
        rows.extend_from_slice(&table[row * h..(row + 1) * h]);
    }
    tensor(rows, Shape::new([index.len(), h]))
}

/// Adds rows `dy [n, h]` to the rows `index` of `table [rows, h]`, in place where nobody else holds it.
pub fn add_rows_at(table: FlexTensor, index: &[usize], dy: &FlexTensor) -> FlexTensor {
    let ((_, h), dy) = (rows_of(dy), Values::of(dy));
    changed(table, |table| {
        for (row, dy) in index.iter().zip(dy.chunks_exact(h)) {
            let row = &mut table[row * h..(row + 1) * h];
            row.iter_mut()
                .zip(dy)
                .for_each(|(sum, value)| *sum += value);
        }
    })
}

vectors! {
    /// Adds rows to `sums`.
    fn add_rows[M](x: &[f32], sums: &mut [f32]) {
        let n = sums.len();
        for x in x.chunks_exact(n) {
            for i in 0..n {
                sums[i] += x[i];
            }
        }
    }
}

/// `[.., n] -> [n]`: the sum over rows.
pub fn column_sums(x: &FlexTensor) -> FlexTensor {
    let (_, n) = rows_of(x);
    let x = Values::of(x);
    let mut parts = Vec::new();
    x.par_chunks(rows_at_once(n) * n)
        .map(|x| {
            let mut sums = vec![0f32; n];
            add_rows(x, &mut sums);
            sums
        })
        .collect_into_vec(&mut parts);
    tensor(added_up(parts, n), Shape::new([n]))
}
