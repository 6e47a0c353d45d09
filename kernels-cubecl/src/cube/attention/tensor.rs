//! Attention on tensor cores: heads of 64, 96 or 128 features in 16 bits. A plane's products of 16 rows are `mma`
//! instructions; scores and probabilities stay in its registers.

use super::super::dropout::{
    HeadsGenerator, first_probability, heads_generator, pair_factors, probability_factor,
};
use super::super::elem;
use super::mma::{
    LOAD, LOG2_E, PAIR, PLANE, Tile, accumulate, column_of, load, loaded, power_of_two,
    powers_of_two, quad_max, quad_sum, row_of, scores, write, zeros,
};
use super::{Call, Place, Sizes};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cmma::MmaDefinition;
use cubecl::features::Plane;
use cubecl::ir::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

/// Whether a call's type, width and device have these kernels.
pub fn serves(call: &Call<'_>) -> bool {
    let kind = match call.qkv.dtype {
        DType::BF16 => FloatKind::BF16,
        DType::F16 => FloatKind::F16,
        _ => return false,
    };
    let operand = ElemType::Float(kind);
    let config = MmaConfig {
        a_type: operand,
        b_type: operand,
        cd_type: ElemType::Float(FloatKind::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let properties = call.qkv.client.properties();
    let plane = properties.hardware.plane_size_min;
    // Dropout makes random words for two keys at once.
    let pairs = call.options.dropout.is_none() || call.s.is_multiple_of(2);
    pairs
        && [64, 96, 128].contains(&call.d())
        && plane as usize == PLANE
        && plane == properties.hardware.plane_size_max
        && properties.features.plane.contains(Plane::Ops)
        && properties.features.matmul.mma.contains(&config)
        && properties.features.matmul.ldmatrix.contains(&operand)
        && properties.features.copy_async
}

/// A cube takes a block of rows of a query head.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn tensor_forward<F: Float, N: Size, P: Size>(
    qkv: &[Vector<F, N>],
    out: &mut [Vector<F, P>],
    lse: &mut [f32],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let (across, features) = comptime!((tile.across(), tile.features()));
    let slope = scale * LOG2_E;
    let s = sizes.s;
    // The longest first.
    let rows = comptime!(tile.rows());
    let row = (s.div_ceil(rows) - 1 - CUBE_POS_X as usize) * rows;
    let group = CUBE_POS_Y as usize / sizes.r;
    let head = CUBE_POS_Y as usize % sizes.r;
    let of_q = Place::packed(sizes, group, head, tile.d);
    let of_k = Place::packed(sizes, group, sizes.r, tile.d);
    let of_v = Place::packed(sizes, group, sizes.r + 1, tile.d);
    let first = first_probability(dropout, group as u32, head as u32, sizes.r as u32, s as u32);

    let mut q =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(tile.rows() * tile.pitch()), 16usize);
    let mut k = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(tile.columns * tile.pitch()),
        16usize,
    );
    let mut v = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(tile.columns * tile.pitch()),
        16usize,
    );
    let mut sums = zeros::<P>(comptime!(2 * tile.strips * features));
    // Of the unit's rows: the highest score, and the sum of exponentials less it.
    let mut top = Array::<f32>::new(comptime!(2 * tile.strips));
    let mut total = Array::<f32>::new(comptime!(2 * tile.strips));
    #[unroll]
    for i in 0..comptime!(2 * tile.strips) {
        top[i] = f32::min_value();
        total[i] = 0.0f32;
    }
    load::<F, N>(qkv, &of_q, row, s, &mut q, comptime!(tile.rows()), tile);
    load::<F, N>(qkv, &of_k, 0usize, s, &mut k, tile.columns, tile);
    let blocks = min(s, row + comptime!(tile.rows())).div_ceil(tile.columns);
    for block in 0..blocks {
        let key = block * tile.columns;
        loaded();
        // The values come while the scores are made, the next keys while the values are used.
        load::<F, N>(qkv, &of_v, key, s, &mut v, tile.columns, tile);
        let mut p = scores::<F, N, P>(&definition, &q, &k, tile);
        #[unroll]
        for strip in 0..tile.strips {
            #[unroll]
            for half in 0..2usize {
                let of_row = comptime!(2 * strip + half);
                let query = row + row_of(strip, half, tile);
                if key + tile.columns > row + 1 {
                    #[unroll]
                    for j in 0..across {
                        let at = comptime!(2 * (strip * across + j) + half);
                        let column = key + column_of(j);
                        let mut score = p[at];
                        #[unroll]
                        for i in 0..PAIR {
                            let hidden = column + i > query;
                            score.insert(i, select(hidden, f32::min_value(), score.extract(i)));
                        }
                        p[at] = score;
                    }
                }
                let mut highest = top[of_row];
                #[unroll]
                for j in 0..across {
                    let score = p[comptime!(2 * (strip * across + j) + half)];
                    highest = max(highest, max(score.extract(0usize), score.extract(1usize)));
                }
                highest = quad_max(highest);
                let less = power_of_two((top[of_row] - highest) * slope);
                top[of_row] = highest;
                let shift = highest * slope;
                let mut sum = 0.0f32;
                #[unroll]
                for j in 0..across {
                    let at = comptime!(2 * (strip * across + j) + half);
                    let value = powers_of_two(p[at] * Vector::new(slope) - Vector::new(shift));
                    sum += value.extract(0usize) + value.extract(1usize);
                    p[at] = value;
                    if comptime!(tile.dropout) {
                        let key = (key + column_of(j)) as u32;
                        let kept = pair_factors::<P>(dropout, &first, query as u32, key, s as u32);
                        p[at] = value * kept;
                    }
                }
                total[of_row] = total[of_row] * less + sum;
                #[unroll]
                for j in 0..features {
                    let at = comptime!(2 * (strip * features + j) + half);
                    sums[at] *= Vector::new(less);
                }
            }
        }
        loaded();
        if block + 1 < blocks {
            load::<F, N>(
                qkv,
                &of_k,
                key + tile.columns,
                s,
                &mut k,
                tile.columns,
                tile,
            );
        }
        accumulate::<F, N, P>(&definition, &p, &v, &mut sums, tile);
    }
    #[unroll]
    for strip in 0..tile.strips {
        #[unroll]
        for half in 0..2usize {
            let of_row = comptime!(2 * strip + half);
            let sum = quad_sum(total[of_row]);
            let each = 1.0f32 / sum;
            #[unroll]
            for j in 0..features {
                let at = comptime!(2 * (strip * features + j) + half);
                sums[at] *= Vector::new(each);
            }
            let query = row + row_of(strip, half, tile);
            let of_four = UNIT_POS_X % 4;
            if query < s && of_four == 0 {
                lse[CUBE_POS_Y as usize * s + query] = top[of_row] * scale + sum.ln();
            }
        }
    }
    let place = Place::output(sizes, group, head, tile.d);
    write::<F, P>(&sums, 1.0f32, out, &place, row, s, tile);
}

/// A cube takes a block of rows of a query head: the queries' gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn tensor_backward_queries<F: Float, N: Size, P: Size>(
    qkv: &[Vector<F, N>],
    d_out: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    d_qkv: &mut [Vector<F, P>],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let (across, features) = comptime!((tile.across(), tile.features()));
    let slope = scale * LOG2_E;
    let s = sizes.s;
    let rows = comptime!(tile.rows());
    let row = (s.div_ceil(rows) - 1 - CUBE_POS_X as usize) * rows;
    let group = CUBE_POS_Y as usize / sizes.r;
    let head = CUBE_POS_Y as usize % sizes.r;
    let of_q = Place::packed(sizes, group, head, tile.d);
    let of_k = Place::packed(sizes, group, sizes.r, tile.d);
    let of_v = Place::packed(sizes, group, sizes.r + 1, tile.d);
    let of_dy = Place::output(sizes, group, head, tile.d);
    let first = first_probability(dropout, group as u32, head as u32, sizes.r as u32, s as u32);

    let mut q =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(tile.rows() * tile.pitch()), 16usize);
    let mut dy =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(tile.rows() * tile.pitch()), 16usize);
    let mut k = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(tile.columns * tile.pitch()),
        16usize,
    );
    let mut v = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(tile.columns * tile.pitch()),
        16usize,
    );
    let mut sums = zeros::<P>(comptime!(2 * tile.strips * features));
    let mut log_sum = Array::<f32>::new(comptime!(2 * tile.strips));
    let mut dot = Array::<f32>::new(comptime!(2 * tile.strips));
    #[unroll]
    for strip in 0..tile.strips {
        #[unroll]
        for half in 0..2usize {
            let query = min(row + row_of(strip, half, tile), s - 1);
            log_sum[comptime!(2 * strip + half)] = lse[CUBE_POS_Y as usize * s + query] * LOG2_E;
            dot[comptime!(2 * strip + half)] = delta[CUBE_POS_Y as usize * s + query];
        }
    }
    load::<F, N>(qkv, &of_q, row, s, &mut q, comptime!(tile.rows()), tile);
    load::<F, N>(d_out, &of_dy, row, s, &mut dy, comptime!(tile.rows()), tile);
    load::<F, N>(qkv, &of_k, 0usize, s, &mut k, tile.columns, tile);
    load::<F, N>(qkv, &of_v, 0usize, s, &mut v, tile.columns, tile);
    let blocks = min(s, row + comptime!(tile.rows())).div_ceil(tile.columns);
    for block in 0..blocks {
        let key = block * tile.columns;
        loaded();
        let p = scores::<F, N, P>(&definition, &q, &k, tile);
        let mut ds = scores::<F, N, P>(&definition, &dy, &v, tile);
        // No one needs the values any more: the next come while the rest is done.
        sync_cube();
        if block + 1 < blocks {
            load::<F, N>(
                qkv,
                &of_v,
                key + tile.columns,
                s,
                &mut v,
                tile.columns,
                tile,
            );
        }
        #[unroll]
        for strip in 0..tile.strips {
            #[unroll]
            for half in 0..2usize {
                let of_row = comptime!(2 * strip + half);
                let query = row + row_of(strip, half, tile);
                #[unroll]
                for j in 0..across {
                    let at = comptime!(2 * (strip * across + j) + half);
                    let column = key + column_of(j);
                    let shift = Vector::new(log_sum[of_row]);
                    let probability = powers_of_two(p[at] * Vector::new(slope) - shift);
                    let mut d = ds[at];
                    if comptime!(tile.dropout) {
                        let (query, key) = (query as u32, column as u32);
                        d *= pair_factors::<P>(dropout, &first, query, key, s as u32);
                    }
                    d = probability * (d - Vector::new(dot[of_row]));
                    #[unroll]
                    for i in 0..PAIR {
                        d.insert(i, select(column + i > query, 0.0f32, d.extract(i)));
                    }
                    ds[at] = d;
                }
            }
        }
        accumulate::<F, N, P>(&definition, &ds, &k, &mut sums, tile);
        sync_cube();
        if block + 1 < blocks {
            load::<F, N>(
                qkv,
                &of_k,
                key + tile.columns,
                s,
                &mut k,
                tile.columns,
                tile,
            );
        }
    }
    write::<F, P>(&sums, scale, d_qkv, &of_q, row, s, tile);
}

/// A cube takes a block of keys of a group: the keys' and values' gradients, of all query heads. Its tiles are
/// `[keys, queries]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn tensor_backward_keys<F: Float, N: Size, P: Size>(
    qkv: &[Vector<F, N>],
    d_out: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    d_qkv: &mut [Vector<F, P>],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let (across, features) = comptime!((tile.across(), tile.features()));
    let slope = scale * LOG2_E;
    let s = sizes.s;
    let key = CUBE_POS_X as usize * comptime!(tile.rows());
    let group = CUBE_POS_Y as usize;
    let of_k = Place::packed(sizes, group, sizes.r, tile.d);
    let of_v = Place::packed(sizes, group, sizes.r + 1, tile.d);

    let mut k =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(tile.rows() * tile.pitch()), 16usize);
    let mut v =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(tile.rows() * tile.pitch()), 16usize);
    let mut q = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(tile.columns * tile.pitch()),
        16usize,
    );
    let mut dy = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(tile.columns * tile.pitch()),
        16usize,
    );
    let mut d_key = zeros::<P>(comptime!(2 * tile.strips * features));
    let mut d_value = zeros::<P>(comptime!(2 * tile.strips * features));
    load::<F, N>(qkv, &of_k, key, s, &mut k, comptime!(tile.rows()), tile);
    load::<F, N>(qkv, &of_v, key, s, &mut v, comptime!(tile.rows()), tile);
    for head in 0..sizes.r {
        let of_q = Place::packed(sizes, group, head, tile.d);
        let of_dy = Place::output(sizes, group, head, tile.d);
        let of_head = (group * sizes.r + head) * s;
        let first = first_probability(dropout, group as u32, head as u32, sizes.r as u32, s as u32);
        for block in key / tile.columns..s.div_ceil(tile.columns) {
            let row = block * tile.columns;
            // Until all are done with those before.
            sync_cube();
            load::<F, N>(qkv, &of_q, row, s, &mut q, tile.columns, tile);
            load::<F, N>(d_out, &of_dy, row, s, &mut dy, tile.columns, tile);
            loaded();
            let mut p = scores::<F, N, P>(&definition, &k, &q, tile);
            let mut ds = scores::<F, N, P>(&definition, &v, &dy, tile);
            #[unroll]
            for j in 0..across {
                let column = row + column_of(j);
                let mut log_sum = Vector::<f32, P>::new(0.0f32);
                let mut dot = Vector::<f32, P>::new(0.0f32);
                #[unroll]
                for i in 0..PAIR {
                    let query = of_head + min(column + i, s - 1);
                    log_sum.insert(i, lse[query] * LOG2_E);
                    dot.insert(i, delta[query]);
                }
                #[unroll]
                for strip in 0..tile.strips {
                    #[unroll]
                    for half in 0..2usize {
                        let at = comptime!(2 * (strip * across + j) + half);
                        let of_key = key + row_of(strip, half, tile);
                        let mut probability = powers_of_two(p[at] * Vector::new(slope) - log_sum);
                        #[unroll]
                        for i in 0..PAIR {
                            let hidden = of_key > column + i || column + i >= s;
                            let value = select(hidden, 0.0f32, probability.extract(i));
                            probability.insert(i, value);
                        }
                        let mut d = ds[at];
                        p[at] = probability;
                        if comptime!(tile.dropout) {
                            let mut kept = Vector::<f32, P>::new(0.0f32);
                            #[unroll]
                            for i in 0..PAIR {
                                let (query, key) = ((column + i) as u32, of_key as u32);
                                let factor =
                                    probability_factor(dropout, &first, query, key, s as u32);
                                kept.insert(i, factor);
                            }
                            d *= kept;
                            p[at] = probability * kept;
                        }
                        ds[at] = probability * (d - dot);
                    }
                }
            }
            accumulate::<F, N, P>(&definition, &p, &dy, &mut d_value, tile);
            accumulate::<F, N, P>(&definition, &ds, &q, &mut d_key, tile);
        }
    }
    write::<F, P>(&d_key, scale, d_qkv, &of_k, key, s, tile);
    write::<F, P>(&d_value, 1.0f32, d_qkv, &of_v, key, s, tile);
}

pub fn forward(call: &Call<'_>, out: &CubeTensor, lse: &CubeTensor) {
    let tile = Tile::forward(call.d(), call.options.dropout.is_some());
    let blocks = call.s.div_ceil(tile.rows());
    // SAFETY: cubes write the rows of their block and head that are within the sequence, and read no others.
    unsafe {
        tensor_forward::launch_unchecked(
            &call.qkv.client,
            CubeCount::Static(blocks as u32, call.heads() as u32, 1),
            tile.cube_dim(),
            call.addresses(),
            LOAD,
            PAIR,
            call.qkv.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            heads_generator(call.options.dropout.as_ref()),
            call.sizes(),
            call.scale(),
            tile,
            elem(&call.qkv),
        );
    }
}

pub fn backward(
    call: &Call<'_>,
    lse: &CubeTensor,
    delta: &CubeTensor,
    d_out: &CubeTensor,
    d_qkv: &CubeTensor,
) {
    let dropout = call.options.dropout.is_some();
    let (queries, keys) = (
        Tile::queries(call.d(), dropout),
        Tile::keys(call.d(), dropout),
    );
    let blocks = |tile: Tile| call.s.div_ceil(tile.rows()) as u32;
    let generator = || heads_generator(call.options.dropout.as_ref());
    // SAFETY: the one kernel writes the queries' gradients, the other the keys' and values', within the sequence;
    // they read no positions but its.
    unsafe {
        tensor_backward_queries::launch_unchecked(
            &call.qkv.client,
            CubeCount::Static(blocks(queries), call.heads() as u32, 1),
            queries.cube_dim(),
            call.addresses(),
            LOAD,
            PAIR,
            call.qkv.clone().into_buffer_arg(),
            d_out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            d_qkv.clone().into_buffer_arg(),
            generator(),
            call.sizes(),
            call.scale(),
            queries,
            elem(&call.qkv),
        );
        tensor_backward_keys::launch_unchecked(
            &call.qkv.client,
            CubeCount::Static(blocks(keys), call.n as u32, 1),
            keys.cube_dim(),
            call.addresses(),
            LOAD,
            PAIR,
            call.qkv.clone().into_buffer_arg(),
            d_out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            d_qkv.clone().into_buffer_arg(),
            generator(),
            call.sizes(),
            call.scale(),
            keys,
            elem(&call.qkv),
        );
    }
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::super::catalog::Entry>) {
    use super::super::catalog::{Entry, TYPES, buffer as b, settings};
    use super::super::dropout::HeadsGeneratorCompilationArg;
    use super::SizesCompilationArg;
    for (name, dtype, _) in &TYPES[..2] {
        for d in [64, 96, 128] {
            // The types differ in one word of an instruction.
            let dropouts: &[bool] = if *name == "bf16" {
                &[false, true]
            } else {
                &[false]
            };
            for &dropout in dropouts {
                let dtype = *dtype;
                let kind = format!("d {d}{} {name}", if dropout { " dropout" } else { "" });
                let (heads, sizes) = (HeadsGeneratorCompilationArg::any, SizesCompilationArg::any);
                let tile = Tile::forward(d, dropout);
                let forward = move |t: super::super::catalog::Target| -> Box<dyn CubeKernel> {
                    Box::new(tensor_forward::TensorForward::new(
                        settings(tile.cube_dim()),
                        t.device,
                        t.properties,
                        b(),
                        b(),
                        b(),
                        heads(),
                        sizes(),
                        (),
                        LOAD,
                        PAIR,
                        tile,
                        dtype,
                    ))
                };
                let entry = Entry::new(format!("attention_forward {kind}"), 255, forward);
                all.push(entry.on_tensor_cores());
                let tile = Tile::queries(d, dropout);
                let queries = move |t: super::super::catalog::Target| -> Box<dyn CubeKernel> {
                    Box::new(tensor_backward_queries::TensorBackwardQueries::new(
                        settings(tile.cube_dim()),
                        t.device,
                        t.properties,
                        b(),
                        b(),
                        b(),
                        b(),
                        b(),
                        heads(),
                        sizes(),
                        (),
                        LOAD,
                        PAIR,
                        tile,
                        dtype,
                    ))
                };
                let entry = Entry::new(format!("attention_d_queries {kind}"), 255, queries);
                all.push(entry.on_tensor_cores());
                let tile = Tile::keys(d, dropout);
                let keys = move |t: super::super::catalog::Target| -> Box<dyn CubeKernel> {
                    Box::new(tensor_backward_keys::TensorBackwardKeys::new(
                        settings(tile.cube_dim()),
                        t.device,
                        t.properties,
                        b(),
                        b(),
                        b(),
                        b(),
                        b(),
                        heads(),
                        sizes(),
                        (),
                        LOAD,
                        PAIR,
                        tile,
                        dtype,
                    ))
                };
                let entry = Entry::new(format!("attention_d_keys {kind}"), 255, keys);
                all.push(entry.on_tensor_cores());
            }
        }
    }
}
