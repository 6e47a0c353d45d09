//! `--split "969,30,1"`: which sequences train, validate and test.
//!
//! The arithmetic of `parse_and_normalize_split` and `convert_split_vector_to_split_matrix` in
//! Megatron's `blended_megatron_dataset_config.py`, and of their use in the builder, kept to the
//! last bit of the floats: one sequence more or less in a split changes every shuffle.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, Violation};

/// A split of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    Train,
    Valid,
    Test,
}

impl Split {
    /// The splits in the order of a `--split` string.
    pub const ALL: [Split; 3] = [Split::Train, Split::Valid, Split::Test];
}

/// A parsed `--split`: the fractions at which each split begins and ends.
#[derive(Debug, Clone, PartialEq)]
pub struct SplitRanges([Option<(f64, f64)>; 3]);

impl SplitRanges {
    /// Parses one to three weights with commas between them; missing ones are 0.
    ///
    /// # Errors
    /// Anything but digits and dots in a weight, more than three, or all of them 0. (Megatron
    /// drops characters it does not know, so that `-1` reads as 1.)
    pub fn parse(split: &str) -> Result<Self> {
        let mut weights = [0.0; 3];
        let parts: Vec<&str> = split.split(',').map(str::trim).collect();
        let mut problem = (parts.len() > 3).then(|| format!("it has {} parts", parts.len()));
        for (weight, part) in weights.iter_mut().zip(&parts) {
            let digits = part.bytes().all(|b| b.is_ascii_digit() || b == b'.');
            match part.parse::<f64>() {
                Ok(value) if digits && value.is_finite() => *weight = value,
                _ => problem = Some(format!("\"{part}\" is not a weight")),
            }
        }
        let total: f64 = weights.iter().sum();
        if problem.is_none() && !(total > 0.0 && total.is_finite()) {
            problem = Some("its weights must add up to more than 0".to_string());
        }
        if let Some(problem) = problem {
            return Err(Error::config(vec![Violation {
                rule: format!("split \"{split}\" must be up to three weights >= 0: {problem}"),
                nearest: vec!["969,30,1".to_string()],
            }]));
        }
        let mut begin = 0.0;
        Ok(Self(weights.map(|weight| {
            let range = (begin, begin + weight / total);
            begin = range.1;
            (range.1 > range.0).then_some(range)
        })))
    }

    /// The elements of a dataset of `count` sequences that belong to a split; `None` if its weight
    /// is 0. A small weight on a small dataset gives an empty range.
    pub fn range(&self, split: Split, count: usize) -> Option<Range<usize>> {
        // Python's round: halves go to the even neighbour.
        let at = |fraction: f64| (fraction * count as f64).round_ties_even() as usize;
        self.0[split as usize].map(|(begin, end)| at(begin)..at(end).min(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(split: &str, count: usize) -> Vec<Option<Range<usize>>> {
        let parsed = SplitRanges::parse(split).unwrap();
        Split::ALL.map(|s| parsed.range(s, count)).to_vec()
    }

    #[test]
    fn splits_as_megatron_does() {
        assert_eq!(
            ranges("90,7,3", 80),
            [Some(0..72), Some(72..78), Some(78..80)]
        );
        assert_eq!(ranges("1", 80), [Some(0..80), None, None]);
        assert_eq!(ranges("99, 1,0", 100), [Some(0..99), Some(99..100), None]);
        assert_eq!(ranges("0,.5,.5", 5), [None, Some(0..2), Some(2..5)]);
        // 2.5 rounds to 2, 7.5 to 8.
        assert_eq!(ranges("1,2,1", 10), [Some(0..2), Some(2..8), Some(8..10)]);
        assert_eq!(
            ranges("969,30,1", 10),
            [Some(0..10), Some(10..10), Some(10..10)]
        );
    }

    #[test]
    fn every_element_is_in_one_split() {
        for split in ["969,30,1", "98,1,1", "0.1,0.2,0.7", "1,1,1", "3,0,5"] {
            for count in [1, 2, 3, 10, 79, 1_000_003] {
                let mut next = 0;
                for range in ranges(split, count).into_iter().flatten() {
                    assert_eq!(range.start, next, "{split} {count}");
                    next = range.end;
                }
                assert_eq!(next, count, "{split} {count}");
            }
        }
    }

    #[test]
    fn refuses_malformed_splits() {
        for split in [
            "", "a,b", "-1,2", "1,2,3,4", "0,0,0", "1,,2", "1e3", "nan", "1.2.3", "1;2",
        ] {
            let error = SplitRanges::parse(split).unwrap_err().to_string();
            assert!(error.contains("must be up to three weights"), "{error}");
        }
    }
}
