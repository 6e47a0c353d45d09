//! What attention on tensor cores is made of: tiles of rows in shared memory, and products of them whose sums stay in a
//! plane's registers.
//!
//! An accumulator `[16, 8]` has, in unit `l` of a plane, columns `2 (l % 4)` and the next of rows `l / 4` and
//! `l / 4 + 8`. Two of them side by side are, as they lie, the left operand `[16, 16]` of the next product: so are
//! probabilities multiplied with values, and in the backward, made `[keys, queries]`, with the queries' gradients.

use super::Place;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

/// How scores are cut into tiles: a cube of `planes` planes has `16 · strips` rows for each, and goes through the
/// columns `columns` at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    pub d: usize,
    pub planes: usize,
    pub strips: usize,
    pub columns: usize,
    pub dropout: bool,
}

/// Units of a plane: of the devices that have the instruction, all.
pub const PLANE: usize = 32;
/// Elements of a load, and of a register.
pub const LOAD: usize = 8;
pub const PAIR: usize = 2;
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;

impl Tile {
    pub fn rows(self) -> usize {
        self.planes * self.strips * 16
    }

    /// From one row in shared memory to the next, in loads: one more than a row has, so that eight rows lie in other
    /// banks.
    pub fn pitch(self) -> usize {
        self.d / LOAD + 1
    }

    /// Accumulators across a tile of scores, and across a row of features.
    pub fn across(self) -> usize {
        self.columns / 8
    }

    pub fn features(self) -> usize {
        self.d / 8
    }

    pub fn cube_dim(self) -> CubeDim {
        CubeDim::new_2d(PLANE as u32, self.planes as u32)
    }

    pub fn forward(d: usize, dropout: bool) -> Self {
        Tile {
            d,
            planes: 4,
            strips: 2,
            columns: if d > 64 { 32 } else { 64 },
            dropout,
        }
    }

    pub fn queries(d: usize, dropout: bool) -> Self {
        Tile {
            d,
            planes: 4,
            strips: 1,
            columns: 64,
            dropout,
        }
    }

    pub fn keys(d: usize, dropout: bool) -> Self {
        Tile {
            d,
            planes: 4,
            strips: 1,
            columns: if d > 64 { 32 } else { 64 },
            dropout,
        }
    }
}

/// Starts to copy rows `from..` of a head to shared memory. Beyond the sequence's end it copies the last row: what the
/// causal mask hides must be finite.
#[cube]
pub fn load<F: Float, N: Size>(
    x: &[Vector<F, N>],
    place: &Place,
    from: usize,
    s: usize,
    shared: &mut Shared<[Vector<F, N>]>,
    #[comptime] rows: usize,
    #[comptime] tile: Tile,
) {
    let loads = comptime!(tile.d / LOAD);
    let units = comptime!(tile.planes * PLANE);
    #[unroll]
    for i in 0..comptime!((rows * loads).div_ceil(units)) {
        let e = i * units + UNIT_POS as usize;
        let row = e / loads;
        let column = e % loads;
        if comptime!((rows * loads).is_multiple_of(units)) || row < rows {
            let at = (place.start + min(from + row, s - 1) * place.stride) / LOAD + column;
            let to = row * comptime!(tile.pitch()) + column;
            copy_async(
                &x[at..at + 1],
                &mut shared[to..to + 1],
                comptime!(LOAD as u32),
            );
        }
    }
    gpu_asm!("cp.async.commit_group;", options(explicit_mem));
}

/// Waits for all copies, of all units.
#[cube]
pub fn loaded() {
    gpu_asm!("cp.async.wait_group 0;", options(explicit_mem));
    sync_cube();
}

/// The left operand `[16, 16]`: rows `row..`, features `16 k..`.
#[cube]
pub fn left<F: Float, N: Size, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    shared: &Shared<[Vector<F, N>]>,
    row: usize,
    k: usize,
    #[comptime] tile: Tile,
) -> Array<Vector<F, P>> {
    let lane = UNIT_POS_X as usize;
    let at = (row + lane % 16) * comptime!(tile.pitch()) + 2 * k + lane / 16;
    definition.load_matrix::<Vector<F, N>, P>(&shared[at..at + 1], MatrixIdent::A, 4usize, false)
}

/// Two right operands `[16 features, 8]` side by side, of a matrix whose rows are the product's columns.
#[cube]
pub fn right<F: Float, N: Size, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    shared: &Shared<[Vector<F, N>]>,
    column: usize,
    k: usize,
    #[comptime] tile: Tile,
) -> Array<Vector<F, P>> {
    let lane = UNIT_POS_X as usize;
    let row = column + lane / 16 * 8 + lane % 8;
    let at = row * comptime!(tile.pitch()) + 2 * k + lane / 8 % 2;
    definition.load_matrix::<Vector<F, N>, P>(&shared[at..at + 1], MatrixIdent::B, 4usize, false)
}

/// Two right operands `[16 rows, 8 features]` side by side, of a matrix whose columns are the product's.
#[cube]
pub fn right_turned<F: Float, N: Size, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    shared: &Shared<[Vector<F, N>]>,
    row: usize,
    features: usize,
    #[comptime] tile: Tile,
) -> Array<Vector<F, P>> {
    let lane = UNIT_POS_X as usize;
    let at = (row + lane % 16) * comptime!(tile.pitch()) + features + lane / 16;
    definition.load_matrix::<Vector<F, N>, P>(&shared[at..at + 1], MatrixIdent::B, 4usize, true)
}

/// Adds a product to the accumulator that starts at `at`; `right` has two operands.
#[cube]
pub fn add_product<F: Float, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    left: &Array<Vector<F, P>>,
    right: &Array<Vector<F, P>>,
    #[comptime] which: usize,
    sums: &mut Array<Vector<f32, P>>,
    #[comptime] at: usize,
) {
    let mut operand = Array::<Vector<F, P>>::new(2usize);
    operand[0] = right[comptime!(2 * which)];
    operand[1] = right[comptime!(2 * which + 1)];
    let mut sum = Array::<Vector<f32, P>>::new(2usize);
    sum[0] = sums[at];
    sum[1] = sums[comptime!(at + 1)];
    let sum = definition.execute::<P, P, P>(left, &operand, &sum);
    sums[at] = sum[0];
    sums[comptime!(at + 1)] = sum[1];
}

#[cube]
pub fn zeros<P: Size>(#[comptime] len: usize) -> Array<Vector<f32, P>> {
    let mut values = Array::<Vector<f32, P>>::new(len);
    #[unroll]
    for i in 0..len {
        values[i] = Vector::new(0.0f32);
    }
    values
}

/// The products of the plane's rows of `a` with `columns` rows of `b`: accumulators of a strip one after another.
#[cube]
pub fn scores<F: Float, N: Size, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    a: &Shared<[Vector<F, N>]>,
    b: &Shared<[Vector<F, N>]>,
    #[comptime] tile: Tile,
) -> Array<Vector<f32, P>> {
    let across = comptime!(tile.across());
    let mut sums = zeros::<P>(comptime!(2 * tile.strips * across));
    let first = UNIT_POS_Y as usize * comptime!(16 * tile.strips);
    for k in 0..comptime!(tile.d / 16) {
        #[unroll]
        for strip in 0..tile.strips {
            let rows = left::<F, N, P>(definition, a, first + strip * 16, k, tile);
            #[unroll]
            for j in 0..comptime!(across / 2) {
                let columns = right::<F, N, P>(definition, b, j * 16, k, tile);
                #[unroll]
                for which in 0..2usize {
                    let at = comptime!(2 * (strip * across + 2 * j + which));
                    add_product::<F, P>(definition, &rows, &columns, which, &mut sums, at);
                }
            }
        }
    }
    sums
}

/// Adds the product of a tile, as accumulators `[rows, columns]`, with `columns` rows of `x` to `[rows, d]`.
#[cube]
pub fn accumulate<F: Float, N: Size, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    p: &Array<Vector<f32, P>>,
    x: &Shared<[Vector<F, N>]>,
    sums: &mut Array<Vector<f32, P>>,
    #[comptime] tile: Tile,
) {
    let (across, features) = comptime!((tile.across(), tile.features()));
    #[unroll]
    for k in 0..comptime!(across / 2) {
        #[unroll]
        for j in 0..comptime!(features / 2) {
            let columns = right_turned::<F, N, P>(definition, x, k * 16, j * 2, tile);
            #[unroll]
            for strip in 0..tile.strips {
                let mut rows = Array::<Vector<F, P>>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    rows[i] = Vector::cast_from(p[comptime!(2 * (strip * across + 2 * k) + i)]);
                }
                #[unroll]
                for which in 0..2usize {
                    let at = comptime!(2 * (strip * features + 2 * j + which));
                    add_product::<F, P>(definition, &rows, &columns, which, sums, at);
                }
            }
        }
    }
}

/// The plane's row of an accumulator's half.
#[cube]
pub fn row_of(#[comptime] strip: usize, #[comptime] half: usize, #[comptime] tile: Tile) -> usize {
    let first =
        UNIT_POS_Y as usize * comptime!(16 * tile.strips) + comptime!(16 * strip + 8 * half);
    first + UNIT_POS_X as usize / 4
}

/// The unit's first column of an accumulator.
#[cube]
pub fn column_of(#[comptime] across: usize) -> usize {
    comptime!(8 * across) + UNIT_POS_X as usize % 4 * 2
}

/// `2^x`, by the instruction: the exponentials of natural logarithms take `x · log₂ e`.
#[cube]
pub fn power_of_two(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {d}, {a};", a = in(_) x, d = out(_) out, options(nomem));
    out
}

#[cube]
pub fn powers_of_two<P: Size>(x: Vector<f32, P>) -> Vector<f32, P> {
    let mut powers = Vector::<f32, P>::new(power_of_two(x.extract(0usize)));
    powers.insert(1usize, power_of_two(x.extract(1usize)));
    powers
}

/// Over the four units that share a row.
#[cube]
pub fn quad_max(value: f32) -> f32 {
    let value = max(value, plane_shuffle_xor(value, 1u32));
    max(value, plane_shuffle_xor(value, 2u32))
}

#[cube]
pub fn quad_sum(value: f32) -> f32 {
    let value = value + plane_shuffle_xor(value, 1u32);
    value + plane_shuffle_xor(value, 2u32)
}

/// Writes the plane's rows of `[rows, d]`, times `factor`.
#[cube]
pub fn write<F: Float, P: Size>(
    sums: &Array<Vector<f32, P>>,
    factor: f32,
    x: &mut [Vector<F, P>],
    place: &Place,
    from: usize,
    s: usize,
    #[comptime] tile: Tile,
) {
    let features = comptime!(tile.features());
    #[unroll]
    for strip in 0..tile.strips {
        #[unroll]
        for half in 0..2usize {
            let row = from + row_of(strip, half, tile);
            if row < s {
                #[unroll]
                for j in 0..features {
                    let at = place.start + row * place.stride + column_of(j);
                    let value = sums[comptime!(2 * (strip * features + j) + half)];
                    x[at / PAIR] = Vector::cast_from(value * Vector::new(factor));
                }
            }
        }
    }
}
