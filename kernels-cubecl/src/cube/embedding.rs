//! Rows added to rows of a table, in the order in which they come.

use super::{Units, addresses, contiguous, cubes, elem, owned, rows_of};
use burn::backend::ops::IntTensorOps;
use burn::tensor::IntDType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// The cube of the first row that goes to a row of the table adds all that go there; the others do nothing.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_rows<F: Float>(
    table: &mut [F],
    index: &[i32],
    dy: &[F],
    count: usize,
    width: usize,
    #[comptime] units: usize,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let here = CUBE_POS;
    let mut before = Shared::<[u32]>::new_slice(units);
    if here < count {
        let row = index[here];
        let mut seen = 0u32;
        let mut i = unit;
        while i < here {
            seen |= u32::cast_from(index[i] == row);
            i += units;
        }
        before[unit] = seen;
        sync_cube();
        let mut any = 0u32;
        for i in 0..units {
            any |= before[i];
        }
        if any == 0u32 {
            let start = row as usize * width;
            let mut column = unit;
            while column < width {
                let mut sum = f32::cast_from(table[start + column]);
                for i in here..count {
                    if index[i] == row {
                        sum += f32::cast_from(dy[i * width + column]);
                    }
                }
                table[start + column] = F::cast_from(sum);
                column += units;
            }
        }
    }
}

/// Adds rows `dy [n, h]` to the rows `index [n]` of `table`, in place where nobody else holds it.
pub fn add_rows_at(table: CubeTensor, index: CubeTensor, dy: CubeTensor) -> CubeTensor {
    let (table, dy) = (owned(table), contiguous(dy));
    let index = contiguous(CubeBackend::int_cast(index, IntDType::I32));
    let (count, width) = rows_of(&dy);
    let units = Units::of(&table.client).for_work(width, 256);
    // SAFETY: the kernel writes rows of the table, of which each index is one, and reads `count` rows.
    unsafe {
        add_rows::launch_unchecked(
            &table.client,
            cubes(&table.client, count),
            CubeDim::new_1d(units as u32),
            addresses(&[&table, &dy]),
            table.clone().into_buffer_arg(),
            index.into_buffer_arg(),
            dy.into_buffer_arg(),
            count,
            width,
            units,
            elem(&table),
        );
    }
    table
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    for (name, dtype, _) in TYPES {
        all.push(Entry::new(
            format!("embedding_backward {name}"),
            64,
            move |t| {
                Box::new(add_rows::AddRows::new(
                    settings(CubeDim::new_1d(256)),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    256,
                    dtype,
                ))
            },
        ));
    }
}
