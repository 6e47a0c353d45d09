//! Several corpora in one stream of samples, in given proportions.
//!
//! Semantics of `megatron/core/datasets/blended_dataset.py`, of `build_blending_indices` and
//! `build_exhaustive_blending_indices` in `helpers.cpp`, and of `_get_size_per_split_per_dataset`
//! in `blended_megatron_dataset_builder.py`: each sample comes from the dataset that lags furthest
//! behind its share.

use std::sync::Arc;

use super::gpt_dataset::{Sample, TokenDataset};
use super::numpy_random;
use crate::{Error, Result, Violation};

/// Samples built per dataset beyond its share, as a fraction: Megatron's
/// `mid_level_dataset_surplus`. The greedy choice can overdraw a share by a few.
const SURPLUS: f64 = 0.005;

/// How many samples each dataset of a blend must give.
#[derive(Debug, Clone, PartialEq)]
pub struct BlendSizes {
    /// The weights, adding up to 1.
    pub weights: Vec<f64>,
    /// `num_samples` to build each dataset with: its share, rounded up, and 0.5 % more; or, where
    /// Megatron would run out of samples, what the blend draws.
    pub num_samples: Vec<u64>,
    /// Samples of the blend: the shares rounded up, so at least the `size` asked for.
    pub size: u64,
}

impl BlendSizes {
    /// The sizes for a blend of at least `size` samples.
    ///
    /// # Errors
    /// No weights, or one that is not above 0: a dataset of weight 0 would still be drawn from
    /// when errors tie.
    pub fn new(weights: &[f64], size: u64) -> Result<Self> {
        let weights = normalize(weights)?;
        let shares: Vec<f64> = weights.iter().map(|w| (size as f64 * w).ceil()).collect();
        let built = |share: &f64| (share * (1.0 + SURPLUS)).ceil() as u64;
        let mut sizes = Self {
            num_samples: shares.iter().map(built).collect(),
            size: shares
                .iter()
                .fold(0, |sum: u64, share| sum.saturating_add(*share as u64)),
            weights,
        };
        sizes.cover_overdraws();
        Ok(sizes)
    }

    /// Raises what would not suffice. Shares rounded up add up to more than was asked for, and a
    /// heavy dataset beside many light ones gives most of that excess (Megatron-LM #705).
    fn cover_overdraws(&mut self) {
        // Before a draw the errors add up to 0, so the largest is not below 0: a dataset drawn as
        // number i has had at most w·i draws.
        let last = self.size.saturating_sub(1) as f64;
        let bound = |w: &f64| (w * last * (1.0 + 1e-9)) as u64 + 1;
        let mut pairs = self.weights.iter().zip(&self.num_samples);
        if pairs.all(|(w, built)| bound(w) <= *built) {
            return;
        }
        // Only blends of few samples get here: the surplus covers the others.
        let mut blend = Greedy::new(&self.weights);
        for i in 0..self.size as usize {
            blend.next(i, |_, _| true);
        }
        for (built, drawn) in self.num_samples.iter_mut().zip(blend.drawn) {
            *built = (*built).max(drawn as u64);
        }
    }
}

/// A blend of datasets.
///
/// Memory: 6 bytes per sample, beside its datasets.
pub struct BlendedDataset {
    datasets: Vec<Arc<dyn TokenDataset>>,
    dataset_index: Vec<u16>,
    dataset_sample_index: Vec<u32>,
}

impl BlendedDataset {
    /// Blends `size` samples by weight; see [`BlendSizes`] for the sizes to build datasets with.
    ///
    /// # Errors
    /// Bad weights, more than 32,767 datasets, or one too short for its share, by name of its
    /// place in the list (Megatron finds that out when it trains).
    pub fn new(datasets: Vec<Arc<dyn TokenDataset>>, weights: &[f64], size: u64) -> Result<Self> {
        let weights = normalize(weights)?;
        if weights.len() != datasets.len() {
            let rule = format!("{} weights for {} datasets", weights.len(), datasets.len());
            return Err(config_error(rule));
        }
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        Self::draw(datasets, &weights, size)
    }

    /// Every sample of every dataset once, blended by their sizes (no weights given).
    ///
    /// # Errors
    /// No datasets, or more than 32,767.
    pub fn exhaustive(datasets: Vec<Arc<dyn TokenDataset>>) -> Result<Self> {
        let total: usize = datasets.iter().map(|d| d.len()).sum();
        let weights: Vec<f64> = datasets
            .iter()
            .map(|d| d.len() as f64 / total as f64)
            .collect();
        let mut blend = Greedy::new(&weights);
        // Rounding could draw once too often from a dataset; those used up take no part.
        Self::collect(datasets, total, |datasets, i| {
            blend.next(i, |d, drawn| drawn < datasets[d].len())
        })
    }

    fn draw(datasets: Vec<Arc<dyn TokenDataset>>, weights: &[f64], size: usize) -> Result<Self> {
        let mut blend = Greedy::new(weights);
        Self::collect(datasets, size, |_, i| blend.next(i, |_, _| true))
    }

    fn collect(
        datasets: Vec<Arc<dyn TokenDataset>>,
        size: usize,
        mut next: impl FnMut(&[Arc<dyn TokenDataset>], usize) -> Option<(usize, usize)>,
    ) -> Result<Self> {
        if datasets.is_empty() || datasets.len() > i16::MAX as usize {
            let rule = format!("a blend has 1 to 32767 datasets, not {}", datasets.len());
            return Err(config_error(rule));
        }
        let mut dataset_index = Vec::new();
        let mut dataset_sample_index = Vec::new();
        if dataset_index.try_reserve_exact(size).is_err()
            || dataset_sample_index.try_reserve_exact(size).is_err()
        {
            let rule = format!("there is no memory for a blend of {size} samples");
            return Err(config_error(rule));
        }
        let mut needed = vec![0; datasets.len()];
        for i in 0..size {
            let Some((dataset, sample)) = next(&datasets, i) else {
                break;
            };
            needed[dataset] = sample + 1;
            dataset_index.push(dataset as u16);
            // A dataset has at most 2^32 - 2 samples; one too short is found below.
            dataset_sample_index.push(sample as u32);
        }
        let short: Vec<_> = (0..datasets.len())
            .filter(|&d| needed[d] > datasets[d].len())
            .map(|d| Violation {
                rule: format!(
                    "dataset {d} of the blend must give {} of its {size} samples, it has {}",
                    needed[d],
                    datasets[d].len()
                ),
                nearest: Vec::new(),
            })
            .collect();
        if !short.is_empty() {
            return Err(Error::config(short));
        }
        Ok(Self {
            datasets,
            dataset_index,
            dataset_sample_index,
        })
    }

    /// Which dataset sample `i` comes from, and its number there.
    pub fn source(&self, i: usize) -> Option<(usize, usize)> {
        let dataset = *self.dataset_index.get(i)?;
        Some((dataset.into(), self.dataset_sample_index[i] as usize))
    }
}

impl TokenDataset for BlendedDataset {
    fn len(&self) -> usize {
        self.dataset_index.len()
    }

    fn sample(&self, i: usize) -> Result<Sample> {
        match self.source(i) {
            Some((dataset, sample)) => self.datasets[dataset].sample(sample),
            None => {
                let reason = format!("sample {i} was asked for, there are {}", self.len());
                Err(Error::data("blended dataset", None, reason))
            }
        }
    }
}

/// The greedy choice: the dataset furthest below its share; the first of those that tie.
struct Greedy<'w> {
    weights: &'w [f64],
    drawn: Vec<usize>,
}

impl<'w> Greedy<'w> {
    fn new(weights: &'w [f64]) -> Self {
        let drawn = vec![0; weights.len()];
        Self { weights, drawn }
    }

    /// The dataset and the number in it of sample `i`, among the datasets `usable(dataset, drawn)`.
    fn next(&mut self, i: usize, usable: impl Fn(usize, usize) -> bool) -> Option<(usize, usize)> {
        // Sample 0 is judged like sample 1, or every error would be 0.
        let i = i.max(1) as f64;
        let mut best: Option<(usize, f64)> = None;
        for (d, weight) in self.weights.iter().enumerate() {
            let error = weight * i - self.drawn[d] as f64;
            if usable(d, self.drawn[d]) && best.is_none_or(|(_, largest)| error > largest) {
                best = Some((d, error));
            }
        }
        let (dataset, _) = best?;
        self.drawn[dataset] += 1;
        Some((dataset, self.drawn[dataset] - 1))
    }
}

fn normalize(weights: &[f64]) -> Result<Vec<f64>> {
    let bad: Vec<_> = weights
        .iter()
        .enumerate()
        .filter(|(_, w)| !(**w > 0.0 && w.is_finite()))
        .map(|(i, w)| Violation {
            rule: format!("weight {i} of the blend is {w}; weights are above 0"),
            nearest: vec!["leave the dataset out".to_string()],
        })
        .collect();
    if weights.is_empty() {
        return Err(config_error(
            "a blend needs at least one weight".to_string(),
        ));
    }
    if !bad.is_empty() {
        return Err(Error::config(bad));
    }
    let total = numpy_random::sum(weights);
    Ok(weights.iter().map(|w| w / total).collect())
}

fn config_error(rule: String) -> Error {
    Error::config(vec![Violation {
        rule,
        nearest: Vec::new(),
    }])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::{self, Tensors};
    use crate::data::{GptDataset, GptDatasetConfig, IndexedDataset};

    /// A dataset that is only a length.
    struct Count(usize);

    impl TokenDataset for Count {
        fn len(&self) -> usize {
            self.0
        }

        fn sample(&self, i: usize) -> Result<Sample> {
            Err(Error::data("count", None, format!("{i}")))
        }
    }

    fn counts(lengths: &[usize]) -> Vec<Arc<dyn TokenDataset>> {
        lengths.iter().map(|n| Arc::new(Count(*n)) as _).collect()
    }

    fn ints(value: &serde_json::Value) -> Vec<usize> {
        let value = value.as_array().unwrap();
        value.iter().map(|v| v.as_u64().unwrap() as usize).collect()
    }

    fn floats(value: &serde_json::Value) -> Vec<f64> {
        let value = value.as_array().unwrap();
        value.iter().map(|v| v.as_f64().unwrap()).collect()
    }

    fn gpt(name: &str, num_samples: Option<u64>) -> Arc<dyn TokenDataset> {
        let data = IndexedDataset::open(fixtures::path(&format!("data/{name}"))).unwrap();
        let range = 0..data.num_sequences();
        let config = GptDatasetConfig::new(64, 1234, num_samples);
        Arc::new(GptDataset::new(Arc::new(data), range, config).unwrap())
    }

    #[test]
    fn the_helpers_choices_are_megatrons() {
        let cases = fixtures::json("data/blended_cases.json");
        for name in ["helper_w3", "helper_w5"] {
            let case = &cases[name];
            let weights = floats(&case["weights"]);
            let mut blend = Greedy::new(&weights);
            let n = case["n"].as_u64().unwrap() as usize;
            let (datasets, samples): (Vec<_>, Vec<_>) =
                (0..n).map(|i| blend.next(i, |_, _| true).unwrap()).unzip();
            assert_eq!(datasets, ints(&case["dataset_index"]), "{name}");
            assert_eq!(samples, ints(&case["dataset_sample_index"]), "{name}");
        }
    }

    #[test]
    fn whole_blends_are_megatrons() {
        let cases = fixtures::json("data/blended_cases.json");
        for (name, case) in cases.as_object().unwrap() {
            let Some(underlying) = case["underlying"].as_array() else {
                continue;
            };
            let names = underlying.iter().map(|u| u["path"].as_str().unwrap());
            let blend = match case["size"].as_u64() {
                Some(size) => {
                    let sizes = BlendSizes::new(&floats(&case["weights"]), size).unwrap();
                    let asked = underlying
                        .iter()
                        .map(|u| u["num_samples"].as_u64().unwrap());
                    assert_eq!(sizes.num_samples, asked.collect::<Vec<_>>(), "{name}");
                    let datasets = names.zip(&sizes.num_samples).map(|(d, n)| gpt(d, Some(*n)));
                    BlendedDataset::new(datasets.collect(), &sizes.weights, sizes.size)
                }
                None => BlendedDataset::exhaustive(names.map(|d| gpt(d, None)).collect()),
            };
            let blend = blend.unwrap();
            assert_eq!(blend.len() as u64, case["len"].as_u64().unwrap(), "{name}");
            let lengths: Vec<usize> = blend.datasets.iter().map(|d| d.len()).collect();
            let expected = underlying
                .iter()
                .map(|u| u["len"].as_u64().unwrap() as usize);
            assert_eq!(lengths, expected.collect::<Vec<_>>(), "{name}");
            let tensors = Tensors::read(&format!("data/blended_{name}.safetensors"));
            let index: Vec<i64> = blend.dataset_index.iter().map(|d| (*d).into()).collect();
            assert_eq!(index, tensors.ints("dataset_index").0, "{name}");
            let index: Vec<i64> = blend
                .dataset_sample_index
                .iter()
                .map(|d| (*d).into())
                .collect();
            assert_eq!(index, tensors.ints("dataset_sample_index").0, "{name}");
            let (tokens, shape) = tensors.ints("tokens");
            for (i, tokens) in tokens.chunks(shape[1]).enumerate() {
                assert_eq!(blend.sample(i).unwrap().tokens, tokens, "{name} {i}");
            }
            assert!(blend.sample(blend.len()).is_err());
        }
    }

    /// Megatron-LM #705: extreme weights ran past the end of a dataset.
    #[test]
    fn extreme_weights_stay_within_the_sizes_they_ask_for() {
        for weights in [
            vec![1e-12, 1.0],
            vec![1.0, 1e-12, 1e-9, 3.0],
            vec![1e6, 1.0, 1.0],
            vec![0.1; 40],
            (1..60).map(|i| 1.0 / f64::from(i * i)).collect(),
        ] {
            for size in [1, 10, 1000, 12345] {
                let sizes = BlendSizes::new(&weights, size).unwrap();
                let lengths: Vec<_> = sizes.num_samples.iter().map(|n| *n as usize).collect();
                let blend = BlendedDataset::new(counts(&lengths), &sizes.weights, sizes.size);
                assert!(blend.unwrap().len() as u64 >= size);
            }
        }
        for weights in [
            &[0.0, 1.0][..],
            &[-1.0, 2.0],
            &[f64::NAN],
            &[f64::INFINITY, 1.0],
            &[],
        ] {
            assert!(BlendSizes::new(weights, 10).is_err(), "{weights:?}");
        }
    }

    #[test]
    fn a_dataset_too_short_is_named_before_training() {
        let error = BlendedDataset::new(counts(&[100, 3]), &[0.5, 0.5], 20)
            .err()
            .unwrap();
        let error = error.to_string();
        assert!(
            error.contains("dataset 1 of the blend must give 10 of its 20"),
            "{error}"
        );
        assert!(BlendedDataset::new(counts(&[9]), &[0.5, 0.5], 2).is_err());
        assert!(BlendedDataset::exhaustive(Vec::new()).is_err());
    }
}
