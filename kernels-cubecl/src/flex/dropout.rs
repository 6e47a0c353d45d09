//! Dropout with the residual that it is added to: a row's factors exist while the row is at work.

use super::simd::vectors;
use super::{Unwritten, Values, rows_at_once, rows_of, shape_of, tensor, written};
use crate::dropout::HiddenKeep;
use burn_flex::FlexTensor;
use rayon::prelude::*;

vectors! {
    fn multiply_rows[M](x: &[f32], factors: &[f32], y: &mut [Unwritten]) {
        for ((x, factor), y) in x.iter().zip(factors).zip(y) {
            y.write(x * factor);
        }
    }
}

vectors! {
    fn multiply_and_add[M](x: &[f32], factors: &[f32], residual: &[f32], y: &mut [Unwritten]) {
        for (((x, factor), residual), y) in x.iter().zip(factors).zip(residual).zip(y) {
            y.write(M::mul_add(*x, *factor, *residual));
        }
    }
}

pub fn dropout_add(x: &FlexTensor, residual: Option<&FlexTensor>, keep: &HiddenKeep) -> FlexTensor {
    let ((rows, h), shape) = (rows_of(x), shape_of(x));
    let (x, residual) = (Values::of(x), residual.map(Values::of));
    let at_once = rows_at_once(h);
    // SAFETY: every row is written by the task that has it.
    let y = unsafe {
        written(rows * h, |y| {
            let tasks = x.par_chunks(at_once * h).zip(y.par_chunks_mut(at_once * h));
            tasks.enumerate().for_each(|(task, (x, y))| {
                let mut factors = vec![0f32; h];
                let rows = x.chunks_exact(h).zip(y.chunks_exact_mut(h));
                for (row, (x, y)) in (task * at_once..).zip(rows) {
                    keep.fill(row, &mut factors);
                    match &residual {
                        Some(residual) => {
                            let residual = &residual[row * h..(row + 1) * h];
                            multiply_and_add(x, &factors, residual, y);
                        }
                        None => multiply_rows(x, &factors, y),
                    }
                }
            });
        })
    };
    tensor(y, shape)
}
