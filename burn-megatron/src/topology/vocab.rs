//! The vocabulary's padding, and how a tensor's dim is cut over an axis.

use std::ops::Range;

/// The vocabulary's size padded to a multiple of `divisible_by * tp`, so that every
/// tensor-parallel rank holds as many rows, and as many as its kernels like.
///
/// `calculate_padded_vocab_size` in Megatron-LM's `megatron/training`. The padding depends on
/// `tp`: its logits must be masked, or the loss depends on it too (Megatron-LM #1754).
///
/// # Panics
/// If `divisible_by` or `tp` is 0, which [`validate`](super::validate) excludes.
pub fn padded_vocab_size(vocab: usize, divisible_by: usize, tp: usize) -> usize {
    vocab.next_multiple_of(divisible_by * tp)
}

/// Part `index` of `parts` equal and contiguous parts of `0..total`: the rows, columns or
/// positions that a rank with that coordinate holds.
///
/// `VocabUtility` in Megatron-LM's `megatron/core/tensor_parallel/utils.py`.
///
/// # Panics
/// If `parts` does not divide `total`, or `index` is not below `parts`.
pub fn shard_range(total: usize, parts: usize, index: usize) -> Range<usize> {
    assert!(index < parts, "part {index} of {parts}");
    assert!(
        total.is_multiple_of(parts),
        "{total} cannot be cut into {parts} equal parts"
    );
    let len = total / parts;
    index * len..(index + 1) * len
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Case {
        vocab: usize,
        divisible_by: usize,
        tp: usize,
        padded: usize,
    }

    #[test]
    fn padding_is_megatrons() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/fixtures/padded_vocab.json"
        );
        let cases: Vec<Case> =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(!cases.is_empty());
        for c in cases {
            assert_eq!(
                padded_vocab_size(c.vocab, c.divisible_by, c.tp),
                c.padded,
                "vocab {}, divisible by {}, tp {}",
                c.vocab,
                c.divisible_by,
                c.tp
            );
        }
    }

    #[test]
    fn shards_tile_the_whole() {
        for parts in [1, 2, 3, 4, 6, 12] {
            let mut next = 0;
            for index in 0..parts {
                let shard = shard_range(12, parts, index);
                assert_eq!((shard.start, shard.len()), (next, 12 / parts));
                next = shard.end;
            }
            assert_eq!(next, 12);
        }
    }

    #[test]
    #[should_panic(expected = "cannot be cut")]
    fn an_uneven_cut_is_refused() {
        shard_range(10, 4, 0);
    }
}
