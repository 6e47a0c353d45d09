//! Every operation in both of its forms: values and gradients against the reference in f64, and the reference's
//! gradients against finite differences.

use crate::activated_linear::activated_linear;
use crate::adamw::AdamWFactors;
use crate::added_norm::{added_layer_norm, added_rms_norm};
use crate::attention::{AttentionOptions, causal_attention};
use crate::dropout::{AttentionDropout, AttentionHeads, HiddenKeep, Keep};
use crate::dropout_add::{dropout, dropout_add};
use crate::flat::{self, Ranges};
use crate::gelu::{GeluApproximation, gelu};
use crate::head_loss::{HeadShard, Reduce};
use crate::layer_norm::layer_norm;
use crate::linear::linear;
use crate::rms_norm::rms_norm;
use crate::rotary::{Heads, RotaryTable, rotary_embedding};
use crate::swiglu::swiglu;
use crate::{Activation, Fused, Kernels, random};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, try_read_sync};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_flex::FlexTensor;
use std::sync::{Barrier, Mutex};

/// An operation of tensors that are `[1, 1, n]` where they are vectors.
type Op<'a> = &'a (dyn Fn(&[Tensor<3>], Kernels) -> Tensor<3> + Sync);

fn vector(x: &Tensor<3>) -> Tensor<1> {
    let n = x.dims()[2];
    x.clone().reshape([n])
}

pub(crate) fn arbitrary(shape: [usize; 3], salt: u64) -> Vec<f32> {
    let mut values = vec![0f32; shape.iter().product()];
    random::fill_normal(salt, 7, 0, 1.0, &mut values);
    values
}

fn float(dtype: DType) -> FloatDType {
    dtype.into()
}

/// The output, and the gradients of all inputs for an arbitrary weighting of it.
fn outcome(
    op: Op<'_>,
    inputs: &[(Vec<f32>, [usize; 3])],
    kernels: Kernels,
    dtype: DType,
) -> Vec<Vec<f64>> {
    outcome_on(Device::flex(), op, inputs, kernels, dtype)
}

fn outcome_on(
    device: Device,
    op: Op<'_>,
    inputs: &[(Vec<f32>, [usize; 3])],
    kernels: Kernels,
    dtype: DType,
) -> Vec<Vec<f64>> {
    let device = device.autodiff();
    let tensor = |values: &[f32], shape: [usize; 3]| -> Tensor<3> {
        let data = TensorData::new(values.to_vec(), shape);
        let x: Tensor<3> = Tensor::from_data(data, (&device, DType::F32));
        x.cast(float(dtype))
    };
    let inputs: Vec<Tensor<3>> = inputs
        .iter()
        .map(|(values, shape)| tensor(values, *shape).detach().require_grad())
        .collect();
    let y = op(&inputs, kernels);
    let weights = arbitrary(y.dims(), 99);
    let weighted = y.clone() * tensor(&weights, y.dims());
    let gradients = weighted.sum().backward();
    let values = |x: Tensor<3>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let gradient = |x: &Tensor<3>| values(x.grad(&gradients).expect("a gradient"));
    let mut all = vec![values(y.inner())];
    all.extend(inputs.iter().map(gradient));
    all
}

/// The devices with kernels in CubeCL that this build has, and what they are tested in.
pub(crate) fn cube_devices() -> Vec<(Device, Kernels, DType, f64)> {
    #[allow(unused_mut, reason = "by features")]
    let mut all = Vec::new();
    #[cfg(feature = "wgpu")]
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::F16, 4e-3)] {
        let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
        all.push((device, Kernels::Fused, dtype, bound));
    }
    #[cfg(feature = "cpu")]
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 3e-2)] {
        all.push((Device::cpu(), Kernels::Fused, dtype, bound));
    }
    all
}

/// The same devices for tensors of their backend, with the 16-bit type of each.
#[cfg(any(feature = "wgpu", feature = "cpu"))]
fn cubes() -> Vec<(burn_cubecl::CubeDevice, DType)> {
    vec![
        #[cfg(feature = "wgpu")]
        (
            burn_cubecl::CubeDevice::Wgpu(Default::default()),
            DType::F16,
        ),
        #[cfg(feature = "cpu")]
        (
            burn_cubecl::CubeDevice::Cpu(Default::default()),
            DType::BF16,
        ),
    ]
}

/// `‖got - want‖ / ‖want‖`
pub(crate) fn distance(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
    difference / norm(&mut want.iter().copied()).max(1e-12)
}

/// Both forms of an operation on inputs of these shapes.
fn check(what: &str, shapes: &[[usize; 3]], op: Op<'_>) {
    let inputs: Vec<_> = (1..)
        .zip(shapes)
        .map(|(salt, shape)| (arbitrary(*shape, salt), *shape))
        .collect();
    let exact = outcome(op, &inputs, Kernels::Local, DType::F64);
    let mut all = vec![
        (Device::flex(), Kernels::Fused, DType::F32, 1e-5),
        (Device::flex(), Kernels::Local, DType::F32, 1e-5),
        (Device::flex(), Kernels::Auto, DType::BF16, 3e-2),
    ];
    all.extend(cube_devices());
    for (device, kernels, dtype, bound) in all {
        let got = outcome_on(device.clone(), op, &inputs, kernels, dtype);
        if device != Device::flex() {
            assert!(
                kernels.fuse_on(&device, dtype),
                "{device:?} has no kernels in {dtype:?}"
            );
            let again = outcome_on(device.clone(), op, &inputs, kernels, dtype);
            assert_eq!(got, again, "{what}: another time, other bits");
        }
        for (i, (got, want)) in got.iter().zip(&exact).enumerate() {
            let error = distance(got, want);
            let part = if i == 0 { "output" } else { "gradient" };
            assert!(
                error < bound,
                "{what} {shapes:?} on {device:?}, {kernels:?} in {dtype:?}: {part} {i} is {error:e} off"
            );
        }
    }
    // Whatever the number of threads, a fused kernel's results have the same bits.
    let on_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.build().expect("threads");
        pool.install(|| outcome(op, &inputs, Kernels::Fused, DType::F32))
    };
    assert_eq!(on_threads(1), on_threads(3), "{what}");
    // Of a few elements of each input, in f64: the step is exact in f32.
    const STEP: f32 = 1.0 / 1024.0;
    for (i, (values, _)) in inputs.iter().enumerate() {
        for element in (0..values.len()).step_by(values.len().div_ceil(5)) {
            let moved = |by: f32| {
                let mut inputs = inputs.clone();
                // Rounded first, so that the two steps are as long.
                let rounded = (values[element] * 1024.0).round() / 1024.0;
                inputs[i].0[element] = rounded + by;
                inputs
            };
            let total = |by: f32| {
                let y = outcome(op, &moved(by), Kernels::Local, DType::F64).swap_remove(0);
                let n = y.len();
                let weights = arbitrary([1, 1, n], 99);
                let terms = y.iter().zip(weights).map(|(y, w)| y * f64::from(w));
                terms.sum::<f64>()
            };
            let (near, far) = (
                (total(STEP) - total(-STEP)) / f64::from(2.0 * STEP),
                (total(2.0 * STEP) - total(-2.0 * STEP)) / f64::from(4.0 * STEP),
            );
            // Richardson's extrapolation leaves the fourth power of the step.
            let slope = (4.0 * near - far) / 3.0;
            let there = outcome(op, &moved(0.0), Kernels::Local, DType::F64);
            let gradient = there[i + 1][element];
            assert!(
                (slope - gradient).abs() < 1e-6 * (1.0 + slope.abs()),
                "{what}: d{i}[{element}] is {gradient}, the difference quotient {slope}"
            );
        }
    }
}

#[test]
fn norms() {
    for (shape, h) in [
        ([3, 2, 5], 5),
        ([1, 1, 64], 64),
        ([7, 3, 37], 37),
        ([5, 9, 96], 96),
    ] {
        check(
            "layer norm",
            &[shape, [1, 1, h], [1, 1, h]],
            &|x, kernels| layer_norm(x[0].clone(), vector(&x[1]), vector(&x[2]), 1e-5, kernels),
        );
        check("rms norm", &[shape, [1, 1, h]], &|x, kernels| {
            rms_norm(x[0].clone(), vector(&x[1]), 1e-5, kernels)
        });
    }
    // More rows than one task takes.
    check(
        "layer norm",
        &[[300, 2, 3], [1, 1, 3], [1, 1, 3]],
        &|x, kernels| layer_norm(x[0].clone(), vector(&x[1]), vector(&x[2]), 1e-5, kernels),
    );
}

/// Both outputs side by side: the sum's gradient comes from itself and through the norm.
#[test]
fn norms_of_sums() {
    let side_by_side = |(sum, y): (Tensor<3>, Tensor<3>)| Tensor::cat(vec![sum, y], 2);
    // Not rows of three: some of 600 vary so little that their norm magnifies what 16 bits round off the sum.
    for shape in [[3, 2, 5], [1, 1, 64], [7, 3, 37], [5, 9, 96], [300, 2, 12]] {
        let vector_shape = [1, 1, shape[2]];
        check(
            "layer norm of a sum",
            &[shape, shape, vector_shape, vector_shape],
            &|x, kernels| {
                let (weight, bias) = (vector(&x[2]), vector(&x[3]));
                let [x, residual] = [x[0].clone(), x[1].clone()];
                side_by_side(added_layer_norm(x, residual, weight, bias, 1e-5, kernels))
            },
        );
        check(
            "rms norm of a sum",
            &[shape, shape, vector_shape],
            &|x, kernels| {
                let [x, residual, weight] = [x[0].clone(), x[1].clone(), x[2].clone()];
                side_by_side(added_rms_norm(x, residual, vector(&weight), 1e-5, kernels))
            },
        );
    }
}

#[test]
fn activations() {
    for shape in [[3, 2, 5], [1, 1, 64], [7, 3, 38], [300, 2, 4]] {
        for how in [GeluApproximation::Tanh, GeluApproximation::Erf] {
            check("gelu", &[shape], &|x, kernels| {
                gelu(x[0].clone(), None, how, kernels)
            });
            check("bias gelu", &[shape, [1, 1, shape[2]]], &|x, kernels| {
                gelu(x[0].clone(), Some(vector(&x[1])), how, kernels)
            });
        }
        let gated = [shape[0], shape[1], 2 * shape[2]];
        check("swiglu", &[gated], &|x, kernels| {
            swiglu(x[0].clone(), kernels)
        });
    }
}

/// Their backward makes again what the forward did not keep.
#[test]
fn activated_linear_layers() {
    for ([s, b, f], o) in [([3, 2, 5], 7), ([1, 1, 2], 4), ([70, 2, 34], 48)] {
        let weight = |x: &Tensor<3>| x.clone().reshape([o, f]);
        for how in [GeluApproximation::Tanh, GeluApproximation::Erf] {
            let gelu = Activation::Gelu(how);
            let shapes = [[s, b, f], [1, 1, f], [1, o, f], [1, 1, o]];
            check("gelu and linear, biased", &shapes, &|x, kernels| {
                let biases = [1, 3].map(|i| Some(vector(&x[i])));
                let [bias, out_bias] = biases;
                activated_linear(x[0].clone(), bias, weight(&x[2]), out_bias, gelu, kernels)
            });
            check("gelu and linear", &[[s, b, f], [1, o, f]], &|x, kernels| {
                activated_linear(x[0].clone(), None, weight(&x[1]), None, gelu, kernels)
            });
        }
        for activation in [Activation::SwiGlu, Activation::SquaredRelu] {
            let shapes = [[s, b, activation.inputs() * f], [1, o, f], [1, 1, o]];
            check(
                &format!("{activation:?} and linear"),
                &shapes,
                &|x, kernels| {
                    let bias = Some(vector(&x[2]));
                    activated_linear(x[0].clone(), None, weight(&x[1]), bias, activation, kernels)
                },
            );
        }
    }
}

#[test]
fn linear_layers() {
    for ([s, b, i], o) in [
        ([3, 2, 5], 7),
        ([1, 1, 1], 1),
        ([70, 2, 33], 48),
        ([150, 2, 80], 200),
    ] {
        let shapes = [[s, b, i], [1, o, i], [1, 1, o]];
        check("linear", &shapes, &|x, kernels| {
            let weight = x[1].clone().reshape([o, i]);
            linear(x[0].clone(), weight, Some(vector(&x[2])), kernels)
        });
    }
}

#[test]
fn dropouts() {
    for (s, b, h) in [(5, 3, 7), (1, 1, 64), (300, 2, 3)] {
        let keep = HiddenKeep {
            keep: Keep::new(0.3, 5, 6),
            first_sample: 4,
            samples: b,
            first_position: s,
            sequence: 2 * s,
        };
        check("dropout", &[[s, b, h]], &|x, kernels| {
            dropout(x[0].clone(), keep, kernels)
        });
        check("dropout add", &[[s, b, h]; 2], &|x, kernels| {
            dropout_add(x[0].clone(), x[1].clone(), keep, kernels)
        });
    }
}

/// Large enough for all of a pool's threads to take part.
#[test]
fn products_have_the_same_bits_on_any_number_of_threads() {
    let (n, i, o) = (600, 300, 500);
    let tensor = |shape: [usize; 2], salt| {
        let values = arbitrary([1, shape[0], shape[1]], salt);
        FlexTensor::from_data(TensorData::new(values, shape))
    };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().expect("threads").install(|| {
            let (x, weight, dy) = (tensor([n, i], 1), tensor([o, i], 2), tensor([n, o], 3));
            let bias = FlexTensor::from_data(TensorData::new(arbitrary([1, 1, o], 4), [o]));
            let y = Flex::fused_linear(x.clone(), weight.clone(), Some(bias));
            let dx = Flex::fused_input_gradient(dy.clone(), weight);
            [y, dx, Flex::fused_weight_gradient(dy, x)].map(host)
        })
    };
    let one = run(1);
    assert!(run(2) == one && run(5) == one);
}

#[test]
fn rotary_positions() {
    for (s, groups, count, d, turned, pairs) in
        [(5, 3, 4, 6, 3, 2), (1, 1, 1, 2, 1, 1), (9, 2, 3, 8, 2, 4)]
    {
        let frequencies: Vec<f32> = (0..pairs).map(|i| 0.5f32.powi(i)).collect();
        let table = RotaryTable::new(&frequencies, s);
        let heads = Heads { width: d, turned };
        check("rotary", &[[s, groups, count * d]], &|x, kernels| {
            rotary_embedding(x[0].clone(), heads, &table, kernels)
        });
    }
}

#[test]
fn attention() {
    // Sequences below, at and beyond a block of rows; grouped queries; two samples of as many groups.
    for (s, n, r, d) in [
        (1usize, 1usize, 1, 4),
        (5, 2, 1, 3),
        (64, 2, 2, 8),
        (70, 4, 3, 5),
        (129, 2, 1, 16),
    ] {
        for p in [0.0, 0.3] {
            let heads = AttentionHeads {
                groups: n.div_ceil(2),
                first_group: 1,
                queries_per_group: r,
                num_attention_heads: (n + 1) * r,
            };
            let dropout = (p > 0.0).then(|| AttentionDropout {
                keep: Keep::new(p, 3, 4),
                first_sample: 2,
                heads,
            });
            let options = AttentionOptions {
                queries_per_group: r,
                head_width: d,
                scale: 1.0 / (d as f64).sqrt(),
                dropout,
                recompute: s % 2 == 0,
            };
            check("attention", &[[s, n, (r + 2) * d]], &|x, kernels| {
                causal_attention(x[0].clone(), options, kernels)
            });
        }
    }
}

fn host(x: FlexTensor) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn host_of<B: Backend>(x: FloatTensor<B>) -> Vec<f64> {
    let data = try_read_sync(B::float_into_data(x)).expect("at once");
    data.expect("values").iter::<f64>().collect()
}

/// Buffers of a vector's length and of none, beside PyTorch's formula in f64.
#[test]
fn flat_buffers() {
    flat_buffers_on::<Flex>(&Default::default(), DType::F16);
    #[cfg(any(feature = "wgpu", feature = "cpu"))]
    for (device, narrow) in cubes() {
        flat_buffers_on::<burn::backend::Cube>(&device, narrow);
    }
}

fn flat_buffers_on<B: Fused>(device: &B::Device, narrow: DType) {
    let (lr, decay, eps, step) = (0.1f64, 0.01, 1e-8, 3);
    let corrections = [0.9f64, 0.95].map(|beta| 1.0 - beta.powi(step));
    let factors = AdamWFactors {
        grad_scale: 0.5,
        beta1: [0.9, 0.1],
        beta2: [0.95, 0.05],
        step_size: (lr / corrections[0]) as f32,
        second_correction: corrections[1].sqrt() as f32,
        eps: eps as f32,
        keep: (1.0 - lr * decay) as f32,
    };
    // Runs that begin inside of a vector, one after another.
    let decays = |i: usize| !(2..5).contains(&i) && !(6..4095).contains(&i);
    for n in [1, 7, 4096, 40_001] {
        let decayed = (0..n).filter(|i| decays(*i)).map(|i| i..i + 1);
        let decayed = Ranges::ascending(decayed);
        let mut buffers = [1, 2, 3, 4].map(|salt| arbitrary([1, 1, n], salt));
        buffers[2].iter_mut().for_each(|v| *v = v.abs());
        let tensor =
            |values: &Vec<f32>| B::float_from_data(TensorData::new(values.clone(), [n]), device);
        let [values, first, second, gradients] = buffers.each_ref().map(tensor);
        let squares = host_of::<B>(B::fused_square_sum(gradients.clone()));
        let exact =
            |values: &Vec<f32>| -> Vec<f64> { values.iter().map(|v| f64::from(*v)).collect() };
        let [mut w, mut m, mut v, g] = buffers.each_ref().map(exact);
        let total: f64 = g.iter().map(|g| g * g).sum();
        assert!(
            (squares[0] / total - 1.0).abs() < 1e-5,
            "{n}: {squares:?} is not {total}"
        );
        for i in 0..n {
            let g = 0.5 * g[i];
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            let denominator = (v[i] / corrections[1]).sqrt() + eps;
            let keep = match decays(i) {
                true => 1.0 - lr * decay,
                false => 1.0,
            };
            w[i] = w[i] * keep - lr * (m[i] / corrections[0]) / denominator;
        }
        // The weights are held elsewhere as well: they must not change there.
        let kept = values.clone();
        let state = [values, first, second];
        let (state, weights) = B::fused_adamw(state, gradients, &factors, &decayed, narrow);
        assert_eq!(weights.dtype(), narrow);
        assert_eq!(host_of::<B>(kept), exact(&buffers[0]));
        assert!(distance(&host_of::<B>(weights), &w) < 4e-3);
        for (got, want) in state.into_iter().zip([w, m, v]) {
            assert!(distance(&host_of::<B>(got), &want) < 1e-6);
        }
    }
}

/// Tensors of both types, more than one launch takes, to a buffer and back.
#[test]
fn gathers_and_scatters() {
    gathers_and_scatters_on(&Device::flex(), DType::BF16);
    let narrow = cube_devices()
        .into_iter()
        .filter(|(_, _, dtype, _)| *dtype != DType::F32);
    for (device, _, narrow, _) in narrow {
        gathers_and_scatters_on(&device, narrow);
    }
}

fn gathers_and_scatters_on(device: &Device, narrow: DType) {
    let mut want: Vec<f32> = (0..30_000).map(|i| (i % 1000) as f32).collect();
    let sums = Tensor::<1>::from_data(TensorData::new(want.clone(), [want.len()]), device);
    let (mut parts, mut ranges, mut start) = (Vec::new(), Vec::new(), 3);
    for i in 0..70 {
        // Software Vulkan loses what is written to a buffer of two bytes.
        let (single, short) = (i < 40, if i < 40 { 1 } else { 2 });
        let len = [short, 4096, 0, 5000, 33][i % 5];
        let len = match start + len + 140 > want.len() {
            true => short,
            false => len,
        };
        let values: Vec<f32> = (0..len).map(|at| (1 + i + at % 7) as f32).collect();
        let range = start..start + len;
        let pairs = want[range.clone()].iter_mut().zip(&values);
        pairs.for_each(|(want, value)| *want += value);
        let tensor = Tensor::<1>::from_data(TensorData::new(values, [len]), device);
        let tensor = match single {
            true => tensor,
            false => tensor.cast(narrow),
        };
        parts.push(flat::Part { tensor, start });
        start = range.end + i % 2;
        ranges.push(range);
    }
    let held = sums.clone();
    let sums = flat::gather(sums, parts);
    let host = |x: Tensor<1>| x.into_data().iter::<f32>().collect::<Vec<_>>();
    let sum = host(sums.clone());
    let wrong = (0..want.len()).find(|at| sum[*at] != want[*at]);
    assert_eq!(wrong, None);
    assert_eq!(host(held)[..5], [0.0, 1.0, 2.0, 3.0, 4.0]);
    let parts = flat::scatter(sums.clone(), &ranges);
    for (part, range) in parts.into_iter().zip(&ranges) {
        assert_eq!(host(part), want[range.clone()], "{range:?}");
    }
    let halves = flat::scatter(sums.cast(narrow), &ranges[1..4]);
    for (half, range) in halves.into_iter().zip(&ranges[1..4]) {
        assert_eq!(half.dtype(), narrow);
        for (got, want) in host(half.cast(DType::F32)).iter().zip(&want[range.clone()]) {
            assert!((got - want).abs() <= want * 2f32.powi(-8));
        }
    }
}

/// Over two shards, the second with padding, and over one.
#[test]
fn head_losses() {
    head_losses_on::<Flex>(&Default::default());
    #[cfg(any(feature = "wgpu", feature = "cpu"))]
    for (device, _) in cubes() {
        head_losses_on::<burn::backend::Cube>(&device);
    }
}

fn head_losses_on<B: Fused<Device: Sync>>(device: &B::Device) {
    let (n, h, v, known) = (13, 6, 8, 11);
    let hidden = arbitrary([1, n, h], 1);
    let weight = arbitrary([1, 2 * v, h], 2);
    let d_losses: Vec<f32> = (0..n).map(|i| [0.5, 0.0, -1.5][i % 3]).collect();
    let targets: Vec<usize> = (0..n).map(|i| i * 7 % known).collect();

    // In f64, by hand.
    let (mut losses, mut dx, mut dw) = (vec![0.0; n], vec![0.0; n * h], vec![0.0; 2 * v * h]);
    for i in 0..n {
        let x = &hidden[i * h..][..h];
        let logit = |row: usize| -> f64 {
            let w = &weight[row * h..][..h];
            x.iter()
                .zip(w)
                .map(|(x, w)| f64::from(*x) * f64::from(*w))
                .sum()
        };
        let total: f64 = (0..known).map(|row| logit(row).exp()).sum();
        losses[i] = total.ln() - logit(targets[i]);
        for row in 0..known {
            let hot = f64::from(u8::from(row == targets[i]));
            let d = f64::from(d_losses[i]) * (logit(row).exp() / total - hot);
            for k in 0..h {
                dx[i * h + k] += d * f64::from(weight[row * h + k]);
                dw[row * h + k] += d * f64::from(x[k]);
            }
        }
    }
    let tensor = |values: &[f32], shape: [usize; 2]| {
        B::float_from_data(TensorData::new(values.to_vec(), shape), device)
    };
    for tokens_at_once in [1, 5, 64] {
        let (slots, meet) = ([(); 2].map(|()| Mutex::new(Vec::new())), Barrier::new(2));
        let run = |shard: usize| {
            let rows = shard * v..(shard + 1) * v;
            let local = |t: &usize| rows.contains(t).then(|| t - rows.start);
            let targets: Vec<Option<usize>> = targets.iter().map(local).collect();
            let reduce = |values: &mut [f32], how: Reduce| {
                *slots[shard].lock().unwrap() = values.to_vec();
                meet.wait();
                for (value, other) in values.iter_mut().zip(&*slots[1 - shard].lock().unwrap()) {
                    *value = match how {
                        Reduce::Sum => *value + other,
                        Reduce::Max => value.max(*other),
                    };
                }
                meet.wait();
            };
            let kernel = HeadShard {
                targets: &targets,
                known: known.saturating_sub(rows.start).min(v),
                d_losses: &d_losses,
                tokens_at_once,
                reduce: Some(&reduce),
            };
            let weight = tensor(&weight[rows.start * h..rows.end * h], [v, h]);
            B::fused_head_loss(tensor(&hidden, [n, h]), weight, &kernel, true)
        };
        let (first, second) = std::thread::scope(|scope| {
            let second = scope.spawn(|| run(1));
            (run(0), second.join().unwrap())
        });
        let [first, second] = [first, second].map(|loss| {
            assert!(distance(&host_of::<B>(loss.losses), &losses) < 1e-6);
            let (dx, dw) = loss.gradients.expect("asked for");
            (host_of::<B>(dx), host_of::<B>(dw))
        });
        // Each has the part of the hidden states' gradient that its rows give, and its rows' own.
        let sum: Vec<f64> = first.0.iter().zip(&second.0).map(|(a, b)| a + b).collect();
        assert!(distance(&sum, &dx) < 1e-6);
        assert!(distance(&[first.1, second.1].concat(), &dw) < 1e-6);
    }
    // One shard that has everything but padding.
    let targets: Vec<Option<usize>> = targets.iter().map(|t| Some(*t)).collect();
    for tokens_at_once in [1, 5, 64] {
        let kernel = HeadShard {
            targets: &targets,
            known,
            d_losses: &d_losses,
            tokens_at_once,
            reduce: None,
        };
        let weight = tensor(&weight, [2 * v, h]);
        let loss = B::fused_head_loss(tensor(&hidden, [n, h]), weight, &kernel, true);
        assert!(distance(&host_of::<B>(loss.losses), &losses) < 1e-6);
        let (got_x, got_w) = loss.gradients.expect("asked for");
        assert!(distance(&host_of::<B>(got_x), &dx) < 1e-6);
        assert!(distance(&host_of::<B>(got_w), &dw) < 1e-6);
    }
}
