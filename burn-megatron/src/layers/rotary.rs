//! Rotary position embedding: which angles a head's features turn by.

use crate::Kernels;
use crate::autograd::{Heads, RotaryTable, rotary_embedding};
use burn::tensor::Tensor;
use std::f64::consts::TAU;
use std::sync::{Arc, Mutex, PoisonError};

/// Configuration of a [`RotaryEmbedding`], under the names of Megatron's flags.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryConfig {
    /// Base of the frequencies' geometric series.
    pub rotary_base: f64,
    /// Part of each head's features that turn.
    pub rotary_percent: f64,
    /// Llama 3's stretching of low frequencies by this factor.
    pub rope_scaling_factor: Option<f64>,
}

/// Llama 3's constants: wavelengths above `CONTEXT / LOW` are stretched, those below `CONTEXT / HIGH`
/// are not, and those between partly.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;
const CONTEXT: f64 = 8192.0;

impl RotaryConfig {
    /// Features of a head of width `d` that turn; an even number for a legal configuration.
    pub fn rotary_dim(&self, d: usize) -> usize {
        (d as f64 * self.rotary_percent) as usize
    }

    /// For heads of width `d`.
    pub fn init(&self, d: usize) -> RotaryEmbedding {
        let dim = self.rotary_dim(d);
        let frequencies = (0..dim / 2).map(|i| {
            let frequency = self.rotary_base.powf(-2.0 * i as f64 / dim as f64);
            let scaled = self.rope_scaling_factor.map(|by| stretched(frequency, by));
            scaled.unwrap_or(frequency) as f32
        });
        RotaryEmbedding {
            frequencies: frequencies.collect(),
            table: Arc::default(),
        }
    }
}

/// Megatron's `RotaryEmbedding._apply_scaling`.
fn stretched(frequency: f64, by: f64) -> f64 {
    let wavelength = TAU / frequency;
    if wavelength < CONTEXT / HIGH {
        return frequency;
    }
    if wavelength > CONTEXT / LOW {
        return frequency / by;
    }
    let smooth = (CONTEXT / wavelength - LOW) / (HIGH - LOW);
    (1.0 - smooth) * frequency / by + smooth * frequency
}

/// Turns the features of queries and keys by angles that grow with the position (Su et al. 2021).
/// Megatron's `models/common/embeddings/rotary_pos_embedding.py`.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    /// Radians per position of each pair of features.
    frequencies: Vec<f32>,
    /// Of the sequence length seen last.
    table: Arc<Mutex<Option<RotaryTable>>>,
}

impl RotaryEmbedding {
    /// `[s, groups, heads · d] -> [s, groups, heads · d]`, the positions counted from 0.
    pub fn forward(&self, x: Tensor<3>, heads: Heads, kernels: Kernels) -> Tensor<3> {
        let table = self.table(x.dims()[0]);
        rotary_embedding(x, heads, &table, kernels)
    }

    fn table(&self, positions: usize) -> RotaryTable {
        let mut last = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(table) if table.positions() == positions => table.clone(),
            _ => last
                .insert(RotaryTable::new(&self.frequencies, positions))
                .clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_stretches_low_frequencies_alone() {
        let config = |rope_scaling_factor| RotaryConfig {
            rotary_base: 500_000.0,
            rotary_percent: 1.0,
            rope_scaling_factor,
        };
        let (plain, scaled) = (config(None).init(128), config(Some(8.0)).init(128));
        let ratio = |i: usize| plain.frequencies[i] / scaled.frequencies[i];
        assert_eq!(ratio(0), 1.0);
        assert!((ratio(63) - 8.0).abs() < 1e-5);
        let ratios: Vec<f32> = (0..64).map(ratio).collect();
        assert!(ratios.is_sorted());
        assert!(ratios.iter().any(|r| (1.5..7.0).contains(r)), "{ratios:?}");
    }

    #[test]
    fn part_of_a_head_turns() {
        let config = RotaryConfig {
            rotary_base: 10_000.0,
            rotary_percent: 0.25,
            rope_scaling_factor: None,
        };
        assert_eq!(config.init(64).frequencies.len(), 8);
    }
}
