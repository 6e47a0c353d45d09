//! AdamW (Loshchilov & Hutter 2019) and SGD over flat f32 buffers, where they lie.

use crate::checkpoint::Kind;
use crate::grads::Owned;
use crate::precision::Precision;
use crate::shard::{FlatBuffer, ParamRecord, upload};
use burn::tensor::{Device, Slice, Tensor};
use burn_megatron_kernels::adamw::{AdamWFactors, update};
use burn_megatron_kernels::flat::{self, Ranges};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Elements updated by one task.
const CHUNK: usize = 1 << 14;

/// How parameters are updated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    AdamW(AdamWConfig),
    Sgd(SgdConfig),
}

/// Hyper-parameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    pub sgd_momentum: f64,
}

impl Default for SgdConfig {
    /// Megatron's default.
    fn default() -> Self {
        SgdConfig { sgd_momentum: 0.9 }
    }
}

impl Rule {
    /// What it keeps of each element.
    pub fn state(self) -> &'static [Kind] {
        match self {
            Rule::AdamW(_) => &[Kind::ExpAvg, Kind::ExpAvgSq],
            Rule::Sgd(_) => &[Kind::MomentumBuffer],
        }
    }
}

/// Hyper-parameters of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_eps: f64,
}

impl Default for AdamWConfig {
    /// Megatron's defaults.
    fn default() -> Self {
        AdamWConfig {
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
        }
    }
}

/// The optimizer's state of the elements that a rank owns, packed.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    runs: Vec<DecayRun>,
    /// The owned elements in the flat buffers.
    pieces: Vec<Range<usize>>,
    /// A buffer for each of the rule's kinds of state.
    state: Vec<FlatBuffer>,
    steps: u32,
}

/// What changes from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFactors {
    /// Gradients are multiplied by it.
    pub grad_scale: f64,
    /// The learning rate.
    pub lr: f64,
    pub weight_decay: f64,
}

/// Consecutive elements with the same weight decay.
#[derive(Debug)]
struct DecayRun {
    flat: Range<usize>,
    packed: Range<usize>,
    decays: bool,
}

impl Optimizer {
    /// State of zeros for what a rank owns of `params`, where `device` computes.
    pub fn new(rule: Rule, params: &[ParamRecord], owned: &Owned, device: &Device) -> Self {
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
        let zeros = |_| FlatBuffer::zeros(owned.len(), device);
        let state = rule.state().iter().map(zeros);
        Optimizer {
            rule,
            runs,
            pieces: owned.pieces().to_vec(),
            state: state.collect(),
            steps: 0,
        }
    }

    /// Updates so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Its state, packed.
    pub fn state(&self) -> impl Iterator<Item = (Kind, Cow<'_, [f32]>)> {
        let buffers = self.state.iter().map(FlatBuffer::host);
        self.rule.state().iter().copied().zip(buffers)
    }

    /// Its state to be filled, as of so many updates.
    pub fn restore(&mut self, steps: u32) -> impl Iterator<Item = (Kind, &mut FlatBuffer)> {
        self.steps = steps;
        self.rule.state().iter().copied().zip(&mut self.state)
    }

    /// Updates `values`, packed, with the flat `gradients` times `grad_scale`. On a device it returns the values
    /// rounded to `precision`, packed there as well.
    pub fn step(
        &mut self,
        values: &mut FlatBuffer,
        gradients: &FlatBuffer,
        step: StepFactors,
        precision: Precision,
    ) -> Option<Tensor<1>> {
        self.steps += 1;
        match (std::mem::take(values), gradients) {
            (FlatBuffer::Host(mut host), gradients) => {
                self.step_on_host(&mut host, &gradients.host(), step);
                *values = FlatBuffer::Host(host);
                None
            }
            (FlatBuffer::Device(held), gradients) => {
                let gradients = match gradients.slices(&self.pieces) {
                    FlatBuffer::Device(gradients) => gradients,
                    FlatBuffer::Host(gradients) => upload(gradients, &held.device()),
                };
                let (held, rounded) = self.step_on_device(held, gradients, step, precision);
                *values = FlatBuffer::Device(held);
                Some(rounded)
            }
        }
    }

    /// Values and state are taken and given back, so that they are changed in place.
    fn step_on_device(
        &mut self,
        values: Tensor<1>,
        gradients: Tensor<1>,
        step: StepFactors,
        precision: Precision,
    ) -> (Tensor<1>, Tensor<1>) {
        let mut state = self.state.drain(..).map(|buffer| match buffer {
            FlatBuffer::Device(buffer) => buffer,
            FlatBuffer::Host(_) => unreachable!("state lies where the values do"),
        });
        let decayed = self.runs.iter().filter(|run| run.decays);
        let decayed = Ranges::ascending(decayed.map(|run| run.packed.clone()));
        let mut next = || state.next().expect("a rule has its kinds of state");
        let (values, rounded, new) = match self.rule {
            Rule::AdamW(config) => {
                let factors = config.factors(self.steps, step, step.weight_decay);
                let state = [values, next(), next()];
                let dtype = precision.dtype();
                let ([values, first, second], rounded) =
                    flat::adamw(state, gradients, &factors, &decayed, dtype);
                (values, rounded, vec![first, second])
            }
            Rule::Sgd(config) => {
                let mut gradients = gradients * step.grad_scale as f32;
                for range in decayed.iter() {
                    let slice = [Slice::from(range)];
                    let decay = values.clone().slice(slice) * step.weight_decay as f32;
                    let sum = gradients.clone().slice(slice) + decay;
                    gradients = gradients.slice_assign(slice, sum);
                }
                let buffer = next() * config.sgd_momentum as f32 + gradients;
                let values = values - buffer.clone() * step.lr as f32;
                let rounded = values.clone().cast(precision.float_dtype());
                (values, rounded, vec![buffer])
            }
        };
        drop(state);
        self.state.extend(new.into_iter().map(FlatBuffer::Device));
        (values, rounded)
    }

    fn step_on_host(&mut self, values: &mut [f32], gradients: &[f32], step: StepFactors) {
        let StepFactors {
            grad_scale,
            lr,
            weight_decay,
        } = step;
        for run in &self.runs {
            let decay = if run.decays { weight_decay } else { 0.0 };
            let (flat, packed) = (run.flat.clone(), run.packed.clone());
            let (values, gradients) = (&mut values[packed.clone()], &gradients[flat]);
            match (self.rule, &mut self.state[..]) {
                (Rule::AdamW(config), [FlatBuffer::Host(first), FlatBuffer::Host(second)]) => {
                    let factors = config.factors(self.steps, step, decay);
                    let (first, second) = (&mut first[packed.clone()], &mut second[packed]);
                    update(values, gradients, first, second, factors);
                }
                (Rule::Sgd(config), [FlatBuffer::Host(buffer)]) => {
                    let values = values.par_chunks_mut(CHUNK);
                    let values = values.zip(gradients.par_chunks(CHUNK));
                    let momentum = config.sgd_momentum as f32;
                    let (scale, lr, decay) = (grad_scale as f32, lr as f32, decay as f32);
                    values.zip(buffer[packed].par_chunks_mut(CHUNK)).for_each(
                        |((values, gradients), buffer)| {
                            let all = values.iter_mut().zip(gradients).zip(buffer);
                            for ((value, gradient), buffer) in all {
                                *buffer = momentum * *buffer + (gradient * scale + decay * *value);
                                *value -= lr * *buffer;
                            }
                        },
                    );
                }
                _ => unreachable!("a rule has its kinds of state"),
            }
        }
    }
}

impl AdamWConfig {
    /// Of the elements of a run, in one step.
    fn factors(&self, steps: u32, step: StepFactors, decay: f64) -> AdamWFactors {
        let StepFactors { grad_scale, lr, .. } = step;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(steps));
        AdamWFactors {
            grad_scale: grad_scale as f32,
            beta1: [self.adam_beta1 as f32, (1.0 - self.adam_beta1) as f32],
            beta2: [self.adam_beta2 as f32, (1.0 - self.adam_beta2) as f32],
            step_size: (lr / correction(self.adam_beta1)) as f32,
            second_correction: correction(self.adam_beta2).sqrt() as f32,
            eps: self.adam_eps as f32,
            keep: (1.0 - lr * decay) as f32,
        }
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

    /// Where the values lie: on the host, and in a tensor.
    fn places(values: &[f32]) -> [FlatBuffer; 2] {
        let tensor = upload(values.to_vec(), &Device::flex());
        [
            FlatBuffer::Host(values.to_vec()),
            FlatBuffer::Device(tensor),
        ]
    }

    /// With state in the same place.
    fn optimizer(rule: Rule, params: &[ParamRecord], like: &FlatBuffer) -> Optimizer {
        let owned = Owned::all(params, like.len());
        let mut made = Optimizer::new(rule, params, &owned, &Device::flex());
        for state in &mut made.state {
            *state = like.clone();
            state.clear();
        }
        made
    }

    fn factors(grad_scale: f64, lr: f64, weight_decay: f64) -> StepFactors {
        StepFactors {
            grad_scale,
            lr,
            weight_decay,
        }
    }

    #[test]
    fn two_steps_equal_the_formula_in_f64() {
        let rule = Rule::AdamW(AdamWConfig::default());
        let params = [param(0..2, true), param(2..3, false)];
        for mut values in places(&[1.0, -2.0, 3.0]) {
            let mut adam = optimizer(rule, &params, &values);
            let mut want = [1.0f64, -2.0, 3.0];
            let (mut m, mut v) = ([0f64; 3], [0f64; 3]);
            for (step, lr) in [(1, 0.1f64), (2, 0.05)] {
                let grads = [0.5f32, -4.0, 1e-3 * step as f32];
                let gradients = FlatBuffer::Host(grads.to_vec());
                let step_factors = factors(0.5, lr, 0.1);
                let rounded = adam.step(&mut values, &gradients, step_factors, Precision::Fp32);
                for i in 0..3 {
                    let g = f64::from(grads[i]) * 0.5;
                    m[i] = 0.9 * m[i] + 0.1 * g;
                    v[i] = 0.999 * v[i] + 0.001 * g * g;
                    let decay = if i < 2 { 0.1 } else { 0.0 };
                    let (c1, c2) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
                    want[i] *= 1.0 - lr * decay;
                    want[i] -= lr * (m[i] / c1) / ((v[i] / c2).sqrt() + 1e-8);
                }
                let rounded = rounded.map(FlatBuffer::Device);
                assert_eq!(rounded.as_ref().unwrap_or(&values).host(), values.host());
            }
            for (value, want) in values.host().iter().zip(want) {
                let difference = (f64::from(*value) - want).abs();
                assert!(difference < 5e-7, "{value} is not {want}: {difference:e}");
            }
        }
    }

    /// PyTorch's SGD: the decay is part of the gradient, and the buffer starts with the first one.
    #[test]
    fn sgd_has_momentum() {
        let rule = Rule::Sgd(SgdConfig { sgd_momentum: 0.5 });
        let params = [param(0..1, true), param(1..2, false)];
        for mut values in places(&[1.0, 1.0]) {
            let mut sgd = optimizer(rule, &params, &values);
            let gradients = FlatBuffer::Host(vec![4.0, 4.0]);
            sgd.step(
                &mut values,
                &gradients,
                factors(0.5, 0.1, 0.25),
                Precision::Fp32,
            );
            let first = [1.0 - 0.1 * 2.25, 1.0 - 0.1 * 2.0];
            assert_eq!(*values.host(), first);
            let none = FlatBuffer::Host(vec![0.0; 2]);
            sgd.step(&mut values, &none, factors(0.5, 0.1, 0.0), Precision::Fp32);
            assert_eq!(*values.host(), [first[0] - 0.1 * 1.125, first[1] - 0.1]);
        }
    }
}
