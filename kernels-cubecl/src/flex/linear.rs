//! A product with its bias, and sums over rows.

use super::gemm::{Matrix, Shared, Threads, multiply};
use super::norm::added_up;
use super::simd::vectors;
use super::{Values, rows_at_once, rows_of, shape_of, tensor, written};
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
