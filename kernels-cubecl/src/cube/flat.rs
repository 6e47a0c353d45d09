//! Passes over flat buffers: gradients of many tensors added to one and weights given back to them, AdamW, and the sum
//! of squares that a norm is made of.

use super::sum::{cube_sum, finished};
use super::{
    UNITS, Units, addresses, contiguous, cubes, elem, empty, owned, reshaped, unit_each,
    vector_size,
};
use crate::adamw::AdamWFactors;
use crate::flat::{Part, Ranges};
use burn::backend::TensorMetadata;
use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use std::ops::Range;

/// Elements that a cube moves.
const TILE: usize = 16 * UNITS;
/// Elements that a unit has under way.
const AT_ONCE: usize = 4;
/// Tensors of one launch, where the device takes so many.
const TENSORS: usize = 32;

/// What moves between a flat buffer and tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Move {
    /// The tensors' values are added to the buffer's.
    Gather,
    /// The buffer's values go to the tensors.
    Scatter,
}

/// Tensors, the first element of each in the buffer, and the end of its tiles among all.
#[cube(launch_unchecked, address_type = "dynamic")]
fn move_parts<A: Float, F: Float>(
    flat: &mut [A],
    tensors: &mut Sequence<Box<[F]>>,
    starts: &Sequence<usize>,
    lengths: &Sequence<usize>,
    ends: &Sequence<usize>,
    #[comptime] which: Move,
    #[comptime] units: usize,
    #[define(A, F)] _dtypes: [ElemType; 2],
) {
    let tile = CUBE_POS;
    let count = comptime!(ends.len());
    #[unroll]
    for i in 0..count {
        let mut first = 0usize;
        if comptime!(i > 0) {
            first = ends[comptime!(if i > 0 { i - 1 } else { 0 })];
        }
        if tile >= first && tile < ends[i] {
            let tensor = tensors.index_mut(i);
            let length = lengths[i];
            let start = starts[i];
            let mut at = (tile - first) * TILE + UNIT_POS as usize;
            let end = min((tile - first + 1) * TILE, length);
            // Several loads are under way at once: a store might change what a later one reads.
            while at + (AT_ONCE - 1) * units < end {
                let mut values = Array::<f32>::new(AT_ONCE);
                #[unroll]
                for i in 0..AT_ONCE {
                    let from = at + i * units;
                    values[i] = match comptime!(which) {
                        Move::Gather => {
                            f32::cast_from(flat[start + from]) + f32::cast_from(tensor[from])
                        }
                        Move::Scatter => f32::cast_from(flat[start + from]),
                    };
                }
                #[unroll]
                for i in 0..AT_ONCE {
                    let to = at + i * units;
                    match comptime!(which) {
                        Move::Gather => flat[start + to] = A::cast_from(values[i]),
                        Move::Scatter => tensor[to] = F::cast_from(values[i]),
                    }
                }
                at += AT_ONCE * units;
            }
            while at < end {
                match comptime!(which) {
                    Move::Gather => flat[start + at] += A::cast_from(tensor[at]),
                    Move::Scatter => tensor[at] = F::cast_from(flat[start + at]),
                }
                at += units;
            }
        }
    }
}

/// [`AdamWFactors`] on a device.
#[derive(CubeType, CubeLaunch, Clone)]
struct Factors {
    grad_scale: f32,
    beta1: f32,
    beta1_rest: f32,
    beta2: f32,
    beta2_rest: f32,
    step_size: f32,
    second_correction: f32,
    eps: f32,
    keep: f32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw_step<F: Float, N: Size>(
    values: &mut [Vector<f32, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    gradients: &[Vector<f32, N>],
    weights: &mut [Vector<F, N>],
    bounds: &[u32],
    f: &Factors,
    vectors: usize,
    known: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let at = ABSOLUTE_POS;
        let width = N::value();
        // Bounds at or before the first element.
        let element = (at * width) as u32;
        let mut low = 0usize;
        let mut high = known;
        while low < high {
            let middle = (low + high) / 2;
            if bounds[middle] <= element {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let mut keep = Vector::<f32, N>::new(1.0f32);
        #[unroll]
        for lane in 0..width {
            while low < known && bounds[low] <= element + lane as u32 {
                low += 1;
            }
            keep.insert(lane, select(low % 2 == 1, f.keep, 1.0f32));
        }
        let g = gradients[at] * Vector::new(f.grad_scale);
        let m = first[at] * Vector::new(f.beta1) + g * Vector::new(f.beta1_rest);
        let v = second[at] * Vector::new(f.beta2) + g * g * Vector::new(f.beta2_rest);
        let denominator = v.sqrt() / Vector::new(f.second_correction) + Vector::new(f.eps);
        let step = m / denominator * Vector::new(f.step_size);
        let value = values[at] * keep - step;
        first[at] = m;
        second[at] = v;
        values[at] = value;
        weights[at] = Vector::cast_from(value);
    }
}

/// Sums of squares of what each of `parts` cubes takes.
#[cube(launch_unchecked, address_type = "dynamic")]
fn square_partials<F: Float, N: Size>(
    x: &[Vector<F, N>],
    partials: &mut [f32],
    vectors: usize,
    parts: usize,
    #[comptime] units: usize,
    #[comptime] planes: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut at = CUBE_POS_X as usize * units + UNIT_POS as usize;
    while at < vectors {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += value * value;
        at += parts * units;
    }
    let total = cube_sum(sum.vector_sum(), &mut shared, units, planes);
    if UNIT_POS == 0 {
        partials[CUBE_POS_X as usize] = total;
    }
}

/// Adds each part to its elements of `sums`: a launch for [`TENSORS`] of them.
pub fn gather(sums: CubeTensor, parts: Vec<Part<CubeTensor>>) -> CubeTensor {
    let sums = owned(sums);
    let parts: Vec<_> = parts
        .into_iter()
        .map(|part| Part {
            tensor: contiguous(part.tensor),
            ..part
        })
        .collect();
    // Tensors of one type to a launch.
    for parts in parts.chunk_by(|a, b| a.tensor.dtype == b.tensor.dtype) {
        move_all(&sums, parts, Move::Gather);
    }
    sums
}

/// The elements of `flat` in each of the ranges: a launch for [`TENSORS`] of them.
pub fn scatter(flat: CubeTensor, ranges: &[Range<usize>]) -> Vec<CubeTensor> {
    let flat = contiguous(flat);
    let part = |range: &Range<usize>| Part {
        tensor: empty(&flat, [range.len()], flat.dtype),
        start: range.start,
    };
    let parts: Vec<_> = ranges.iter().map(part).collect();
    move_all(&flat, &parts, Move::Scatter);
    parts.into_iter().map(|part| part.tensor).collect()
}

fn move_all(flat: &CubeTensor, parts: &[Part<CubeTensor>], which: Move) {
    let client = &flat.client;
    let units = Units::of(client).for_work(UNITS, UNITS);
    // The buffer itself and the scalars are bound as well.
    let bindings = client.properties().hardware.max_bindings as usize;
    let at_once = bindings.saturating_sub(2).clamp(1, TENSORS);
    let parts: Vec<_> = parts
        .iter()
        .filter(|part| part.tensor.shape().num_elements() > 0)
        .collect();
    for parts in parts.chunks(at_once) {
        let (mut tensors, mut tiles) = (SequenceArg::new(), 0);
        let [mut starts, mut lengths, mut ends] = [(); 3].map(|()| SequenceArg::new());
        let mut all = vec![flat];
        for part in parts {
            let length = part.tensor.shape().num_elements();
            tiles += length.div_ceil(TILE);
            tensors.push(part.tensor.clone().into_buffer_arg());
            starts.push(part.start);
            lengths.push(length);
            ends.push(tiles);
            all.push(&part.tensor);
        }
        // SAFETY: each part lies inside of the buffer, which whoever calls has seen to; a cube moves elements of one
        // part alone, below its length.
        unsafe {
            move_parts::launch_unchecked(
                client,
                cubes(client, tiles),
                CubeDim::new_1d(units as u32),
                addresses(&all),
                flat.clone().into_buffer_arg(),
                tensors,
                starts,
                lengths,
                ends,
                which,
                units,
                [elem(flat), elem(&parts[0].tensor)],
            );
        }
    }
}

/// In place where nobody else holds the buffers.
pub fn adamw(
    state: [CubeTensor; 3],
    gradients: CubeTensor,
    f: &AdamWFactors,
    decayed: &Ranges,
    dtype: DType,
) -> ([CubeTensor; 3], CubeTensor) {
    let [values, first, second] = state.map(owned);
    let mut bounds: Vec<u32> = decayed.bounds().map(|at| at as u32).collect();
    let known = bounds.len();
    // A buffer has an element.
    bounds.resize(known.max(1), 0);
    let bounds = TensorData::new(bounds, [known.max(1)]);
    let bounds = CubeBackend::int_from_data(bounds, &values.device);
    let gradients = contiguous(gradients);
    let len = values.shape().num_elements();
    let weights = empty(&values, values.shape(), dtype);
    let vector = vector_size(&values, &[len]);
    let vectors = len / vector;
    let (count, dim) = unit_each(&values.client, vectors);
    let factors = FactorsLaunch::new(
        f.grad_scale,
        f.beta1[0],
        f.beta1[1],
        f.beta2[0],
        f.beta2[1],
        f.step_size,
        f.second_correction,
        f.eps,
        f.keep,
    );
    // SAFETY: each unit reads and writes one vector of every buffer; all have as many.
    unsafe {
        adamw_step::launch_unchecked(
            &values.client,
            count,
            dim,
            addresses(&[&values]),
            vector,
            values.clone().into_buffer_arg(),
            first.clone().into_buffer_arg(),
            second.clone().into_buffer_arg(),
            gradients.into_buffer_arg(),
            weights.clone().into_buffer_arg(),
            bounds.into_buffer_arg(),
            factors,
            vectors,
            known,
            elem(&weights),
        );
    }
    ([values, first, second], weights)
}

/// `Σ x²`, `[1]` in f32, added up in the same order on every device.
pub fn square_sum(x: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    let len = x.shape().num_elements();
    let vector = vector_size(&x, &[len]);
    let vectors = len / vector;
    let on = Units::of(&x.client);
    let units = on.for_work(UNITS, UNITS);
    let parts = vectors.div_ceil(UNITS).clamp(1, 512);
    let partials = empty(&x, [1, parts, 1], DType::F32);
    // SAFETY: the kernel reads `vectors` vectors and writes `parts` sums.
    unsafe {
        square_partials::launch_unchecked(
            &x.client,
            CubeCount::Static(parts as u32, 1, 1),
            CubeDim::new_1d(units as u32),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            vectors,
            parts,
            units,
            on.planes,
            elem(&x),
        );
    }
    reshaped(finished(partials, DType::F32), [1])
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    use cubecl::ir::FloatKind;
    for (name, dtype, load) in TYPES {
        all.push(Entry::new(format!("adamw {name}"), 64, move |t| {
            let factors = FactorsCompilationArg {
                grad_scale: (),
                beta1: (),
                beta1_rest: (),
                beta2: (),
                beta2_rest: (),
                step_size: (),
                second_correction: (),
                eps: (),
                keep: (),
            };
            let dim = settings(CubeDim::new_1d(UNITS as u32));
            let (device, properties) = (t.device, t.properties);
            Box::new(adamw_step::AdamwStep::new(
                dim,
                device,
                properties,
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                factors,
                (),
                (),
                4,
                dtype,
            ))
        }));
        for (what, which) in [("gather", Move::Gather), ("scatter", Move::Scatter)] {
            let flat = match which {
                Move::Gather => ElemType::Float(FloatKind::F32),
                Move::Scatter => dtype,
            };
            all.push(Entry::new(format!("{what} {name}"), 64, move |t| {
                let each = || (0..TENSORS).map(|_| ()).collect();
                Box::new(move_parts::MoveParts::new(
                    settings(CubeDim::new_1d(UNITS as u32)),
                    t.device,
                    t.properties,
                    b(),
                    (0..TENSORS).map(|_| b()).collect(),
                    each(),
                    each(),
                    each(),
                    which,
                    UNITS,
                    [flat, dtype],
                ))
            }));
        }
        all.push(Entry::new(format!("square_sum {name}"), 64, move |t| {
            let dim = settings(CubeDim::new_1d(UNITS as u32));
            let (device, properties) = (t.device, t.properties);
            Box::new(square_partials::SquarePartials::new(
                dim,
                device,
                properties,
                b(),
                b(),
                (),
                (),
                load,
                UNITS,
                true,
                dtype,
            ))
        }));
    }
}
