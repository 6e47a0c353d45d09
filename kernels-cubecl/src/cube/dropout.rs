//! Random words where they are needed, and dropout with its residual in one pass.

use super::{addresses, contiguous, elem, empty_like, rows_of, unit_each, vector_size};
use crate::dropout::{AttentionDropout, HiddenKeep, Keep};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// The generator's key and stream, the words below which an element is dropped, and what the others are multiplied
/// by.
#[derive(CubeType, CubeLaunch, Clone)]
pub struct Generator {
    key_low: u32,
    key_high: u32,
    stream_low: u32,
    stream_high: u32,
    below: u32,
    scale: f32,
}

pub fn generator(keep: &Keep) -> GeneratorLaunch {
    let ([key_low, key_high], [stream_low, stream_high], below, scale) = keep.words();
    GeneratorLaunch::new(key_low, key_high, stream_low, stream_high, below, scale)
}

/// A number of 64 bits, on devices that have 32.
#[derive(CubeType, Clone, Copy)]
pub struct Wide {
    low: u32,
    high: u32,
}

#[cube]
impl Wide {
    pub fn new(low: u32) -> Wide {
        Wide { low, high: 0u32 }
    }

    /// `self · factor + more`
    pub fn times_plus(&self, factor: u32, more: u32) -> Wide {
        let product = self.low * factor;
        let low = product + more;
        let high = self.high * factor + self.low.mul_hi(factor);
        Wide {
            low,
            high: high + u32::cast_from(low < product),
        }
    }

    pub fn plus(&self, more: &Wide) -> Wide {
        let low = self.low + more.low;
        Wide {
            low,
            high: self.high + more.high + u32::cast_from(low < more.low),
        }
    }
}

/// A block of Philox4x32 with ten rounds: see [`crate::random`].
#[cube]
pub fn words(generator: &Generator, block_low: u32, block_high: u32) -> Array<u32> {
    let mut c0 = block_low;
    let mut c1 = block_high;
    let mut c2 = generator.stream_low;
    let mut c3 = generator.stream_high;
    let mut k0 = generator.key_low;
    let mut k1 = generator.key_high;
    #[unroll]
    for _ in 0..10usize {
        let even_high = c0.mul_hi(0xD251_1F53u32);
        let even_low = c0 * 0xD251_1F53u32;
        let odd_high = c2.mul_hi(0xCD9E_8D57u32);
        let odd_low = c2 * 0xCD9E_8D57u32;
        c0 = odd_high ^ c1 ^ k0;
        c2 = even_high ^ c3 ^ k1;
        c1 = odd_low;
        c3 = even_low;
        k0 += 0x9E37_79B9u32;
        k1 += 0xBB67_AE85u32;
    }
    let mut block = Array::<u32>::new(4usize);
    block[0] = c0;
    block[1] = c1;
    block[2] = c2;
    block[3] = c3;
    block
}

/// What the element with that index is multiplied by.
#[cube]
pub fn factor(generator: &Generator, index: &Wide) -> f32 {
    let block = words(
        generator,
        (index.low >> 2u32) | (index.high << 30u32),
        index.high >> 2u32,
    );
    let which = index.low & 3u32;
    let first = select(which == 0u32, block[0], block[1]);
    let second = select(which == 2u32, block[2], block[3]);
    let word = select(which < 2u32, first, second);
    select(word < generator.below, 0.0f32, generator.scale)
}

/// The factors of a vector of elements from `index` on; where vectors have a multiple of four elements, `index` is one.
#[cube]
fn factors<N: Size>(generator: &Generator, index: &Wide) -> Vector<f32, N> {
    let mut factors = Vector::<f32, N>::new(0.0f32);
    let size = N::value();
    if comptime!(size % 4 == 0) {
        #[unroll]
        for i in 0..comptime!(size / 4) {
            let block = words(
                generator,
                ((index.low >> 2u32) | (index.high << 30u32)) + i as u32,
                index.high >> 2u32,
            );
            #[unroll]
            for j in 0..4usize {
                let kept = select(block[j] < generator.below, 0.0f32, generator.scale);
                factors.insert(comptime!(4 * i + j), kept);
            }
        }
    } else {
        #[unroll]
        for i in 0..size {
            let at = index.plus(&Wide::new(i as u32));
            factors.insert(i, factor(generator, &at));
        }
    }
    factors
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn dropout_add_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    generator: &Generator,
    first_sample: u32,
    samples: u32,
    first_position: u32,
    sequence: u32,
    vectors: usize,
    width: usize,
    #[comptime] added: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let row = (ABSOLUTE_POS / width) as u32;
        let column = (ABSOLUTE_POS % width * N::value()) as u32;
        let position = first_position + row / samples;
        let sample = Wide::new(first_sample + row % samples);
        let row = sample.times_plus(sequence, position);
        let index = row.times_plus((width * N::value()) as u32, column);
        let kept = factors::<N>(generator, &index);
        let mut out = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]) * kept;
        if comptime!(added) {
            out += Vector::cast_from(residual[ABSOLUTE_POS]);
        }
        y[ABSOLUTE_POS] = Vector::cast_from(out);
    }
}

pub fn dropout_add(x: CubeTensor, residual: Option<CubeTensor>, keep: &HiddenKeep) -> CubeTensor {
    let x = contiguous(x);
    let added = residual.is_some();
    // Of a kernel that adds nothing, nothing reads it.
    let residual = residual.map_or_else(|| x.clone(), contiguous);
    let (y, (rows, h)) = (empty_like(&x), rows_of(&x));
    let vector = vector_size(&x, &[h]);
    let vectors = rows * h / vector;
    let (count, dim) = unit_each(&x.client, vectors);
    // SAFETY: the kernel reads and writes `vectors` vectors.
    unsafe {
        dropout_add_kernel::launch_unchecked(
            &x.client,
            count,
            dim,
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            residual.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            generator(&keep.keep),
            keep.first_sample as u32,
            keep.samples as u32,
            keep.first_position as u32,
            keep.sequence as u32,
            vectors,
            h / vector,
            added,
            elem(&x),
        );
    }
    y
}

/// Which probabilities of attention are dropped: the generator, and where a rank's heads lie among all.
#[derive(CubeType, CubeLaunch, Clone)]
pub struct HeadsGenerator {
    generator: Generator,
    first_sample: u32,
    groups: u32,
    first_group: u32,
    heads: u32,
}

/// That of no dropout is read by nothing.
pub fn heads_generator(dropout: Option<&AttentionDropout>) -> HeadsGeneratorLaunch {
    match dropout {
        None => {
            let none = GeneratorLaunch::new(0, 0, 0, 0, 0, 1.0);
            HeadsGeneratorLaunch::new(none, 0, 1, 0, 0)
        }
        Some(AttentionDropout {
            keep,
            first_sample,
            heads,
        }) => HeadsGeneratorLaunch::new(
            generator(keep),
            *first_sample as u32,
            heads.groups as u32,
            heads.first_group as u32,
            heads.num_attention_heads as u32,
        ),
    }
}

/// The index of a query head's first probability: `group` counts the groups of all samples, `head` the query heads of
/// a group of `r`, of a sequence of `s`.
#[cube]
pub fn first_probability(at: &HeadsGenerator, group: u32, head: u32, r: u32, s: u32) -> Wide {
    let sample = at.first_sample + group / at.groups;
    let head = (at.first_group + group % at.groups) * r + head;
    Wide::new(sample)
        .times_plus(at.heads, head)
        .times_plus(s, 0u32)
        .times_plus(s, 0u32)
}

/// What the probability with which a query attends to a key is multiplied by; `first` is of the query's head.
#[cube]
pub fn probability_factor(at: &HeadsGenerator, first: &Wide, query: u32, key: u32, s: u32) -> f32 {
    let index = first.plus(&Wide::new(query).times_plus(s, key));
    factor(&at.generator, &index)
}

/// That of two keys one after another, of which the first and `s` are even: one block has both.
#[cube]
pub fn pair_factors<P: Size>(
    at: &HeadsGenerator,
    first: &Wide,
    query: u32,
    key: u32,
    s: u32,
) -> Vector<f32, P> {
    let generator = &at.generator;
    let index = first.plus(&Wide::new(query).times_plus(s, key));
    let block = words(
        generator,
        (index.low >> 2u32) | (index.high << 30u32),
        index.high >> 2u32,
    );
    let second_half = (index.low & 2u32) != 0u32;
    let one = select(second_half, block[2], block[0]);
    let two = select(second_half, block[3], block[1]);
    let kept = select(two < generator.below, 0.0f32, generator.scale);
    let mut kept = Vector::<f32, P>::new(kept);
    kept.insert(
        0usize,
        select(one < generator.below, 0.0f32, generator.scale),
    );
    kept
}

#[cfg(feature = "ptx")]
impl HeadsGeneratorCompilationArg {
    pub fn any() -> Self {
        HeadsGeneratorCompilationArg {
            generator: GeneratorCompilationArg::any(),
            first_sample: (),
            groups: (),
            first_group: (),
            heads: (),
        }
    }
}

#[cfg(feature = "ptx")]
impl GeneratorCompilationArg {
    fn any() -> Self {
        GeneratorCompilationArg {
            key_low: (),
            key_high: (),
            stream_low: (),
            stream_high: (),
            below: (),
            scale: (),
        }
    }
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::UNITS;
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    for (name, dtype, load) in TYPES {
        all.push(Entry::new(format!("dropout_add {name}"), 64, move |t| {
            Box::new(dropout_add_kernel::DropoutAddKernel::new(
                settings(CubeDim::new_1d(UNITS as u32)),
                t.device,
                t.properties,
                b(),
                b(),
                b(),
                GeneratorCompilationArg::any(),
                (),
                (),
                (),
                (),
                (),
                (),
                load,
                true,
                dtype,
            ))
        }));
    }
}
