//! Sums: over a cube's units, and over the rows of a matrix.

use super::{Units, addresses, contiguous, elem, empty, rows_of, vector_size};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// The sum over a cube's `size` units, for each of them. `shared` has a place for each unit.
#[cube]
pub fn cube_sum(
    value: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] size: usize,
    #[comptime] planes: bool,
) -> f32 {
    let unit = UNIT_POS as usize;
    let mut total = value;
    if comptime!(size > 1) {
        if comptime!(planes) {
            total = plane_sum(value);
            if UNIT_POS_PLANE == 0 {
                shared[PLANE_POS as usize] = total;
            }
            sync_cube();
            total = 0.0f32;
            for plane in 0..(CUBE_DIM / PLANE_DIM) as usize {
                total += shared[plane];
            }
        } else {
            shared[unit] = value;
            sync_cube();
            let steps = comptime!(size.ilog2() as usize);
            #[unroll]
            for step in 0..steps {
                let half = comptime!(size >> (step + 1));
                if unit < half {
                    let other = shared[unit + half];
                    shared[unit] += other;
                }
                sync_cube();
            }
            total = shared[0];
        }
        sync_cube();
    }
    total
}

/// The largest value of a cube's `size` units, for each of them.
#[cube]
pub fn cube_max(
    value: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] size: usize,
    #[comptime] planes: bool,
) -> f32 {
    let unit = UNIT_POS as usize;
    let mut top = value;
    if comptime!(size > 1) {
        if comptime!(planes) {
            top = plane_max(value);
            if UNIT_POS_PLANE == 0 {
                shared[PLANE_POS as usize] = top;
            }
            sync_cube();
            for plane in 0..(CUBE_DIM / PLANE_DIM) as usize {
                top = max(top, shared[plane]);
            }
        } else {
            shared[unit] = value;
            sync_cube();
            let steps = comptime!(size.ilog2() as usize);
            #[unroll]
            for step in 0..steps {
                let half = comptime!(size >> (step + 1));
                if unit < half {
                    let other = shared[unit + half];
                    shared[unit] = max(shared[unit], other);
                }
                sync_cube();
            }
            top = shared[0];
        }
        sync_cube();
    }
    top
}

/// How a matrix is cut to sum its rows: cubes of `across` vectors of columns, and `down` rows side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strips {
    pub across: usize,
    pub down: usize,
}

impl Strips {
    pub fn of(units: Units) -> Self {
        match units.most {
            1 => Strips { across: 1, down: 1 },
            _ => Strips {
                across: 32,
                down: 8,
            },
        }
    }

    pub fn cube_dim(self) -> CubeDim {
        CubeDim::new_1d((self.across * self.down) as u32)
    }
}

/// Parts of a matrix of `rows`, each summed by itself: as many as keep a large device busy, the same on every one.
pub fn parts_of(rows: usize) -> usize {
    rows.div_ceil(64).clamp(1, 128)
}

/// Adds the sums of a cube's rows up and writes them as one row of `partials`. `shared` has a place for each unit.
#[cube]
pub fn write_strip<N: Size>(
    sum: Vector<f32, N>,
    partials: &mut [Vector<f32, N>],
    shared: &mut Shared<[Vector<f32, N>]>,
    column: usize,
    width: usize,
    part: usize,
    #[comptime] strips: Strips,
) {
    let unit = UNIT_POS as usize;
    let mut total = sum;
    if comptime!(strips.down > 1) {
        shared[unit] = sum;
        sync_cube();
        total = Vector::new(0.0f32);
        #[unroll]
        for row in 0..strips.down {
            total += shared[row * strips.across + unit % strips.across];
        }
    }
    if unit < strips.across && column < width {
        partials[part * width + column] = total;
    }
}

/// `[rows, width]` to the sums of `parts` runs of rows, `[parts, width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn column_partials<F: Float, N: Size>(
    x: &[Vector<F, N>],
    partials: &mut [Vector<f32, N>],
    rows: usize,
    width: usize,
    rows_of_part: usize,
    #[comptime] strips: Strips,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * strips.across + unit % strips.across;
    let part = CUBE_POS_Y as usize;
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(strips.across * strips.down));
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let end = min(rows, (part + 1) * rows_of_part);
    if column < width {
        let mut row = part * rows_of_part + unit / strips.across;
        while row < end {
            sum += Vector::cast_from(x[row * width + column]);
            row += strips.down;
        }
    }
    write_strip(sum, partials, &mut shared, column, width, part, strips);
}

/// `[count, parts, width]` to the sums over `parts`, `[count, width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_partials<F: Float>(
    partials: &[f32],
    sums: &mut [F],
    parts: usize,
    width: usize,
    #[comptime] strips: Strips,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * strips.across + unit % strips.across;
    let first = CUBE_POS_Y as usize * parts;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(strips.across * strips.down));
    let mut sum = 0.0f32;
    if column < width {
        let mut part = unit / strips.across;
        while part < parts {
            sum += partials[(first + part) * width + column];
            part += strips.down;
        }
    }
    let mut total = sum;
    if comptime!(strips.down > 1) {
        shared[unit] = sum;
        sync_cube();
        total = 0.0f32;
        #[unroll]
        for row in 0..strips.down {
            total += shared[row * strips.across + unit % strips.across];
        }
    }
    if unit < strips.across && column < width {
        sums[CUBE_POS_Y as usize * width + column] = F::cast_from(total);
    }
}

/// The second stage: `partials [count, parts, width]` to `[count, width]` of a type.
pub fn finished(partials: CubeTensor, dtype: DType) -> CubeTensor {
    let shape = partials.shape();
    let (count, parts, width) = (shape[0], shape[1], shape[2]);
    let sums = empty(&partials, [count, width], dtype);
    let client = partials.client.clone();
    let strips = Strips::of(Units::of(&client));
    let across = width.div_ceil(strips.across);
    // SAFETY: the kernel writes `count · width` sums, and reads `count · parts · width` partial ones.
    unsafe {
        sum_partials::launch_unchecked(
            &client,
            CubeCount::Static(across as u32, count as u32, 1),
            strips.cube_dim(),
            addresses(&[&partials]),
            partials.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            parts,
            width,
            strips,
            elem(&sums),
        );
    }
    sums
}

/// `[.., n] -> [n]`: the sum over rows, in f32 and rounded once.
pub fn column_sums(x: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    let ((rows, n), dtype) = (rows_of(&x), x.dtype);
    let parts = parts_of(rows);
    let partials = empty(&x, [1, parts, n], DType::F32);
    let client = x.client.clone();
    let (strips, vector) = (Strips::of(Units::of(&client)), vector_size(&x, &[n]).min(4));
    let width = n / vector;
    // SAFETY: the kernel reads `rows` rows of `n`, and writes `parts` of them.
    unsafe {
        column_partials::launch_unchecked(
            &client,
            CubeCount::Static(width.div_ceil(strips.across) as u32, parts as u32, 1),
            strips.cube_dim(),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            rows,
            width,
            rows.div_ceil(parts),
            strips,
            elem(&x),
        );
    }
    let sums = finished(partials, dtype);
    super::reshaped(sums, [n])
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    let strips = Strips::of(Units {
        most: 1024,
        planes: true,
    });
    for (name, dtype, load) in TYPES {
        all.push(Entry::new(format!("column_sums {name}"), 64, move |t| {
            Box::new(column_partials::ColumnPartials::new(
                settings(strips.cube_dim()),
                t.device,
                t.properties,
                b(),
                b(),
                (),
                (),
                (),
                load.min(4),
                strips,
                dtype,
            ))
        }));
        all.push(Entry::new(
            format!("column_sums_second {name}"),
            64,
            move |t| {
                Box::new(sum_partials::SumPartials::new(
                    settings(strips.cube_dim()),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    (),
                    (),
                    strips,
                    dtype,
                ))
            },
        ));
    }
}
