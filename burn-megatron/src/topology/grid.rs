//! The rank grid: where each rank sits, and every group as a slice of the grid.
//!
//! Keeps the semantics of `RankGenerator` in Megatron-LM's `megatron/core/parallel_state.py`: an
//! order string names the axes innermost first, and a group holds the ranks that differ only in
//! some of them. With `tp-cp-ep-dp-pp` and tp=2, dp=2, pp=2:
//!
//! ```text
//! rank = tp + 2*dp + 4*pp        tp groups: [0 1] [2 3] [4 5] [6 7]
//!                                dp groups: [0 2] [1 3] [4 6] [5 7]
//!                                pp groups: [0 4] [1 5] [2 6] [3 7]
//! ```

use super::{Axes, Axis, nearest};
use crate::error::{Error, Result, Violation};

/// Megatron's default order of the axes, innermost first.
pub const DEFAULT_ORDER: &str = "tp-cp-ep-dp-pp";

/// All ranks of a world, laid out along the axes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankGrid {
    sizes: Axes,
    strides: Axes,
    order: [Axis; 5],
}

impl RankGrid {
    /// A grid of these sizes. `order` names the axes innermost first, joined by `-`; an axis of
    /// size 1 may be left out.
    ///
    /// # Errors
    /// A configuration error with every violation: a size of 0; cp and ep both above 1 (dense
    /// layers have no ep, experts no cp: see [`expert`](Self::expert)); a world that does not fit
    /// a `usize`; an axis in `order` that is unknown, named twice, or missing with a size above 1.
    pub fn new(sizes: Axes, order: &str) -> Result<Self> {
        let (order, mut violations) = parse_order(&sizes, order);
        violations.extend(size_violations(&sizes));
        if violations.is_empty() {
            Ok(Self::with_order(sizes, order))
        } else {
            Err(Error::config(violations))
        }
    }

    fn with_order(sizes: Axes, order: [Axis; 5]) -> Self {
        let mut strides = Axes::all(1);
        let mut stride = 1;
        for axis in order {
            strides[axis] = stride;
            stride *= sizes[axis];
        }
        RankGrid {
            sizes,
            strides,
            order,
        }
    }

    /// The grid of the expert layers over the same ranks: `expert_tensor_parallel_size` takes
    /// tp's place, cp is 1, and what remains of the world is expert data parallel.
    ///
    /// # Errors
    /// If the world does not divide so, or if the pipeline groups would differ from this grid's:
    /// a rank cannot hold one stage's dense layers and another's experts. That happens only where
    /// pp is not the outermost axis and the two data-parallel sizes differ.
    pub fn expert(
        &self,
        expert_tensor_parallel_size: usize,
        expert_model_parallel_size: usize,
    ) -> Result<Self> {
        let (etp, ep, pp) = (
            expert_tensor_parallel_size,
            expert_model_parallel_size,
            self.sizes.pp,
        );
        let world = self.world_size();
        let refuse = |rule: String, nearest: Vec<String>| {
            Err(Error::config(vec![Violation { rule, nearest }]))
        };
        let parts = etp.checked_mul(ep).and_then(|n| n.checked_mul(pp));
        let Some(dp) = parts
            .filter(|parts| world.is_multiple_of(*parts))
            .and_then(|parts| world.checked_div(parts))
        else {
            let whole = etp.checked_mul(pp).and_then(|n| world.checked_div(n));
            let rule = format!(
                "expert_model_parallel_size {ep} times expert_tensor_parallel_size {etp} times \
                 pipeline_model_parallel_size {pp} must divide the world size {world}"
            );
            return refuse(rule, nearest::divisors(ep, whole.unwrap_or(0)));
        };
        let sizes = Axes {
            tp: etp,
            cp: 1,
            ep,
            dp,
            pp,
        };
        let grid = Self::with_order(sizes, self.order);
        if grid.groups(&[Axis::Pp]) != self.groups(&[Axis::Pp]) {
            let rule = format!(
                "order {} must end with pp where the experts' data-parallel size {dp} is not the \
                 dense layers' {}",
                self.order(),
                self.sizes.dp
            );
            let pp_last = self.order.iter().filter(|axis| **axis != Axis::Pp);
            return refuse(rule, vec![join(pp_last.chain(&[Axis::Pp]))]);
        }
        Ok(grid)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        Axis::ALL.iter().map(|axis| self.sizes[*axis]).product()
    }

    /// The size of each axis.
    pub fn sizes(&self) -> Axes {
        self.sizes
    }

    /// The order string with every axis in it.
    pub fn order(&self) -> String {
        join(&self.order)
    }

    /// Where a rank sits. Its coordinate along an axis is its index in its group of that axis.
    ///
    /// # Panics
    /// If `rank` is not below the world size.
    pub fn coords(&self, rank: usize) -> Axes {
        let world = self.world_size();
        assert!(rank < world, "rank {rank} in a world of {world}");
        let mut coords = Axes::all(0);
        for axis in self.order {
            coords[axis] = rank / self.strides[axis] % self.sizes[axis];
        }
        coords
    }

    /// The rank that sits at `coords`.
    ///
    /// # Panics
    /// If a coordinate is not below its axis's size.
    pub fn rank(&self, coords: Axes) -> usize {
        let along = |axis: &Axis| {
            let (at, size) = (coords[*axis], self.sizes[*axis]);
            assert!(at < size, "{axis} coordinate {at} of {size}");
            at * self.strides[*axis]
        };
        self.order.iter().map(along).sum()
    }

    /// Every group of ranks that differ only in `axes`; together they partition the world.
    /// Within a group, and between groups, the inner axes of the order vary fastest.
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let members = self.offsets(|axis| axes.contains(&axis));
        let firsts = self.offsets(|axis| !axes.contains(&axis));
        let group = |first| members.iter().map(|offset| first + offset).collect();
        firsts.into_iter().map(group).collect()
    }

    /// The group of ranks that differ from `rank` only in `axes`, itself included.
    ///
    /// # Panics
    /// If `rank` is not below the world size.
    pub fn group_of(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let mut origin = self.coords(rank);
        axes.iter().for_each(|axis| origin[*axis] = 0);
        let first = self.rank(origin);
        let members = self.offsets(|axis| axes.contains(&axis));
        members.into_iter().map(|offset| first + offset).collect()
    }

    /// The ranks that hold a copy of the word embedding: the first and the last stage of each
    /// pipeline group, one rank where these are the same.
    pub fn embedding_groups(&self) -> Vec<Vec<usize>> {
        let ends = |group: Vec<usize>| match group[..] {
            [first, .., last] => vec![first, last],
            _ => group,
        };
        self.groups(&[Axis::Pp]).into_iter().map(ends).collect()
    }

    /// The ranks that hold the position embedding: the first stage of each pipeline group.
    pub fn position_embedding_groups(&self) -> Vec<Vec<usize>> {
        let pipelines = self.groups(&[Axis::Pp]).into_iter();
        pipelines.map(|group| vec![group[0]]).collect()
    }

    /// The ranks of rank 0's slice along the kept axes, innermost varying fastest.
    fn offsets(&self, keep: impl Fn(Axis) -> bool) -> Vec<usize> {
        let mut offsets = vec![0];
        for axis in self.order.into_iter().filter(|axis| keep(*axis)) {
            let steps = (0..self.sizes[axis]).map(|at| at * self.strides[axis]);
            offsets = steps
                .flat_map(|step| offsets.iter().map(move |offset| offset + step))
                .collect();
        }
        offsets
    }
}

fn join<'a>(order: impl IntoIterator<Item = &'a Axis>) -> String {
    let names: Vec<_> = order.into_iter().map(|axis| axis.name()).collect();
    names.join("-")
}

/// The order in full, repaired where it breaks a rule, and what it breaks.
pub(super) fn parse_order(sizes: &Axes, order: &str) -> ([Axis; 5], Vec<Violation>) {
    // Axes left out go last, in the order in which RankGenerator appends them.
    const APPENDED: [Axis; 5] = [Axis::Tp, Axis::Pp, Axis::Dp, Axis::Ep, Axis::Cp];

    let mut axes = Vec::new();
    let mut rules = Vec::new();
    for word in order.split('-') {
        match Axis::ALL
            .into_iter()
            .find(|axis| axis.name().eq_ignore_ascii_case(word))
        {
            Some(axis) if axes.contains(&axis) => {
                rules.push(format!("order \"{order}\" names {axis} twice"));
            }
            Some(axis) => axes.push(axis),
            None => rules.push(format!(
                "order \"{order}\" names an unknown axis \"{word}\""
            )),
        }
    }
    for axis in APPENDED {
        if !axes.contains(&axis) {
            if sizes[axis] > 1 {
                let size = sizes[axis];
                rules.push(format!(
                    "order \"{order}\" leaves out {axis}, of size {size}"
                ));
            }
            axes.push(axis);
        }
    }
    let repaired: [Axis; 5] = std::array::from_fn(|i| axes[i]);
    let violation = |rule| Violation {
        rule,
        nearest: vec![join(&repaired)],
    };
    (repaired, rules.into_iter().map(violation).collect())
}

fn size_violations(sizes: &Axes) -> Vec<Violation> {
    let mut violations = Vec::new();
    for axis in Axis::ALL.into_iter().filter(|axis| sizes[*axis] == 0) {
        violations.push(Violation {
            rule: format!("the size of {axis} must be at least 1"),
            nearest: vec!["1".into()],
        });
    }
    if sizes.cp > 1 && sizes.ep > 1 {
        violations.push(Violation {
            rule: format!(
                "one grid has either cp or ep above 1, not cp {} and ep {}",
                sizes.cp, sizes.ep
            ),
            nearest: Vec::new(),
        });
    }
    let world = Axis::ALL
        .iter()
        .try_fold(1usize, |n, axis| n.checked_mul(sizes[*axis]));
    if world.is_none() {
        violations.push(Violation {
            rule: format!("the product of the sizes {sizes:?} is too large"),
            nearest: Vec::new(),
        });
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    type Groups = BTreeMap<String, Vec<Vec<usize>>>;

    /// A case of Megatron's own generators; the cases without experts leave those fields out.
    #[derive(Deserialize)]
    struct Case {
        world: usize,
        tp: usize,
        cp: usize,
        ep: usize,
        dp: usize,
        pp: usize,
        etp: Option<usize>,
        edp: Option<usize>,
        order: String,
        effective_order: String,
        decoder: Groups,
        expert: Option<Groups>,
        expert_pp_matches_decoder: Option<bool>,
        embedding_groups: Option<Vec<Vec<usize>>>,
        position_embedding_groups: Option<Vec<Vec<usize>>>,
    }

    fn axis(name: &str) -> Axis {
        let mut all = Axis::ALL.into_iter();
        all.find(|axis| axis.name() == name).unwrap()
    }

    fn assert_groups(grid: &RankGrid, expected: &Groups, case: &str) {
        for (token, groups) in expected {
            let axes: Vec<Axis> = token.split('-').map(axis).collect();
            assert_eq!(grid.groups(&axes), *groups, "{case}: {token}");
            for group in groups {
                for rank in group {
                    assert_eq!(grid.group_of(*rank, &axes), *group, "{case}: {token}");
                }
            }
        }
    }

    #[test]
    fn every_group_is_megatrons() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/fixtures/rank_groups.json"
        );
        let text = std::fs::read_to_string(path).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
        assert_eq!(cases.len(), 28);
        for c in cases {
            let name = format!(
                "tp {} cp {} ep {} dp {} pp {} {}",
                c.tp, c.cp, c.ep, c.dp, c.pp, c.order
            );
            let sizes = Axes {
                tp: c.tp,
                cp: c.cp,
                ep: 1,
                dp: c.dp,
                pp: c.pp,
            };
            let grid = RankGrid::new(sizes, &c.order).unwrap();
            assert_eq!(grid.world_size(), c.world, "{name}");
            // Megatron's newest axis, always of size 1 there, is none of ours.
            assert_eq!(grid.order() + "-gtp_remat", c.effective_order, "{name}");
            assert_groups(&grid, &c.decoder, &name);
            if let Some(groups) = c.embedding_groups {
                assert_eq!(grid.embedding_groups(), groups, "{name}");
            }
            if let Some(groups) = c.position_embedding_groups {
                assert_eq!(grid.position_embedding_groups(), groups, "{name}");
            }
            let (Some(expected), Some(etp), Some(edp)) = (c.expert, c.etp, c.edp) else {
                continue;
            };
            let sizes = Axes {
                tp: etp,
                cp: 1,
                ep: c.ep,
                dp: edp,
                pp: c.pp,
            };
            let experts = RankGrid::new(sizes, &c.order).unwrap();
            assert_groups(&experts, &expected, &name);
            let derived = grid.expert(etp, c.ep);
            assert_eq!(Some(derived.is_ok()), c.expert_pp_matches_decoder, "{name}");
            if let Ok(derived) = derived {
                assert_eq!(derived, experts, "{name}");
            }
        }
    }

    fn violations(result: Result<RankGrid>) -> Vec<Violation> {
        match result.unwrap_err().kind() {
            crate::error::ErrorKind::Config(violations) => violations.clone(),
            kind => panic!("{kind:?}"),
        }
    }

    #[test]
    fn every_violation_is_reported() {
        let sizes = Axes {
            tp: 0,
            dp: 2,
            ..Axes::all(1)
        };
        let found = violations(RankGrid::new(sizes, "tp-tp-xp-pp"));
        let rules: Vec<_> = found.iter().map(|v| v.rule.as_str()).collect();
        assert_eq!(
            rules,
            [
                "order \"tp-tp-xp-pp\" names tp twice",
                "order \"tp-tp-xp-pp\" names an unknown axis \"xp\"",
                "order \"tp-tp-xp-pp\" leaves out dp, of size 2",
                "the size of tp must be at least 1",
            ]
        );
        assert_eq!(found[0].nearest, ["tp-pp-dp-ep-cp"]);

        let both = Axes {
            cp: 2,
            ep: 2,
            ..Axes::all(1)
        };
        assert_eq!(violations(RankGrid::new(both, DEFAULT_ORDER)).len(), 1);
        let huge = Axes {
            tp: usize::MAX,
            dp: 2,
            ..Axes::all(1)
        };
        assert_eq!(violations(RankGrid::new(huge, DEFAULT_ORDER)).len(), 1);
    }

    #[test]
    fn experts_that_do_not_fit_are_refused() {
        let sizes = Axes {
            dp: 4,
            pp: 2,
            ..Axes::all(1)
        };
        let grid = RankGrid::new(sizes, DEFAULT_ORDER).unwrap();
        assert_eq!(violations(grid.expert(1, 3))[0].nearest, ["2", "4"]);
        assert_eq!(violations(grid.expert(1, 0))[0].nearest, ["1"]);
        assert!(violations(grid.expert(0, 1))[0].nearest.is_empty());
        let inner = RankGrid::new(sizes, "tp-cp-ep-pp-dp").unwrap();
        let refused = violations(inner.expert(1, 2));
        assert_eq!(refused[0].nearest, ["tp-cp-ep-dp-pp"]);
    }

    fn any_grid() -> impl Strategy<Value = RankGrid> {
        let order = Just(Axis::ALL.to_vec()).prop_shuffle();
        let sizes = (1..4usize, 1..4usize, 1..4usize, 1..4usize, any::<bool>());
        (sizes, order).prop_map(|((tp, x, dp, pp, experts), order)| {
            let (cp, ep) = if experts { (1, x) } else { (x, 1) };
            RankGrid::new(Axes { tp, cp, ep, dp, pp }, &join(&order)).unwrap()
        })
    }

    proptest! {
        #[test]
        fn groups_partition_the_world(
            grid in any_grid(),
            axes in proptest::sample::subsequence(Axis::ALL.to_vec(), 0..=5),
        ) {
            let groups = grid.groups(&axes);
            let mut ranks: Vec<usize> = groups.concat();
            ranks.sort_unstable();
            prop_assert!(ranks.into_iter().eq(0..grid.world_size()));
            for group in &groups {
                prop_assert!(group.is_sorted());
                for rank in group {
                    prop_assert_eq!(&grid.group_of(*rank, &axes), group);
                    prop_assert_eq!(grid.rank(grid.coords(*rank)), *rank);
                }
            }
            if let [axis] = axes[..] {
                for group in &groups {
                    for (index, rank) in group.iter().enumerate() {
                        prop_assert_eq!(grid.coords(*rank)[axis], index);
                    }
                }
            }
        }
    }
}
