//! The flat gradient buffer in buckets, and which elements of each a data-parallel rank owns.

use crate::shard::ParamRecord;
use std::ops::Range;

/// A flat buffer cut into buckets that are reduced one by one, each a multiple of the data-parallel size.
/// A bucket knows nothing of parameters: one may lie in several, and in several ranks' shards of them.
/// What the first and the last pipeline stage both hold is cut by itself, so that the same rank owns the
/// same elements of both copies. Megatron's `distributed/param_and_grad_buffer.py`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    ranges: Vec<Range<usize>>,
    parts: usize,
}

impl Buckets {
    /// Buckets of about `size` elements for `parts` ranks.
    pub fn new(params: &[ParamRecord], elements: usize, size: usize, parts: usize) -> Self {
        let tied = params.iter().filter(|param| param.spec.tied_over_stages);
        let ends = |param: &ParamRecord| {
            let Range { start, end } = param.range.clone();
            [start, end.next_multiple_of(parts)]
        };
        let mut cuts: Vec<usize> = tied.flat_map(ends).chain([elements]).collect();
        cuts.dedup();
        let mut start = 0;
        let segments = cuts
            .into_iter()
            .map(|cut| cut - std::mem::replace(&mut start, cut));
        Buckets::of_segments(segments, size, parts)
    }

    /// The same for segments of so many elements one after another, each rounded up to a multiple of
    /// `parts`.
    pub fn of_segments(
        segments: impl IntoIterator<Item = usize>,
        size: usize,
        parts: usize,
    ) -> Self {
        let size = size.max(1).next_multiple_of(parts);
        let (mut ranges, mut start) = (Vec::new(), 0);
        for segment in segments {
            let end = start + segment.next_multiple_of(parts);
            ranges.extend((start..end).step_by(size).map(|at| at..end.min(at + size)));
            start = end;
        }
        Buckets { ranges, parts }
    }

    /// The buckets' elements, in flat order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Elements of all buckets, padding included.
    pub fn elements(&self) -> usize {
        self.ranges.last().map_or(0, |bucket| bucket.end)
    }

    /// The elements of rank `part`: an equal part of each bucket.
    pub fn shard(&self, part: usize) -> impl Iterator<Item = Range<usize>> {
        self.ranges.iter().map(move |bucket| {
            let len = bucket.len() / self.parts;
            let start = bucket.start + part * len;
            start..start + len
        })
    }
}

/// The elements that a rank keeps the optimizer's state of and updates: all, or its shard. In the rank's own
/// buffers they are packed, one after another.
#[derive(Debug, Clone)]
pub struct Owned {
    pieces: Vec<Range<usize>>,
    parts: Vec<OwnedPart>,
}

/// A part of a parameter that a rank owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedPart {
    /// The parameter's place in the model.
    pub param: usize,
    /// Its elements in the flat buffers.
    pub flat: Range<usize>,
    /// Where they are in the packed ones.
    pub packed: Range<usize>,
}

impl Owned {
    /// Everything.
    pub fn all(params: &[ParamRecord], elements: usize) -> Self {
        Owned::new(params, std::iter::once(0..elements).collect())
    }

    /// The shard of rank `part`.
    pub fn shard(params: &[ParamRecord], buckets: &Buckets, part: usize) -> Self {
        Owned::new(params, buckets.shard(part).collect())
    }

    fn new(params: &[ParamRecord], pieces: Vec<Range<usize>>) -> Self {
        let (mut parts, mut packed, mut next) = (Vec::new(), 0, 0);
        for piece in &pieces {
            // Pieces and parameters both ascend.
            while next < params.len() && params[next].range.end <= piece.start {
                next += 1;
            }
            let here = (next..).zip(&params[next..]);
            let here = here.take_while(|(_, param)| param.range.start < piece.end);
            parts.extend(here.map(|(index, param)| {
                let start = param.range.start.max(piece.start);
                let end = param.range.end.min(piece.end);
                let at = packed + start - piece.start;
                OwnedPart {
                    param: index,
                    flat: start..end,
                    packed: at..at + (end - start),
                }
            }));
            packed += piece.len();
        }
        Owned { pieces, parts }
    }

    /// Elements, padding included.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its elements in the flat buffers, in the order in which they are packed.
    pub fn pieces(&self) -> &[Range<usize>] {
        &self.pieces
    }

    /// Its parts of parameters, in that order.
    pub fn parts(&self) -> &[OwnedPart] {
        &self.parts
    }

    /// The packed copy of its elements of `flat`.
    pub fn pack(&self, flat: &[f32]) -> Vec<f32> {
        let pieces = self.pieces.iter().map(|piece| &flat[piece.clone()]);
        let mut packed = Vec::with_capacity(self.len());
        pieces.for_each(|piece| packed.extend_from_slice(piece));
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{Init, ParamSpec};
    use burn::module::ParamId;
    use proptest::prelude::*;

    fn params(lengths: &[(usize, bool)], parts: usize) -> (Vec<ParamRecord>, usize) {
        let mut end = 0usize;
        let params = lengths.iter().map(|&(len, tied)| {
            let spec = ParamSpec::replicated([len], Init::Zeros);
            let spec = if tied { spec.tied_over_stages() } else { spec };
            if tied {
                end = end.next_multiple_of(parts);
            }
            let range = end..end + len;
            end = if tied {
                range.end.next_multiple_of(parts)
            } else {
                range.end
            };
            ParamRecord {
                id: ParamId::new(),
                name: "p".into(),
                spec,
                range,
                decays: true,
            }
        });
        let params = params.collect();
        (params, end.next_multiple_of(parts))
    }

    #[test]
    fn a_tied_parameter_is_cut_alike_wherever_it_stands() {
        let first = params(&[(7, true), (10, false)], 4);
        let last = params(&[(5, false), (7, true), (3, false)], 4);
        let [first, last] = [first, last].map(|(params, elements)| {
            let buckets = Buckets::new(&params, elements, 4, 4);
            let tied = params.iter().position(|p| p.spec.tied_over_stages).unwrap();
            let start = params[tied].range.start;
            let shards = (0..4).map(|part| Owned::shard(&params, &buckets, part));
            let mine = |owned: Owned| -> Vec<Range<usize>> {
                let parts = owned.parts().iter().filter(|part| part.param == tied);
                parts
                    .map(|part| part.flat.start - start..part.flat.end - start)
                    .collect()
            };
            shards.map(mine).collect::<Vec<_>>()
        });
        assert_eq!(first, last);
        assert_eq!(first[0], [0..1, 4..5]);
    }

    proptest! {
        #[test]
        fn shards_cover_every_element_once_and_are_equal(
            lengths in prop::collection::vec((1usize..50, any::<bool>()), 1..8),
            size in 1usize..60,
            parts in 1usize..6,
        ) {
            let (params, elements) = params(&lengths, parts);
            let buckets = Buckets::new(&params, elements, size, parts);
            prop_assert_eq!(buckets.elements(), elements);
            let shards: Vec<_> = (0..parts)
                .map(|part| Owned::shard(&params, &buckets, part))
                .collect();
            let mut seen = vec![0; elements];
            let mut known = 0;
            for shard in &shards {
                prop_assert_eq!(shard.len(), elements / parts);
                shard.pieces().iter().flat_map(Clone::clone).for_each(|at| seen[at] += 1);
                for part in shard.parts() {
                    let param = &params[part.param].range;
                    prop_assert!(param.start <= part.flat.start && part.flat.end <= param.end);
                    prop_assert_eq!(part.flat.len(), part.packed.len());
                    known += part.flat.len();
                }
                let flat: Vec<f32> = (0..elements).map(|i| i as f32).collect();
                let packed = shard.pack(&flat);
                for part in shard.parts() {
                    prop_assert_eq!(&packed[part.packed.clone()], &flat[part.flat.clone()]);
                }
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
            prop_assert_eq!(known, lengths.iter().map(|(len, _)| len).sum::<usize>());
        }
    }
}
