//! What a row of the backward subtracts: `rowsum(dO ∘ O)`.

use super::super::{Units, cubes, elem, vector_size};
use super::Call;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// `lanes` units take a row, of a position and a query head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn row_sums<F: Float, N: Size>(
    out: &[Vector<F, N>],
    d_out: &[Vector<F, N>],
    delta: &mut [f32],
    heads: usize,
    s: usize,
    #[comptime] vectors: usize,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let row = CUBE_POS * comptime!(units / lanes) + unit / lanes;
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if row < s * heads {
        let mut i = unit % lanes;
        while i < vectors {
            let at = row * vectors + i;
            sum += Vector::cast_from(out[at]) * Vector::cast_from(d_out[at]);
            i += lanes;
        }
    }
    shared[unit] = sum.vector_sum();
    sync_cube();
    let lane = unit % lanes;
    if lane == 0 && row < s * heads {
        let mut total = 0.0f32;
        for other in 0..lanes {
            total += shared[unit + other];
        }
        delta[row % heads * s + row / heads] = total;
    }
}

/// Writes `delta [n r, s]`.
pub fn delta(call: &Call<'_>, out: &CubeTensor, d_out: &CubeTensor, delta: &CubeTensor) {
    let (d, client) = (call.d(), &out.client);
    let vector = vector_size(out, &[d]);
    let vectors = d / vector;
    let units = Units::of(client).for_work(256, 256);
    let lanes = vectors.next_power_of_two().min(units).min(16);
    let rows = call.s * call.heads();
    // SAFETY: the kernel reads `rows` rows of `d`, and writes a number for each.
    unsafe {
        row_sums::launch_unchecked(
            client,
            cubes(client, rows.div_ceil(units / lanes)),
            CubeDim::new_1d(units as u32),
            call.addresses(),
            vector,
            out.clone().into_buffer_arg(),
            d_out.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            call.heads(),
            call.s,
            vectors,
            lanes,
            units,
            elem(out),
        );
    }
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::super::catalog::Entry>) {
    use super::super::catalog::{Entry, TYPES, buffer as b, settings};
    for (name, dtype, load) in TYPES {
        all.push(Entry::new(
            format!("attention_delta {name}"),
            64,
            move |t| {
                Box::new(row_sums::RowSums::new(
                    settings(CubeDim::new_1d(256)),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    load,
                    128 / load,
                    16,
                    256,
                    dtype,
                ))
            },
        ));
    }
}
