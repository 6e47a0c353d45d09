//! Attention for any device, any width of heads and f32: tiles in shared memory, each unit with a part of them.

use super::super::dropout::{
    HeadsGenerator, first_probability, heads_generator, probability_factor,
};
use super::super::{Units, elem};
use super::{Call, Place, Sizes};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// How scores are cut into tiles, and a tile is shared out among `across · down` units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    d: usize,
    rows: usize,
    keys: usize,
    across: usize,
    down: usize,
    /// Features, of rows and keys, that lie in shared memory at a time.
    chunk: usize,
    dropout: bool,
}

/// Rows of a matrix `[rows, d]` in shared memory at a time.
const STAGED: usize = 8;

impl Tile {
    fn of(call: &Call<'_>) -> Self {
        let units = Units::of(&call.qkv.client).most;
        Tile::of_units(units, call.d(), call.options.dropout.is_some())
    }

    fn of_units(most: usize, d: usize, dropout: bool) -> Self {
        match most {
            1..256 => Tile {
                d,
                rows: 8,
                keys: 8,
                across: 1,
                down: 1,
                chunk: 8,
                dropout,
            },
            _ => Tile {
                d,
                // Wide heads keep more sums of each row.
                rows: if d > 64 { 32 } else { 64 },
                keys: 32,
                across: 16,
                down: 16,
                chunk: 32,
                dropout,
            },
        }
    }

    fn units(self) -> usize {
        self.across * self.down
    }

    fn rows_of_unit(self) -> usize {
        self.rows / self.down
    }

    fn keys_of_unit(self) -> usize {
        self.keys / self.across
    }

    fn features_of_unit(self) -> usize {
        self.d.div_ceil(self.across)
    }

    /// From one row of a chunk in shared memory to the next, and of the tile: odd, so that rows lie in other banks.
    fn pitch(self) -> usize {
        self.chunk + 1
    }

    fn tile_pitch(self) -> usize {
        self.keys + 1
    }

    fn stage(self) -> usize {
        (self.keys * self.pitch()).max(STAGED * self.d)
    }

    fn cube_dim(self) -> CubeDim {
        CubeDim::new_1d(self.units() as u32)
    }
}

/// Features `first..` of `count` rows from `from` on, zero beyond `end` and `d`.
#[cube]
fn load_chunk<F: Float>(
    x: &[F],
    place: &Place,
    from: usize,
    end: usize,
    first: usize,
    shared: &mut Shared<[f32]>,
    #[comptime] count: usize,
    #[comptime] tile: Tile,
) {
    let mut e = UNIT_POS as usize;
    while e < comptime!(count * tile.chunk) {
        let row = e / tile.chunk;
        let column = e % tile.chunk;
        let feature = first + column;
        let mut value = 0.0f32;
        if from + row < end && feature < tile.d {
            value = f32::cast_from(x[place.start + (from + row) * place.stride + feature]);
        }
        shared[row * comptime!(tile.pitch()) + column] = value;
        e += comptime!(tile.units());
    }
}

/// A unit's part of the products of `rows` rows of `a` with `keys` rows of `b`.
#[cube]
fn scores<F: Float>(
    a: &[F],
    a_place: &Place,
    row: usize,
    b: &[F],
    b_place: &Place,
    key: usize,
    s: usize,
    shared: &mut Shared<[f32]>,
    stage: &mut Shared<[f32]>,
    #[comptime] tile: Tile,
) -> Array<f32> {
    let (rows, keys) = comptime!((tile.rows_of_unit(), tile.keys_of_unit()));
    let across = UNIT_POS as usize % tile.across;
    let down = UNIT_POS as usize / tile.across;
    let mut sums = zeros(comptime!(rows * keys));
    let chunks = comptime!(tile.d.div_ceil(tile.chunk));
    for chunk in 0..chunks {
        let first = chunk * tile.chunk;
        load_chunk::<F>(a, a_place, row, s, first, shared, tile.rows, tile);
        load_chunk::<F>(b, b_place, key, s, first, stage, tile.keys, tile);
        sync_cube();
        for f in 0..tile.chunk {
            let mut of_keys = Array::<f32>::new(keys);
            #[unroll]
            for j in 0..keys {
                of_keys[j] = stage[(j * tile.across + across) * comptime!(tile.pitch()) + f];
            }
            #[unroll]
            for i in 0..rows {
                let of_row = shared[(i * tile.down + down) * comptime!(tile.pitch()) + f];
                #[unroll]
                for j in 0..keys {
                    let at = comptime!(i * keys + j);
                    sums[at] += of_row * of_keys[j];
                }
            }
        }
        sync_cube();
    }
    sums
}

/// Adds a tile's product with `inner` rows of `x` to a unit's part of `[outer, d]`; the tile is `[rows, keys]`, and
/// `turned` takes its transpose.
#[cube]
fn accumulate<F: Float>(
    sums: &mut Array<f32>,
    p: &Shared<[f32]>,
    x: &[F],
    place: &Place,
    from: usize,
    s: usize,
    stage: &mut Shared<[f32]>,
    #[comptime] turned: bool,
    #[comptime] tile: Tile,
) {
    let (outer, inner) = comptime!(match turned {
        true => (tile.keys / tile.down, tile.rows),
        false => (tile.rows_of_unit(), tile.keys),
    });
    let features = comptime!(tile.features_of_unit());
    let across = UNIT_POS as usize % tile.across;
    let down = UNIT_POS as usize / tile.across;
    for block in 0..comptime!(inner / STAGED) {
        let first = block * STAGED;
        let mut e = UNIT_POS as usize;
        while e < comptime!(STAGED * tile.d) {
            let row = from + first + e / tile.d;
            let mut value = 0.0f32;
            if row < s {
                value = f32::cast_from(x[place.start + row * place.stride + e % tile.d]);
            }
            stage[e] = value;
            e += comptime!(tile.units());
        }
        sync_cube();
        for k in 0..STAGED {
            let mut of_x = Array::<f32>::new(features);
            #[unroll]
            for j in 0..features {
                let feature = j * tile.across + across;
                of_x[j] = 0.0f32;
                if feature < tile.d {
                    of_x[j] = stage[k * tile.d + feature];
                }
            }
            #[unroll]
            for i in 0..outer {
                let row = i * tile.down + down;
                let column = first + k;
                let mut at = row * comptime!(tile.tile_pitch()) + column;
                if comptime!(turned) {
                    at = column * comptime!(tile.tile_pitch()) + row;
                }
                let of_p = p[at];
                #[unroll]
                for j in 0..features {
                    let at = comptime!(i * features + j);
                    sums[at] += of_p * of_x[j];
                }
            }
        }
        sync_cube();
    }
}

#[cube]
fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut values = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        values[i] = 0.0f32;
    }
    values
}

/// Writes a unit's part of `[outer, d]`, times what its rows say.
#[cube]
fn write<F: Float>(
    sums: &Array<f32>,
    factor: f32,
    x: &mut [F],
    place: &Place,
    from: usize,
    s: usize,
    #[comptime] outer: usize,
    #[comptime] tile: Tile,
) {
    let features = comptime!(tile.features_of_unit());
    let across = UNIT_POS as usize % tile.across;
    let down = UNIT_POS as usize / tile.across;
    #[unroll]
    for i in 0..outer {
        let row = from + i * tile.down + down;
        #[unroll]
        for j in 0..features {
            let feature = j * tile.across + across;
            if row < s && feature < tile.d {
                let value = sums[comptime!(i * features + j)] * factor;
                x[place.start + row * place.stride + feature] = F::cast_from(value);
            }
        }
    }
}

/// A cube takes a block of rows of a query head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn simple_forward<F: Float>(
    qkv: &[F],
    out: &mut [F],
    lse: &mut [f32],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let across = unit % tile.across;
    let down = unit / tile.across;
    let s = sizes.s;
    // The longest first.
    let row = (s.div_ceil(tile.rows) - 1 - CUBE_POS_X as usize) * tile.rows;
    let group = CUBE_POS_Y as usize / sizes.r;
    let head = CUBE_POS_Y as usize % sizes.r;
    let q = Place::packed(sizes, group, head, tile.d);
    let k = Place::packed(sizes, group, sizes.r, tile.d);
    let v = Place::packed(sizes, group, sizes.r + 1, tile.d);
    let first = first_probability(dropout, group as u32, head as u32, sizes.r as u32, s as u32);

    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.pitch()));
    let mut stage = Shared::<[f32]>::new_slice(comptime!(tile.stage()));
    let mut p = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.tile_pitch()));
    let mut top = Shared::<[f32]>::new_slice(tile.rows);
    let mut total = Shared::<[f32]>::new_slice(tile.rows);
    let mut less = Shared::<[f32]>::new_slice(tile.rows);
    let mut at = unit;
    while at < tile.rows {
        top[at] = f32::min_value();
        total[at] = 0.0f32;
        at += comptime!(tile.units());
    }
    let (rows, keys) = comptime!((tile.rows_of_unit(), tile.keys_of_unit()));
    let features = comptime!(tile.features_of_unit());
    let mut sums = zeros(comptime!(rows * features));
    let blocks = min(s, row + tile.rows).div_ceil(tile.keys);
    for block in 0..blocks {
        let key = block * tile.keys;
        let of_tile = scores::<F>(qkv, &q, row, qkv, &k, key, s, &mut shared, &mut stage, tile);
        #[unroll]
        for i in 0..rows {
            let query = i * tile.down + down;
            #[unroll]
            for j in 0..keys {
                let column = j * tile.across + across;
                let mut score = of_tile[comptime!(i * keys + j)] * scale;
                if key + column > row + query {
                    score = f32::min_value();
                }
                p[query * comptime!(tile.tile_pitch()) + column] = score;
            }
        }
        sync_cube();
        let mut at = unit;
        while at < tile.rows {
            let start = at * comptime!(tile.tile_pitch());
            let old = top[at];
            let mut highest = old;
            for column in 0..tile.keys {
                highest = max(highest, p[start + column]);
            }
            let mut sum = 0.0f32;
            for column in 0..tile.keys {
                sum += (p[start + column] - highest).exp();
            }
            less[at] = (old - highest).exp();
            total[at] = total[at] * less[at] + sum;
            top[at] = highest;
            at += comptime!(tile.units());
        }
        sync_cube();
        #[unroll]
        for i in 0..rows {
            let query = i * tile.down + down;
            #[unroll]
            for j in 0..keys {
                let column = j * tile.across + across;
                let place = query * comptime!(tile.tile_pitch()) + column;
                let mut value = (p[place] - top[query]).exp();
                if comptime!(tile.dropout) {
                    let (query, key) = ((row + query) as u32, (key + column) as u32);
                    value *= probability_factor(dropout, &first, query, key, s as u32);
                }
                p[place] = value;
            }
            #[unroll]
            for j in 0..features {
                let at = comptime!(i * features + j);
                sums[at] *= less[query];
            }
        }
        sync_cube();
        accumulate::<F>(&mut sums, &p, qkv, &v, key, s, &mut stage, false, tile);
    }
    #[unroll]
    for i in 0..rows {
        let each = 1.0f32 / total[i * tile.down + down];
        #[unroll]
        for j in 0..features {
            let at = comptime!(i * features + j);
            sums[at] *= each;
        }
    }
    let place = Place::output(sizes, group, head, tile.d);
    write::<F>(&sums, 1.0f32, out, &place, row, s, rows, tile);
    let mut at = unit;
    while at < tile.rows {
        if row + at < s {
            lse[CUBE_POS_Y as usize * s + row + at] = top[at] + total[at].ln();
        }
        at += comptime!(tile.units());
    }
}

/// Makes a tile's probabilities as the forward dropped them, where they are `wanted`, and the scores' gradients.
#[cube]
fn gradients<F: Float>(
    qkv: &[F],
    d_out: &[F],
    lse: &[f32],
    delta: &[f32],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    group: usize,
    head: usize,
    row: usize,
    key: usize,
    shared: &mut Shared<[f32]>,
    stage: &mut Shared<[f32]>,
    p: &mut Shared<[f32]>,
    ds: &mut Shared<[f32]>,
    #[comptime] wanted: bool,
    #[comptime] tile: Tile,
) {
    let s = sizes.s;
    let (rows, keys) = comptime!((tile.rows_of_unit(), tile.keys_of_unit()));
    let across = UNIT_POS as usize % tile.across;
    let down = UNIT_POS as usize / tile.across;
    let q = Place::packed(sizes, group, head, tile.d);
    let k = Place::packed(sizes, group, sizes.r, tile.d);
    let v = Place::packed(sizes, group, sizes.r + 1, tile.d);
    let dy = Place::output(sizes, group, head, tile.d);
    let first = first_probability(dropout, group as u32, head as u32, sizes.r as u32, s as u32);
    let of_tile = scores::<F>(qkv, &q, row, qkv, &k, key, s, shared, stage, tile);
    let dp = scores::<F>(d_out, &dy, row, qkv, &v, key, s, shared, stage, tile);
    #[unroll]
    for i in 0..rows {
        let query = i * tile.down + down;
        let of_row = (group * sizes.r + head) * s + row + query;
        let mut log_sum = 0.0f32;
        let mut dot = 0.0f32;
        if row + query < s {
            log_sum = lse[of_row];
            dot = delta[of_row];
        }
        #[unroll]
        for j in 0..keys {
            let column = j * tile.across + across;
            let at = query * comptime!(tile.tile_pitch()) + column;
            let of_unit = comptime!(i * keys + j);
            let mut probability = 0.0f32;
            if key + column <= row + query && row + query < s {
                probability = (of_tile[of_unit] * scale - log_sum).exp();
            }
            let mut kept = 1.0f32;
            if comptime!(tile.dropout) {
                let (query, key) = ((row + query) as u32, (key + column) as u32);
                kept = probability_factor(dropout, &first, query, key, s as u32);
            }
            if comptime!(wanted) {
                p[at] = probability * kept;
            }
            ds[at] = probability * (dp[of_unit] * kept - dot);
        }
    }
    sync_cube();
}

/// A cube takes a block of rows of a query head: the queries' gradients.
#[cube(launch_unchecked, address_type = "dynamic")]
fn simple_backward_queries<F: Float>(
    qkv: &[F],
    d_out: &[F],
    lse: &[f32],
    delta: &[f32],
    d_qkv: &mut [F],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let s = sizes.s;
    let row = (s.div_ceil(tile.rows) - 1 - CUBE_POS_X as usize) * tile.rows;
    let group = CUBE_POS_Y as usize / sizes.r;
    let head = CUBE_POS_Y as usize % sizes.r;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.pitch()));
    let mut stage = Shared::<[f32]>::new_slice(comptime!(tile.stage()));
    let mut ds = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.tile_pitch()));
    let mut unused = Shared::<[f32]>::new_slice(1usize);
    let outer = comptime!(tile.rows_of_unit());
    let mut dq = zeros(comptime!(outer * tile.features_of_unit()));
    let k = Place::packed(sizes, group, sizes.r, tile.d);
    let blocks = min(s, row + tile.rows).div_ceil(tile.keys);
    for block in 0..blocks {
        let key = block * tile.keys;
        gradients::<F>(
            qkv,
            d_out,
            lse,
            delta,
            dropout,
            sizes,
            scale,
            group,
            head,
            row,
            key,
            &mut shared,
            &mut stage,
            &mut unused,
            &mut ds,
            false,
            tile,
        );
        accumulate::<F>(&mut dq, &ds, qkv, &k, key, s, &mut stage, false, tile);
    }
    let place = Place::packed(sizes, group, head, tile.d);
    write::<F>(&dq, scale, d_qkv, &place, row, s, outer, tile);
}

/// A cube takes a block of keys of a group: the keys' and values' gradients, of all query heads.
#[cube(launch_unchecked, address_type = "dynamic")]
fn simple_backward_keys<F: Float>(
    qkv: &[F],
    d_out: &[F],
    lse: &[f32],
    delta: &[f32],
    d_qkv: &mut [F],
    dropout: &HeadsGenerator,
    sizes: &Sizes,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let s = sizes.s;
    let key = CUBE_POS_X as usize * tile.keys;
    let group = CUBE_POS_Y as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.pitch()));
    let mut stage = Shared::<[f32]>::new_slice(comptime!(tile.stage()));
    let mut p = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.tile_pitch()));
    let mut ds = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.tile_pitch()));
    let outer = comptime!(tile.keys / tile.down);
    let mut dk = zeros(comptime!(outer * tile.features_of_unit()));
    let mut dv = zeros(comptime!(outer * tile.features_of_unit()));
    for head in 0..sizes.r {
        let q = Place::packed(sizes, group, head, tile.d);
        let dy = Place::output(sizes, group, head, tile.d);
        for block in key / tile.rows..s.div_ceil(tile.rows) {
            let row = block * tile.rows;
            gradients::<F>(
                qkv,
                d_out,
                lse,
                delta,
                dropout,
                sizes,
                scale,
                group,
                head,
                row,
                key,
                &mut shared,
                &mut stage,
                &mut p,
                &mut ds,
                true,
                tile,
            );
            accumulate::<F>(&mut dv, &p, d_out, &dy, row, s, &mut stage, true, tile);
            accumulate::<F>(&mut dk, &ds, qkv, &q, row, s, &mut stage, true, tile);
        }
    }
    let to_k = Place::packed(sizes, group, sizes.r, tile.d);
    let to_v = Place::packed(sizes, group, sizes.r + 1, tile.d);
    write::<F>(&dk, scale, d_qkv, &to_k, key, s, outer, tile);
    write::<F>(&dv, 1.0f32, d_qkv, &to_v, key, s, outer, tile);
}

pub fn forward(call: &Call<'_>, out: &CubeTensor, lse: &CubeTensor) {
    let (tile, client) = (Tile::of(call), &call.qkv.client);
    let blocks = call.s.div_ceil(tile.rows);
    // SAFETY: cubes write the rows of their block and head that are within the sequence, and read no others.
    unsafe {
        simple_forward::launch_unchecked(
            client,
            CubeCount::Static(blocks as u32, call.heads() as u32, 1),
            tile.cube_dim(),
            call.addresses(),
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
    let (tile, client) = (Tile::of(call), &call.qkv.client);
    let row_blocks = call.s.div_ceil(tile.rows);
    let key_blocks = call.s.div_ceil(tile.keys);
    let generator = || heads_generator(call.options.dropout.as_ref());
    // SAFETY: the one kernel writes the queries' gradients, the other the keys' and values', within the sequence;
    // they read no positions but its.
    unsafe {
        simple_backward_queries::launch_unchecked(
            client,
            CubeCount::Static(row_blocks as u32, call.heads() as u32, 1),
            tile.cube_dim(),
            call.addresses(),
            call.qkv.clone().into_buffer_arg(),
            d_out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            d_qkv.clone().into_buffer_arg(),
            generator(),
            call.sizes(),
            call.scale(),
            tile,
            elem(&call.qkv),
        );
        simple_backward_keys::launch_unchecked(
            client,
            CubeCount::Static(key_blocks as u32, call.n as u32, 1),
            tile.cube_dim(),
            call.addresses(),
            call.qkv.clone().into_buffer_arg(),
            d_out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            d_qkv.clone().into_buffer_arg(),
            generator(),
            call.sizes(),
            call.scale(),
            tile,
            elem(&call.qkv),
        );
    }
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::super::catalog::Entry>) {
    use super::super::catalog::{Entry, TYPES, buffer as b, settings};
    use super::super::dropout::HeadsGeneratorCompilationArg;
    use super::SizesCompilationArg;
    let (name, dtype, _) = TYPES[2];
    for d in [64, 128] {
        let tile = Tile::of_units(256, d, false);
        let kind = format!("d {d} {name}");
        let dim = move || settings(tile.cube_dim());
        let (heads, sizes) = (HeadsGeneratorCompilationArg::any, SizesCompilationArg::any);
        all.push(Entry::new(
            format!("simple_attention_forward {kind}"),
            128,
            move |t| {
                Box::new(simple_forward::SimpleForward::new(
                    dim(),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    b(),
                    heads(),
                    sizes(),
                    (),
                    tile,
                    dtype,
                ))
            },
        ));
        all.push(Entry::new(
            format!("simple_attention_d_queries {kind}"),
            128,
            move |t| {
                Box::new(simple_backward_queries::SimpleBackwardQueries::new(
                    dim(),
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
                    tile,
                    dtype,
                ))
            },
        ));
        all.push(Entry::new(
            format!("simple_attention_d_keys {kind}"),
            128,
            move |t| {
                Box::new(simple_backward_keys::SimpleBackwardKeys::new(
                    dim(),
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
                    tile,
                    dtype,
                ))
            },
        ));
    }
}
