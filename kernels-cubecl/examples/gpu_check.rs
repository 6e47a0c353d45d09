//! The fused kernels on a card: their values against the reference in f64 on the CPU, then the medians of their times
//! against what the card's memory and tensor cores allow, measured in the same run.
//!
//! `gpu_check cuda|wgpu [small]` prints a table, and a JSON line for each kernel to standard error, which
//! `scripts/gpu_check.sh` joins with PyTorch's. `small` takes shapes that software can bear.

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, try_read_sync};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_megatron_kernels::adamw::AdamWFactors;
use burn_megatron_kernels::added_norm::{added_layer_norm, added_rms_norm};
use burn_megatron_kernels::attention::{AttentionOptions, causal_attention};
use burn_megatron_kernels::dropout::{HiddenKeep, Keep};
use burn_megatron_kernels::dropout_add::dropout_add;
use burn_megatron_kernels::embedding::embedding_rows;
use burn_megatron_kernels::flat::{self, Part, Ranges};
use burn_megatron_kernels::gelu::{GeluApproximation, gelu};
use burn_megatron_kernels::head_loss::HeadShard;
use burn_megatron_kernels::layer_norm::layer_norm;
use burn_megatron_kernels::rms_norm::rms_norm;
use burn_megatron_kernels::rotary::{Heads, RotaryTable, rotary_embedding};
use burn_megatron_kernels::swiglu::swiglu;
use burn_megatron_kernels::{Fused, Kernels, random};
use std::process::ExitCode;
use std::time::Instant;

type B = CubeBackend;

/// Launches between two looks at the clock, and looks.
const LAUNCHES: usize = 10;
const LOOKS: usize = 7;

struct Card {
    device: CubeDevice,
    dtype: DType,
    /// Bytes a second of a copy, read and written.
    copy: f64,
    /// Operations a second of a large matrix product.
    product: f64,
    failed: bool,
}

/// What a kernel at least reads and writes, and computes.
struct Least {
    bytes: f64,
    operations: f64,
}

impl Card {
    fn tensor(&self, shape: &[usize], salt: u64) -> CubeTensor {
        let mut values = vec![0f32; shape.iter().product()];
        random::fill_normal(salt, 7, 0, 1.0, &mut values);
        let x = B::float_from_data(TensorData::new(values, shape.to_vec()), &self.device);
        B::float_cast(x, FloatDType::from(self.dtype))
    }

    fn synchronised(&self) {
        if let Err(e) = B::sync(&self.device) {
            panic!("the card: {e:?}");
        }
    }

    /// The median time of one call, in seconds.
    fn time(&self, mut call: impl FnMut()) -> f64 {
        call();
        self.synchronised();
        let mut times: Vec<f64> = (0..LOOKS)
            .map(|_| {
                let start = Instant::now();
                (0..LAUNCHES).for_each(|_| call());
                self.synchronised();
                start.elapsed().as_secs_f64() / LAUNCHES as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[LOOKS / 2]
    }

    fn measure(&self, name: &str, least: Least, call: impl FnMut()) {
        let time = self.time(call);
        let (by_memory, by_products) = (least.bytes / self.copy, least.operations / self.product);
        let (bound, part) = match by_products > by_memory {
            true => ("products", by_products / time),
            false => ("memory", by_memory / time),
        };
        println!(
            "{name:<28} {:>9.1} us {:>8.0} GB/s {:>8.1} TFLOP/s {:>6.0} % of {bound}",
            time * 1e6,
            least.bytes / time / 1e9,
            least.operations / time / 1e12,
            part * 100.0
        );
        eprintln!(
            "{{\"kernel\": \"{name}\", \"seconds\": {time:e}, \"part\": {part:.4}, \"bound\": \"{bound}\"}}"
        );
    }

    /// An operation's output and gradients in f64 on the CPU and fused on the card.
    fn compare(
        &mut self,
        name: &str,
        shapes: &[[usize; 3]],
        op: impl Fn(&[Tensor<3>], Kernels) -> Tensor<3>,
    ) {
        let run = |device: Device, dtype: DType, kernels: Kernels| -> Vec<Vec<f64>> {
            let device = device.autodiff();
            let tensor = |shape: [usize; 3], salt: u64| -> Tensor<3> {
                let mut values = vec![0f32; shape.iter().product()];
                random::fill_normal(salt, 7, 0, 1.0, &mut values);
                // The same values on both: rounded to the card's type first.
                let data = TensorData::new(values, shape).convert_dtype(self.dtype);
                Tensor::from_data(data.convert_dtype(dtype), (&device, dtype))
            };
            let inputs: Vec<Tensor<3>> = (1..)
                .zip(shapes)
                .map(|(salt, shape)| tensor(*shape, salt).require_grad())
                .collect();
            let y = op(&inputs, kernels);
            let weighted = y.clone() * tensor(y.dims(), 99);
            let gradients = weighted.sum().backward();
            let host = |x: Tensor<3>| x.into_data().iter::<f64>().collect::<Vec<_>>();
            let mut all = vec![host(y.inner())];
            all.extend(
                inputs
                    .iter()
                    .filter_map(|x| Some(host(x.grad(&gradients)?))),
            );
            all
        };
        let want = run(Device::flex(), DType::F64, Kernels::Local);
        let got = run(self.tensors(), self.dtype, Kernels::Fused);
        self.report(name, &got, &want);
    }

    /// The device for whole tensors.
    fn tensors(&self) -> Device {
        Device::new(self.device.clone())
    }

    fn report(&mut self, name: &str, got: &[Vec<f64>], want: &[Vec<f64>]) {
        let bound = if self.dtype == DType::F32 { 1e-5 } else { 1e-2 };
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let errors = got.iter().zip(want).map(|(got, want)| {
            let difference = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
            difference / norm(&mut want.iter().copied())
        });
        let worst = errors.fold(0.0, f64::max);
        let right = worst < bound;
        self.failed |= !right;
        println!(
            "{name:<28} {:?} {worst:.1e} off, at most {bound:.0e}: {}",
            self.dtype,
            if right { "right" } else { "WRONG" }
        );
    }
}

/// Losses and both gradients of an output layer: of values in `rounded`, computed in `dtype`.
fn head_losses<B: Fused>(device: &B::Device, rounded: DType, dtype: DType) -> Vec<Vec<f64>> {
    let tensor = |shape: [usize; 2], salt| {
        let mut values = vec![0f32; shape[0] * shape[1]];
        random::fill_normal(salt, 7, 0, 0.5, &mut values);
        let data = TensorData::new(values, shape).convert_dtype(rounded);
        B::float_from_data(data.convert_dtype(dtype), device)
    };
    let targets: Vec<Option<usize>> = (0..70).map(|i| Some(i * 7 % 300)).collect();
    let d_losses: Vec<f32> = (0..70).map(|i| [0.5, 0.25, -1.5][i % 3]).collect();
    let shard = HeadShard {
        targets: &targets,
        known: 300,
        d_losses: &d_losses,
        tokens_at_once: 32,
        reduce: None,
    };
    let loss = B::fused_head_loss(tensor([70, 64], 1), tensor([320, 64], 2), &shard, true);
    let (dx, dw) = loss.gradients.expect("asked for");
    let host = |x: FloatTensor<B>| -> Vec<f64> {
        let data = try_read_sync(B::float_into_data(x)).expect("a device that can be waited for");
        data.expect("values").iter::<f64>().collect()
    };
    [loss.losses, dx, dw].map(host).into()
}

/// Gradients in `dtype` gathered, a step of AdamW with them, the weights scattered, and the norm.
fn flat_buffers(device: &Device, dtype: DType) -> Vec<Vec<f64>> {
    let lengths = [1000, 1, 4097, 33, 64, 5000];
    let all = lengths.iter().sum::<usize>();
    let tensor = |len: usize, salt, dtype| {
        let mut values = vec![0f32; len];
        random::fill_normal(salt, 7, 0, 1.0, &mut values);
        let data = TensorData::new(values, [len]).convert_dtype(dtype);
        Tensor::<1>::from_data(data, (device, dtype))
    };
    let mut ranges = Vec::new();
    for len in lengths {
        let start = ranges
            .last()
            .map_or(0, |range: &std::ops::Range<usize>| range.end);
        ranges.push(start..start + len);
    }
    let parts = ranges.iter().zip(1..).map(|(range, salt)| Part {
        tensor: tensor(range.len(), salt, dtype),
        start: range.start,
    });
    let parts = parts.collect();
    let sums = flat::gather(tensor(all, 20, DType::F32), parts);
    let factors = AdamWFactors {
        grad_scale: 0.5,
        beta1: [0.9, 0.1],
        beta2: [0.95, 0.05],
        step_size: 0.1,
        second_correction: 0.3,
        eps: 1e-8,
        keep: 0.9,
    };
    let decayed = Ranges::ascending([0..1000, 1001..5098]);
    let [values, first, second] = [21, 22, 23].map(|salt| tensor(all, salt, DType::F32));
    let state = [values, first, second.abs()];
    let (state, weights) = flat::adamw(state, sums.clone(), &factors, &decayed, dtype);
    let mut tensors = flat::scatter(weights, &ranges);
    tensors.extend(state);
    tensors.push(flat::square_sum(sums.clone()));
    tensors.push(sums);
    let host = |x: Tensor<1>| x.into_data().iter::<f64>().collect();
    tensors.into_iter().map(host).collect()
}

fn vector(x: &Tensor<3>) -> Tensor<1> {
    let n = x.dims()[2];
    x.clone().reshape([n])
}

fn attention(r: usize, d: usize) -> AttentionOptions {
    AttentionOptions {
        queries_per_group: r,
        head_width: d,
        scale: 1.0 / (d as f64).sqrt(),
        dropout: None,
        recompute: false,
    }
}

fn check(card: &mut Card) {
    let shape = [67, 2, 192];
    let of_row = [1, 1, shape[2]];
    card.compare("layer_norm", &[shape, of_row, of_row], |x, kernels| {
        layer_norm(x[0].clone(), vector(&x[1]), vector(&x[2]), 1e-5, kernels)
    });
    card.compare("rms_norm", &[shape, of_row], |x, kernels| {
        rms_norm(x[0].clone(), vector(&x[1]), 1e-5, kernels)
    });
    let both = |(sum, y): (Tensor<3>, Tensor<3>)| Tensor::cat(vec![sum, y], 2);
    card.compare(
        "added layer_norm",
        &[shape, shape, of_row, of_row],
        |x, kernels| {
            let (weight, bias) = (vector(&x[2]), vector(&x[3]));
            let [x, residual] = [x[0].clone(), x[1].clone()];
            both(added_layer_norm(x, residual, weight, bias, 1e-5, kernels))
        },
    );
    card.compare("added rms_norm", &[shape, shape, of_row], |x, kernels| {
        let weight = vector(&x[2]);
        let [x, residual] = [x[0].clone(), x[1].clone()];
        both(added_rms_norm(x, residual, weight, 1e-5, kernels))
    });
    for how in [GeluApproximation::Tanh, GeluApproximation::Erf] {
        card.compare(
            &format!("bias_gelu {how:?}"),
            &[shape, of_row],
            |x, kernels| gelu(x[0].clone(), Some(vector(&x[1])), how, kernels),
        );
    }
    let keep = HiddenKeep {
        keep: Keep::new(0.1, 1, 2),
        first_sample: 4,
        samples: shape[1],
        first_position: 0,
        sequence: shape[0],
    };
    card.compare("dropout_add", &[shape, shape], |x, kernels| {
        dropout_add(x[0].clone(), x[1].clone(), keep, kernels)
    });
    let table = RotaryTable::new(&[0.5; 16], shape[0]);
    let heads = Heads {
        width: 32,
        turned: 4,
    };
    card.compare("rotary", &[shape], |x, kernels| {
        rotary_embedding(x[0].clone(), heads, &table, kernels)
    });
    let rows = [1, 50, 192];
    card.compare("embedding", &[rows], |x, kernels| {
        let taken: Vec<i32> = (0..134).map(|i| i * 7 % 40).collect();
        let taken = TensorData::new(taken, [134]);
        let taken = Tensor::<1, Int>::from_data(taken, &x[0].device());
        let taken = embedding_rows(x[0].clone().reshape([50, 192]), taken, kernels);
        taken.reshape([67, 2, 192])
    });
    let head = head_losses::<B>(&card.device, card.dtype, card.dtype);
    let exact = head_losses::<Flex>(&Default::default(), card.dtype, DType::F32);
    card.report("output layer and loss", &head, &exact);
    let flat = flat_buffers(&card.tensors(), card.dtype);
    let exact = flat_buffers(&Device::flex(), card.dtype);
    card.report("flat buffers", &flat, &exact);
    card.compare("swiglu", &[shape], |x, kernels| {
        swiglu(x[0].clone(), kernels)
    });
    for (d, r) in [(64, 1), (64, 3), (96, 1), (128, 2)] {
        let options = attention(r, d);
        card.compare(
            &format!("attention d {d} r {r}"),
            &[[200, 2, (r + 2) * d]],
            |x, kernels| causal_attention(x[0].clone(), options, kernels),
        );
    }
}

fn measure(card: &Card, small: bool) {
    let size = card.dtype.size() as f64;
    let (s, b, h) = if small { (64, 1, 256) } else { (4096, 4, 4096) };
    let elements = (s * b * h) as f64;
    let passes = |count: f64| Least {
        bytes: count * elements * size,
        operations: 0.0,
    };
    let x = card.tensor(&[s, b, h], 1);
    let dy = card.tensor(&[s, b, h], 2);
    let (weight, bias) = (card.tensor(&[h], 3), card.tensor(&[h], 4));
    card.measure("added layer_norm forward", passes(4.0), || {
        let (weight, bias) = (weight.clone(), Some(bias.clone()));
        drop(B::fused_added_norm(
            x.clone(),
            dy.clone(),
            weight,
            bias,
            1e-5,
        ));
    });
    card.measure("layer_norm forward", passes(2.0), || {
        drop(B::fused_layer_norm(
            x.clone(),
            weight.clone(),
            bias.clone(),
            1e-5,
        ));
    });
    let (_, stats) = B::fused_layer_norm(x.clone(), weight.clone(), bias.clone(), 1e-5);
    let backward = |so_far| {
        let (x, stats, weight) = (x.clone(), stats.clone(), weight.clone());
        let [dx, ..] = B::fused_layer_norm_backward(x, stats, weight, dy.clone(), so_far);
        dx
    };
    card.measure("layer_norm backward", passes(3.0), || drop(backward(None)));
    let mut d_sum = Some(x.copy());
    card.measure("added layer_norm backward", passes(4.0), || {
        d_sum = Some(backward(d_sum.take()));
    });
    drop(d_sum);
    card.measure("rms_norm forward", passes(2.0), || {
        drop(B::fused_rms_norm(x.clone(), weight.clone(), 1e-5));
    });
    let (_, scale) = B::fused_rms_norm(x.clone(), weight.clone(), 1e-5);
    card.measure("rms_norm backward", passes(3.0), || {
        drop(B::fused_rms_norm_backward(
            x.clone(),
            scale.clone(),
            weight.clone(),
            dy.clone(),
            None,
        ));
    });
    let how = GeluApproximation::Tanh;
    card.measure("bias_gelu forward", passes(2.0), || {
        drop(B::fused_gelu(x.clone(), Some(bias.clone()), how));
    });
    card.measure("bias_gelu backward", passes(3.0), || {
        drop(B::fused_gelu_backward(
            x.clone(),
            Some(bias.clone()),
            how,
            dy.clone(),
        ));
    });
    card.measure("swiglu forward", passes(1.5), || {
        drop(B::fused_swiglu(x.clone()))
    });
    let half = card.tensor(&[s, b, h / 2], 5);
    card.measure("swiglu backward", passes(2.5), || {
        drop(B::fused_swiglu_backward(x.clone(), half.clone()));
    });
    let keep = HiddenKeep {
        keep: Keep::new(0.1, 1, 2),
        first_sample: 0,
        samples: b,
        first_position: 0,
        sequence: s,
    };
    card.measure("dropout_add", passes(3.0), || {
        drop(B::fused_dropout_add(x.clone(), Some(dy.clone()), &keep));
    });
    let table = RotaryTable::new(&[0.5; 32], s);
    let heads = Heads {
        width: 64,
        turned: h / 64,
    };
    let mut turned = Some(x.copy());
    card.measure("rotary in place", passes(2.0), || {
        turned = turned
            .take()
            .map(|x| B::fused_rotary(x, heads, &table, false));
    });
    if card.dtype == DType::BF16 {
        let n = if small { 1 << 16 } else { 1 << 28 };
        let like = B::float_zeros([n].into(), &card.device, FloatDType::F32);
        let mut state = Some([like.copy(), like.copy(), like.copy()]);
        let least = Least {
            bytes: 30.0 * n as f64,
            operations: 0.0,
        };
        let factors = AdamWFactors {
            grad_scale: 1.0,
            beta1: [0.9, 0.1],
            beta2: [0.95, 0.05],
            step_size: 1e-3,
            second_correction: 1.0,
            eps: 1e-8,
            keep: 1.0,
        };
        let decayed = Ranges::ascending([0..n / 2, n / 2 + 1..n]);
        card.measure("adamw", least, || {
            let stepped = state
                .take()
                .map(|state| B::fused_adamw(state, like.clone(), &factors, &decayed, DType::BF16));
            state = stepped.map(|(state, _)| state);
        });
        // The gradients of 24 layers, each of a large matrix and a small vector many times, and weights for them.
        let large = if small { 1 << 10 } else { 1 << 21 };
        let lengths: Vec<usize> = (0..192).map(|i| [large, 2048][i % 2]).collect();
        let all: usize = lengths.iter().sum();
        let starts = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end - len)
        });
        let ranges: Vec<_> = starts.zip(&lengths).map(|(at, len)| at..at + len).collect();
        let zeros = |n| B::float_zeros([n].into(), &card.device, FloatDType::BF16);
        let parts: Vec<_> = ranges
            .iter()
            .map(|range| Part {
                tensor: zeros(range.len()),
                start: range.start,
            })
            .collect();
        let passes = |bytes: f64| Least {
            bytes: bytes * all as f64,
            operations: 0.0,
        };
        let mut sums = Some(B::float_zeros([all].into(), &card.device, FloatDType::F32));
        card.measure("gather", passes(10.0), || {
            sums = sums.take().map(|sums| B::fused_gather(sums, parts.clone()));
        });
        let weights = zeros(all);
        card.measure("scatter", passes(4.0), || {
            drop(B::fused_scatter(weights.clone(), &ranges));
        });
    }
    // A vocabulary of GPT-2's size; the two products are the matrix library's.
    let (tokens, vocab, hidden) = if small {
        (64, 512, 64)
    } else {
        (8192, 50304, 1024)
    };
    let (states, words) = (
        card.tensor(&[tokens, hidden], 6),
        card.tensor(&[vocab, hidden], 7),
    );
    let targets: Vec<Option<usize>> = (0..tokens).map(|i| Some(i * 7919 % vocab)).collect();
    let d_losses = vec![1.0 / tokens as f32; tokens];
    let shard = HeadShard {
        targets: &targets,
        known: vocab,
        d_losses: &d_losses,
        tokens_at_once: tokens,
        reduce: None,
    };
    let least = Least {
        bytes: 4.0 * (tokens * vocab) as f64 * size,
        operations: 6.0 * (tokens * vocab * hidden) as f64,
    };
    card.measure("output layer and loss", least, || {
        drop(B::fused_head_loss(
            states.clone(),
            words.clone(),
            &shard,
            true,
        ));
    });
    for (d, heads) in [(64, 32), (128, 16)] {
        let (s, n) = if small { (128, 1) } else { (4096, 4 * heads) };
        let options = attention(1, d);
        let qkv = card.tensor(&[s, n, 3 * d], 8);
        let d_out = card.tensor(&[s, n, d], 9);
        // Causal: half of the scores.
        let product = (n * s * s * d) as f64;
        let values = (s * n * d) as f64 * size;
        let least = |products: f64, passes: f64| Least {
            bytes: passes * values,
            operations: products * product,
        };
        card.measure(&format!("attention forward d {d}"), least(2.0, 4.0), || {
            drop(B::fused_attention(qkv.clone(), &options));
        });
        let (out, lse) = B::fused_attention(qkv.clone(), &options);
        card.measure(
            &format!("attention backward d {d}"),
            least(5.0, 8.0),
            || {
                let (out, lse) = (out.clone(), lse.clone());
                drop(B::fused_attention_backward(
                    qkv.clone(),
                    out,
                    lse,
                    &options,
                    d_out.clone(),
                ));
            },
        );
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let device = match arguments.first().map(String::as_str) {
        #[cfg(feature = "cuda")]
        Some("cuda") => CubeDevice::Cuda(Default::default()),
        #[cfg(feature = "wgpu")]
        Some("wgpu") => CubeDevice::Wgpu(Default::default()),
        _ => {
            eprintln!("usage: gpu_check cuda|wgpu [small], of those that the build has");
            return ExitCode::from(2);
        }
    };
    let small = arguments.get(1).is_some_and(|size| size == "small");
    let mut failed = false;
    for dtype in [DType::BF16, DType::F32] {
        if !B::fuses(&device, dtype) {
            println!("{dtype:?}: not on this device");
            continue;
        }
        let mut card = Card {
            device: device.clone(),
            dtype,
            copy: 1.0,
            product: 1.0,
            failed: false,
        };
        check(&mut card);
        failed |= card.failed;
        let n = if small { 256 } else { 8192 };
        let (a, b) = (card.tensor(&[n, n], 1), card.tensor(&[n, n], 2));
        let copied = card.time(|| drop(a.copy()));
        card.copy = 2.0 * (n * n * dtype.size()) as f64 / copied;
        let multiplied = card.time(|| drop(B::float_matmul(a.clone(), b.clone())));
        card.product = 2.0 * (n * n * n) as f64 / multiplied;
        println!(
            "{dtype:?}: a copy moves {:.0} GB/s, a product of {n} makes {:.1} TFLOP/s",
            card.copy / 1e9,
            card.product / 1e12
        );
        measure(&card, small);
    }
    ExitCode::from(u8::from(failed))
}
