//! AdamW (Loshchilov & Hutter 2019) and SGD over flat f32 buffers.

use crate::checkpoint::Kind;
use crate::grads::Owned;
use crate::shard::ParamRecord;
use burn_megatron_kernels::adamw::{AdamWFactors, update};
use rayon::prelude::*;
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
    /// A buffer for each of the rule's kinds of state.
    state: Vec<Vec<f32>>,
    steps: u32,
}

/// Consecutive elements with the same weight decay.
#[derive(Debug)]
struct DecayRun {
    flat: Range<usize>,
    packed: Range<usize>,
    decays: bool,
}

impl Optimizer {
    /// State of zeros for what a rank owns of `params`.
    pub fn new(rule: Rule, params: &[ParamRecord], owned: &Owned) -> Self {
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
        let state = rule.state().iter().map(|_| vec![0.0; owned.len()]);
        Optimizer {
            rule,
            runs,
            state: state.collect(),
            steps: 0,
        }
    }

    /// Updates so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Its state, packed.
    pub fn state(&self) -> impl Iterator<Item = (Kind, &[f32])> {
        let buffers = self.state.iter().map(Vec::as_slice);
        self.rule.state().iter().copied().zip(buffers)
    }

    /// Its state to be filled, as of so many updates.
    pub fn restore(&mut self, steps: u32) -> impl Iterator<Item = (Kind, &mut [f32])> {
        self.steps = steps;
        let buffers = self.state.iter_mut().map(Vec::as_mut_slice);
        self.rule.state().iter().copied().zip(buffers)
    }

    /// Updates `values`, packed, with the flat `gradients` times `grad_scale`.
    pub fn step(
        &mut self,
        values: &mut [f32],
        gradients: &[f32],
        grad_scale: f64,
        lr: f64,
        weight_decay: f64,
    ) {
        self.steps += 1;
        for run in &self.runs {
            let decay = if run.decays { weight_decay } else { 0.0 };
            let (flat, packed) = (run.flat.clone(), run.packed.clone());
            let values = values[packed.clone()].par_chunks_mut(CHUNK);
            let values = values.zip(gradients[flat].par_chunks(CHUNK));
            match (self.rule, &mut self.state[..]) {
                (Rule::AdamW(config), [first, second]) => {
                    let factors = config.factors(self.steps, grad_scale, lr, decay);
                    values
                        .zip(first[packed.clone()].par_chunks_mut(CHUNK))
                        .zip(second[packed].par_chunks_mut(CHUNK))
                        .for_each(|(((values, gradients), first), second)| {
                            update(values, gradients, first, second, factors);
                        });
                }
                (Rule::Sgd(config), [buffer]) => {
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
    fn factors(&self, steps: u32, grad_scale: f64, lr: f64, decay: f64) -> AdamWFactors {
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

    #[test]
    fn two_steps_equal_the_formula_in_f64() {
        let rule = Rule::AdamW(AdamWConfig::default());
        let params = [param(0..2, true), param(2..3, false)];
        let mut adam = Optimizer::new(rule, &params, &Owned::all(&params, 3));
        let mut values = [1.0f32, -2.0, 3.0];
        let mut want = [1.0f64, -2.0, 3.0];
        let (mut m, mut v) = ([0f64; 3], [0f64; 3]);
        for (step, lr) in [(1, 0.1f64), (2, 0.05)] {
            let grads = [0.5f32, -4.0, 1e-3 * step as f32];
            adam.step(&mut values, &grads, 0.5, lr, 0.1);
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

    /// PyTorch's SGD: the decay is part of the gradient, and the buffer starts with the first one.
    #[test]
    fn sgd_has_momentum() {
        let rule = Rule::Sgd(SgdConfig { sgd_momentum: 0.5 });
        let params = [param(0..1, true), param(1..2, false)];
        let mut sgd = Optimizer::new(rule, &params, &Owned::all(&params, 2));
        let mut values = [1.0f32, 1.0];
        sgd.step(&mut values, &[4.0, 4.0], 0.5, 0.1, 0.25);
        assert_eq!(values, [1.0 - 0.1 * 2.25, 1.0 - 0.1 * 2.0]);
        let before = values;
        sgd.step(&mut values, &[0.0, 0.0], 0.5, 0.1, 0.0);
        assert_eq!(values, [before[0] - 0.1 * 1.125, before[1] - 0.1]);
    }
}
