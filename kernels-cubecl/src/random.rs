//! Counter-based random numbers: each is a function of a seed, a stream and an index, and of
//! nothing else.
//!
//! A parameter's element has the same initial value on whichever rank, in whichever shard and in
//! whatever order it is drawn: the stream is the parameter's name, the index the element's place in
//! the whole tensor. Megatron-LM instead seeds each rank's generator apart, so that its weights
//! depend on the layout (`megatron/core/tensor_parallel/random.py`).
//!
//! The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
//! 3"). Normals are made from it with IEEE additions, multiplications, divisions and roots alone,
//! which round alike everywhere: a system's `ln` and `sin` need not.

use std::f64::consts::{FRAC_PI_2, LN_2, SQRT_2};

/// Words, or normals, that one block of the generator gives.
const BLOCK: usize = 4;

/// One block of Philox4x32 with ten rounds.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let even = 0xD251_1F53_u64 * u64::from(c0);
        let odd = 0xCD9E_8D57_u64 * u64::from(c2);
        let high = |product: u64| (product >> 32) as u32;
        (c0, c2) = (high(odd) ^ c1 ^ k0, high(even) ^ c3 ^ k1);
        (c1, c3) = (odd as u32, even as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// The stream of a parameter: its name's 64-bit FNV-1a hash.
pub const fn stream_of(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01B3);
        i += 1;
    }
    hash
}

/// The stream of a few numbers: their bytes' 64-bit FNV-1a hash.
pub fn stream_of_numbers<const N: usize>(numbers: [u64; N]) -> u64 {
    let bytes = numbers.iter().flat_map(|n| n.to_le_bytes());
    bytes.fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Calls `f(i, word)` with the random words from `start_index` on, for each `i` below `count`.
pub fn for_each_word(
    seed: u64,
    stream: u64,
    start_index: u64,
    count: usize,
    mut f: impl FnMut(usize, u32),
) {
    let mut i = 0;
    while i < count {
        let index = start_index + i as u64;
        let block = philox_block(seed, stream, index / BLOCK as u64);
        let skipped = (index % BLOCK as u64) as usize;
        for word in &block[skipped..BLOCK.min(skipped + count - i)] {
            f(i, *word);
            i += 1;
        }
    }
}

/// Uniform number `index` of a stream, in (0, 1), of 53 random bits.
pub fn uniform_at(seed: u64, stream: u64, index: u64) -> f64 {
    let [low, high, ..] = philox_block(seed, stream, index);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

/// Standard normal number `index` of a stream. None is beyond 6.7 standard deviations.
pub fn normal_at(seed: u64, stream: u64, index: u64) -> f32 {
    let block = normal_block(seed, stream, index / BLOCK as u64);
    block[(index % BLOCK as u64) as usize]
}

/// Fills `out` with the normals from `start_index` on, each multiplied by `std`:
/// `out[i] = std * normal_at(seed, stream, start_index + i)`, bit for bit. A large tensor may be
/// cut at any index and filled on several threads.
pub fn fill_normal(seed: u64, stream: u64, start_index: u64, std: f32, out: &mut [f32]) {
    let first = start_index / BLOCK as u64;
    let skipped = (start_index % BLOCK as u64) as usize;
    // Up to the next block's start, then block by block.
    let (head, body) = out.split_at_mut(out.len().min((BLOCK - skipped) % BLOCK));
    if !head.is_empty() {
        let normals = normal_block(seed, stream, first);
        write_scaled(head, &normals[skipped..], std);
    }
    let aligned = first + u64::from(skipped > 0);
    for (out, block) in body.chunks_mut(BLOCK).zip(aligned..) {
        write_scaled(out, &normal_block(seed, stream, block), std);
    }
}

fn write_scaled(out: &mut [f32], normals: &[f32], std: f32) {
    for (out, normal) in out.iter_mut().zip(normals) {
        *out = std * normal;
    }
}

/// Block `block` of a stream: four words of random bits.
fn philox_block(seed: u64, stream: u64, block: u64) -> [u32; 4] {
    let ([b0, b1], [s0, s1]) = (halves(block), halves(stream));
    philox4x32_10([b0, b1, s0, s1], halves(seed))
}

fn normal_block(seed: u64, stream: u64, block: u64) -> [f32; BLOCK] {
    let [w0, w1, w2, w3] = philox_block(seed, stream, block);
    let ([n0, n1], [n2, n3]) = (box_muller(w0, w1), box_muller(w2, w3));
    [n0, n1, n2, n3]
}

pub(crate) fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// Two independent normals from two uniform words (Box and Muller 1958), in f64.
fn box_muller(radius: u32, angle: u32) -> [f32; 2] {
    // The middle of one of 2^32 equal cells of (0, 1): never 0, never 1.
    let uniform = (f64::from(radius) + 0.5) * 2f64.powi(-32);
    let radius = (-2.0 * ln(uniform)).sqrt();
    let (sin, cos) = sin_cos_turn(angle);
    [(radius * cos) as f32, (radius * sin) as f32]
}

/// ln(x) of a normal number x > 0, to 1e-13.
fn ln(x: f64) -> f64 {
    // x = m * 2^e, m in [1/sqrt(2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)), by its series.
    let bits = x.to_bits();
    let m = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF) | 0x3FF0_0000_0000_0000);
    let e = ((bits >> 52) as i32 - 1023) as f64;
    let large = m >= SQRT_2;
    let m = if large { 0.5 * m } else { m };
    let e = if large { e + 1.0 } else { e };
    let t = (m - 1.0) / (m + 1.0);
    const SERIES: [f64; 8] = [
        1.0 / 15.0,
        1.0 / 13.0,
        1.0 / 11.0,
        1.0 / 9.0,
        1.0 / 7.0,
        1.0 / 5.0,
        1.0 / 3.0,
        1.0,
    ];
    let t2 = t * t;
    let series = SERIES.iter().fold(0.0, |sum, factor| sum * t2 + factor);
    e * LN_2 + 2.0 * t * series
}

/// Sine and cosine of `angle` * 2^-32 turns, to 1e-15.
fn sin_cos_turn(angle: u32) -> (f64, f64) {
    // The nearest quarter turn, exactly, and the rest in [-pi/4, pi/4), by Taylor's series.
    let shifted = angle.wrapping_add(1 << 29);
    let quarter = shifted >> 30;
    let rest = (shifted & ((1 << 30) - 1)) as i32 - (1 << 29);
    let x = f64::from(rest) * (FRAC_PI_2 * 2f64.powi(-30));
    let x2 = x * x;
    const COS: [f64; 8] = [
        1.0 / 20_922_789_888_000.0,
        -1.0 / 87_178_291_200.0,
        1.0 / 479_001_600.0,
        -1.0 / 3_628_800.0,
        1.0 / 40_320.0,
        -1.0 / 720.0,
        1.0 / 24.0,
        -0.5,
    ];
    const SIN: [f64; 7] = [
        -1.0 / 1_307_674_368_000.0,
        1.0 / 6_227_020_800.0,
        -1.0 / 39_916_800.0,
        1.0 / 362_880.0,
        -1.0 / 5_040.0,
        1.0 / 120.0,
        -1.0 / 6.0,
    ];
    let cos = 1.0 + x2 * COS.iter().fold(0.0, |sum, factor| sum * x2 + factor);
    let sin = x + x * x2 * SIN.iter().fold(0.0, |sum, factor| sum * x2 + factor);
    match quarter {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The vectors published with the paper's own library, Random123 (`tests/kat_vectors`).
    #[test]
    fn philox_known_answers() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0]
            ),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn fnv_known_answers() {
        assert_eq!(stream_of(""), 0xcbf29ce484222325);
        assert_eq!(stream_of("a"), 0xaf63dc4c8601ec8c);
        assert_eq!(stream_of("foobar"), 0x85944171f73967e8);
    }

    #[test]
    fn the_series_converge() {
        let edges = [0, 1, 1 << 29, (1 << 29) - 1, 1 << 30, 1 << 31, u32::MAX];
        let words = (0..100_000u32).map(|i| i.wrapping_mul(0x9E37_79B9));
        for word in words.chain(edges) {
            let uniform = (f64::from(word) + 0.5) * 2f64.powi(-32);
            let exact = uniform.ln();
            assert!(
                (ln(uniform) - exact).abs() <= 1e-13 * exact.abs().max(1e-2),
                "{word}"
            );
            let (exact_sin, exact_cos) = (f64::from(word) * (FRAC_PI_2 * 2f64.powi(-30))).sin_cos();
            let (sin, cos) = sin_cos_turn(word);
            assert!((sin - exact_sin).abs() < 2e-15, "{word}");
            assert!((cos - exact_cos).abs() < 2e-15, "{word}");
        }
    }

    /// Changing these bits changes every model's initial weights.
    #[test]
    fn the_numbers_stay_what_they_are() {
        let bits: Vec<u32> = (0..4).map(|i| normal_at(1234, 5, i).to_bits()).collect();
        let frozen = [3_175_155_775, 3_194_459_160, 3_179_674_064, 3_213_694_395];
        assert_eq!(bits, frozen);
    }

    #[test]
    fn moments_of_a_standard_normal() {
        let n = 100_000;
        let mut normals = vec![0.0; n];
        fill_normal(1234, stream_of("embedding.weight"), 0, 1.0, &mut normals);
        let moment = |power| {
            let sum: f64 = normals.iter().map(|x| f64::from(*x).powi(power)).sum();
            sum / n as f64
        };
        // Five standard errors of each.
        let error = 5.0 / (n as f64).sqrt();
        assert!(moment(1).abs() < error);
        assert!((moment(2) - 1.0).abs() < error * 2f64.sqrt());
        assert!(moment(3).abs() < error * 15f64.sqrt());
        assert!((moment(4) - 3.0).abs() < error * 96f64.sqrt());
        let beyond_two = normals.iter().filter(|x| x.abs() > 2.0).count() as f64 / n as f64;
        assert!((beyond_two - 0.0455).abs() < error * 0.21);
        let neighbours: f64 = normals.windows(2).map(|w| f64::from(w[0] * w[1])).sum();
        assert!((neighbours / n as f64).abs() < error);
    }

    #[test]
    fn seeds_and_streams_are_independent() {
        let n = 100_000;
        let draw = |seed, stream| {
            let mut normals = vec![0.0; n];
            fill_normal(seed, stream, 0, 1.0, &mut normals);
            normals
        };
        let one = draw(1, stream_of("a"));
        let high_bits = draw(1 | 1 << 40, stream_of("a"));
        for other in [draw(2, stream_of("a")), draw(1, stream_of("b")), high_bits] {
            let products = one.iter().zip(&other).map(|(x, y)| f64::from(x * y));
            let correlation = products.sum::<f64>() / n as f64;
            assert!(correlation.abs() < 5.0 / (n as f64).sqrt());
        }
    }

    proptest! {
        #[test]
        fn a_value_depends_on_its_index_alone(
            (seed, stream) in any::<(u64, u64)>(),
            start in prop_oneof![0..64u64, Just((1u64 << 34) - 7)],
            cuts in proptest::collection::vec(0..40usize, 0..6),
        ) {
            let mut whole = vec![0.0; 40];
            fill_normal(seed, stream, start, 0.02, &mut whole);
            let mut cuts = cuts;
            cuts.extend([0, 40]);
            cuts.sort_unstable();
            for cut in cuts.windows(2) {
                let mut part = vec![0.0; cut[1] - cut[0]];
                fill_normal(seed, stream, start + cut[0] as u64, 0.02, &mut part);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&part), bits(&whole[cut[0]..cut[1]]));
            }
            for (i, x) in whole.iter().enumerate() {
                let alone = 0.02 * normal_at(seed, stream, start + i as u64);
                prop_assert_eq!(x.to_bits(), alone.to_bits());
            }
        }
    }
}
