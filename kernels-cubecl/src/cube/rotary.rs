//! Rotary positions on packed heads, in place where nobody else holds them.

use super::{addresses, elem, owned, rows_of, unit_each, vector_size};
use crate::rotary::{Heads, RotaryTable};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// A unit turns a vector of pairs, of one head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn turn<F: Float, N: Size>(
    x: &mut [Vector<F, N>],
    cos: &[Vector<f32, N>],
    sin: &[Vector<f32, N>],
    sign: f32,
    work: usize,
    groups: usize,
    width: usize,
    head: usize,
    turned: usize,
    pairs: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < work {
        let pair = ABSOLUTE_POS % pairs;
        let of_head = ABSOLUTE_POS / pairs;
        let row = of_head / turned;
        let first = row * width + of_head % turned * head + pair;
        let angle = row / groups * pairs + pair;
        let a = Vector::<f32, N>::cast_from(x[first]);
        let b = Vector::<f32, N>::cast_from(x[first + pairs]);
        let c = cos[angle];
        let s = sin[angle] * Vector::new(sign);
        x[first] = Vector::cast_from(a * c - b * s);
        x[first + pairs] = Vector::cast_from(b * c + a * s);
    }
}

pub fn rotary(x: CubeTensor, heads: Heads, table: &RotaryTable, back: bool) -> CubeTensor {
    let x = owned(x);
    let (groups, (rows, width)) = (x.meta.shape()[1], rows_of(&x));
    let [cos, sin] = table.on(&x.device);
    let pairs = table.frequencies();
    let vector = vector_size(&x, &[width, heads.width, pairs]).min(4);
    let work = rows * heads.turned * pairs / vector;
    let (count, dim) = unit_each(&x.client, work);
    // SAFETY: each unit reads and writes two vectors that no other touches, and reads its position's angles.
    unsafe {
        turn::launch_unchecked(
            &x.client,
            count,
            dim,
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            if back { -1.0 } else { 1.0 },
            work,
            groups,
            width / vector,
            heads.width / vector,
            heads.turned,
            pairs / vector,
            elem(&x),
        );
    }
    x
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::UNITS;
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    for (name, dtype, load) in TYPES {
        all.push(Entry::new(format!("rotary {name}"), 64, move |t| {
            Box::new(turn::Turn::new(
                settings(CubeDim::new_1d(UNITS as u32)),
                t.device,
                t.properties,
                b(),
                b(),
                b(),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                load.min(4),
                dtype,
            ))
        }));
    }
}
