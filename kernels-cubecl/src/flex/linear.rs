//! A product with its bias, and sums over rows.

use super::gemm::{Matrix, Shared, Threads, multiply};
use super::norm::added_up;
use super::simd::vectors;
use super::{Values, changed, rows_at_once, rows_of, shape_of, tensor, written};
use burn::tensor::Shape;
use burn_flex::FlexTensor;
use rayon::prelude::*;

/// `x [.., in] · weightᵀ + bias`, if there is one, for a weight `[out, in]`.
pub fn linear(x: &FlexTensor, weight: &FlexTensor, bias: Option<&FlexTensor>) -> FlexTensor {
    let [out, inner] = [shape_of(weight)[0], shape_of(weight)[1]];
    let (weight, bias) = (Values::of(weight), bias.map(Values::of));
    let weight = Matrix::new(&weight, [out, inner], inner).transposed();
    product(x, weight, bias.as_deref())
}

/// `dy [.., out] · weight -> [.., in]`, for a weight `[out, in]`.
pub fn input_gradient(dy: &FlexTensor, weight: &FlexTensor) -> FlexTensor {
    let [out, inner] = [shape_of(weight)[0], shape_of(weight)[1]];
    let weight = Values::of(weight);
    product(dy, Matrix::new(&weight, [out, inner], inner), None)
}

/// `x · matrix`, added to rows of the bias if there is one.
fn product(x: &FlexTensor, matrix: Matrix<'_>, bias: Option<&[f32]>) -> FlexTensor {
    let ((rows, inner), mut shape) = (rows_of(x), shape_of(x));
    let (x, width) = (Values::of(x), matrix.columns);
    // SAFETY: every row of a bias is written by the task that has it, and the product is added to what has values;
    // without one it writes everything.
    let y = unsafe {
        written(rows * width, |y| {
            if let Some(bias) = bias {
                y.par_chunks_mut(rows_at_once(width) * width)
                    .flat_map_iter(|rows| rows.chunks_exact_mut(width))
                    .for_each(|row| {
                        row.write_copy_of_slice(bias);
                    });
            }
            let x = Matrix::new(&x, [rows, inner], inner);
            let y = Shared::new(y).at(0);
            multiply(y, width, (x, matrix), 1.0, bias.is_some(), Threads::All);
        })
    };
    let last = shape.num_dims() - 1;
    shape[last] = width;
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
