//! Rotary positions on packed heads, in place where nobody else holds them.

use super::simd::vectors;
use super::{changed, rows_of, shape_of};
use crate::rotary::{Heads, RotaryTable};
use burn_flex::FlexTensor;
use rayon::prelude::*;

vectors! {
    /// Turns pairs `(i, i + n)` of `x`.
    fn turn[M](x: &mut [f32], cos: &[f32], sin: &[f32], back: f32) {
        let n = cos.len();
        let (first, rest) = x.split_at_mut(n);
        let second = &mut rest[..n];
        for i in 0..n {
            let (a, b, sin) = (first[i], second[i], back * sin[i]);
            first[i] = M::mul_add(a, cos[i], -(b * sin));
            second[i] = M::mul_add(b, cos[i], a * sin);
        }
    }
}

pub fn rotary(x: FlexTensor, heads: Heads, table: &RotaryTable, back: bool) -> FlexTensor {
    let (shape, (_, width)) = (shape_of(&x), rows_of(&x));
    let position = shape.num_elements() / shape[0].max(1);
    changed(x, |values| {
        let sign = if back { -1.0 } else { 1.0 };
        let positions = values.par_chunks_mut(position.max(1)).enumerate();
        positions.for_each(|(p, values)| {
            let (cos, sin) = table.at(p);
            for group in values.chunks_exact_mut(width) {
                for head in group.chunks_exact_mut(heads.width).take(heads.turned) {
                    turn(head, cos, sin, sign);
                }
            }
        });
    })
}
