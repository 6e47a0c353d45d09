//! AdamW (Loshchilov & Hutter 2019) over flat f32 buffers.

use crate::grads::Owned;
use crate::shard::ParamRecord;
use rayon::prelude::*;
use std::ops::Range;

/// Elements updated by one task.
const CHUNK: usize = 1 << 14;

/// Hyper-parameters of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    pub weight_decay: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_eps: f64,
}

impl Default for AdamWConfig {
    /// Megatron's defaults.
    fn default() -> Self {
        AdamWConfig {
            weight_decay: 0.01,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
        }
    }
}

/// Both moments of the elements that a rank owns, packed.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    runs: Vec<DecayRun>,
    first: Vec<f32>,
    second: Vec<f32>,
    steps: u32,
}

/// Consecutive elements with the same weight decay.
#[derive(Debug)]
struct DecayRun {
    flat: Range<usize>,
    packed: Range<usize>,
    decays: bool,
}

/// One step's factors, the same for every element of a run.
#[derive(Clone, Copy)]
struct Factors {
    grad_scale: f32,
    /// β₁, and 1 - β₁ as rounded once.
    beta1: [f32; 2],
    beta2: [f32; 2],
    step_size: f32,
    second_correction: f32,
    eps: f32,
    keep: f32,
}

impl AdamW {
    /// Moments of zero for what a rank owns of `params`.
    pub fn new(config: AdamWConfig, params: &[ParamRecord], owned: &Owned) -> Self {
        let mut runs: Vec<DecayRun> = Vec::new();
        for part in owned.parts() {
            let decays = params[part.param].decays;
            match runs.last_mut() {
                Some(run)
                    if run.decays == decays
                        && run.flat.end == part.flat.start
                        && run.packed.end == part.packed.start =>
                {
                    run.flat.end = part.flat.end;
                    run.packed.end = part.packed.end;
                }
                _ => runs.push(DecayRun {
                    flat: part.flat.clone(),
                    packed: part.packed.clone(),
                    decays,
                }),
            }
        }
        AdamW {
            config,
            runs,
            first: vec![0.0; owned.len()],
            second: vec![0.0; owned.len()],
            steps: 0,
        }
    }

    /// Updates so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Both moments, packed: of the gradients, and of their squares.
    pub fn moments(&self) -> (&[f32], &[f32]) {
        (&self.first, &self.second)
    }

    /// Both moments to be filled, as of so many updates.
    pub fn restore(&mut self, steps: u32) -> (&mut [f32], &mut [f32]) {
        self.steps = steps;
        (&mut self.first, &mut self.second)
    }

    /// Updates `values`, packed, with the flat `gradients` times `grad_scale`. The arithmetic is that of
    /// PyTorch's `AdamW`: decoupled decay first, then the step with both moments corrected for their bias.
    pub fn step(&mut self, values: &mut [f32], gradients: &[f32], grad_scale: f64, lr: f64) {
        self.steps += 1;
        let config = self.config;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(self.steps));
        for DecayRun {
            flat,
            packed,
            decays,
        } in &self.runs
        {
            let decay = if *decays { config.weight_decay } else { 0.0 };
            let factors = Factors {
                grad_scale: grad_scale as f32,
                beta1: [config.adam_beta1 as f32, (1.0 - config.adam_beta1) as f32],
                beta2: [config.adam_beta2 as f32, (1.0 - config.adam_beta2) as f32],
                step_size: (lr / correction(config.adam_beta1)) as f32,
                second_correction: correction(config.adam_beta2).sqrt() as f32,
                eps: config.adam_eps as f32,
                keep: (1.0 - lr * decay) as f32,
            };
            (values[packed.clone()].par_chunks_mut(CHUNK))
                .zip(gradients[flat.clone()].par_chunks(CHUNK))
                .zip(self.first[packed.clone()].par_chunks_mut(CHUNK))
                .zip(self.second[packed.clone()].par_chunks_mut(CHUNK))
                .for_each(|(((values, gradients), first), second)| {
                    update(values, gradients, first, second, factors);
                });
        }
    }
}

fn update(values: &mut [f32], grads: &[f32], first: &mut [f32], second: &mut [f32], f: Factors) {
    let moments = first.iter_mut().zip(second);
    for ((value, grad), (first, second)) in values.iter_mut().zip(grads).zip(moments) {
        let grad = grad * f.grad_scale;
        *first = f.beta1[0] * *first + f.beta1[1] * grad;
        *second = f.beta2[0] * *second + f.beta2[1] * (grad * grad);
        let denominator = second.sqrt() / f.second_correction + f.eps;
        *value = *value * f.keep - f.step_size * (*first / denominator);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{Init, ParamSpec};
    use burn::module::ParamId;

    fn param(range: Range<usize>, decays: bool) -> ParamRecord {
        ParamRecord {
            id: ParamId::new(),
            name: "p".into(),
            spec: ParamSpec::replicated([range.len()], Init::Zeros),
            range,
            decays,
        }
    }

    #[test]
    fn two_steps_equal_the_formula_in_f64() {
        let config = AdamWConfig {
            weight_decay: 0.1,
            ..AdamWConfig::default()
        };
        let params = [param(0..2, true), param(2..3, false)];
        let mut adam = AdamW::new(config, &params, &Owned::all(&params, 3));
        let mut values = [1.0f32, -2.0, 3.0];
        let mut want = [1.0f64, -2.0, 3.0];
        let (mut m, mut v) = ([0f64; 3], [0f64; 3]);
        for (step, lr) in [(1, 0.1f64), (2, 0.05)] {
            let grads = [0.5f32, -4.0, 1e-3 * step as f32];
            adam.step(&mut values, &grads, 0.5, lr);
            for i in 0..3 {
                let g = f64::from(grads[i]) * 0.5;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                let decay = if i < 2 { 0.1 } else { 0.0 };
                let (c1, c2) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
                want[i] *= 1.0 - lr * decay;
                want[i] -= lr * (m[i] / c1) / ((v[i] / c2).sqrt() + 1e-8);
            }
        }
        for (value, want) in values.iter().zip(want) {
            let difference = (f64::from(*value) - want).abs();
            assert!(difference < 5e-7, "{value} is not {want}: {difference:e}");
        }
    }
}
