//! When each rank did what, simulated or measured, and what follows from it.

use super::schedule::Action;

/// One action with its time, in the timeline's unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    pub action: Action,
    pub start: f64,
    pub end: f64,
}

impl Span {
    /// How long it took.
    pub fn duration(&self) -> f64 {
        self.end - self.start
    }
}

/// What each rank of a pipeline did and when, one list per rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timeline {
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// The forwards and backwards of a rank.
    pub fn compute(&self, rank: usize) -> impl Iterator<Item = &Span> {
        self.ranks[rank]
            .iter()
            .filter(|span| span.action.kind.computes())
    }

    /// Start of the first computation.
    pub fn start(&self) -> f64 {
        let starts = self.all_compute().map(|span| span.start);
        starts.reduce(f64::min).unwrap_or(0.0)
    }

    /// From the start of the first computation on any rank to the end of the last.
    pub fn makespan(&self) -> f64 {
        let ends = self.all_compute().map(|span| span.end);
        ends.reduce(f64::max).unwrap_or(0.0) - self.start()
    }

    /// The time that `rank` computed.
    pub fn busy(&self, rank: usize) -> f64 {
        self.compute(rank).map(Span::duration).sum()
    }

    /// The ranks' idle time in parts of their computing time: Megatron's bubble fraction, `(p-1)/m`
    /// for 1F1B over equal stages.
    pub fn bubble(&self) -> f64 {
        let busy: f64 = (0..self.ranks.len()).map(|rank| self.busy(rank)).sum();
        match busy > 0.0 {
            true => (self.ranks.len() as f64 * self.makespan() - busy) / busy,
            false => 0.0,
        }
    }

    fn all_compute(&self) -> impl Iterator<Item = &Span> {
        (0..self.ranks.len()).flat_map(|rank| self.compute(rank))
    }
}
