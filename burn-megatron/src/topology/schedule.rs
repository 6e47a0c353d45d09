//! The schedules that a pipeline can run, and what each asks of its shape.
//!
//! Megatron-LM's `validate_args` and `core/pipeline_parallel/schedules.py`.

use crate::error::Violation;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The order in which a pipeline runs its micro batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// Every forward, then every backward: holds all micro batches at once.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward: holds at most as many micro batches as there are ranks.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with several stages on each rank: a smaller bubble, more messages.
    #[serde(rename = "interleaved")]
    Interleaved,
}

impl PipelineSchedule {
    /// The schedule of a pipeline with `virtual_stages` on each rank, unless told otherwise.
    pub fn default_for(virtual_stages: usize) -> Self {
        match virtual_stages {
            1 => PipelineSchedule::OneForwardOneBackward,
            _ => PipelineSchedule::Interleaved,
        }
    }
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PipelineSchedule::GPipe => "gpipe",
            PipelineSchedule::OneForwardOneBackward => "1f1b",
            PipelineSchedule::Interleaved => "interleaved",
        })
    }
}

/// What a schedule is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineShape {
    /// Pipeline ranks (`p`).
    pub ranks: usize,
    /// Stages on each rank (`v`), called its chunks. Stage `s` is chunk `s / p` of rank `s % p`.
    pub virtual_stages: usize,
    /// Micro batches of a step (`m`).
    pub microbatches: usize,
    /// Micro batches that a chunk runs in a row before the next chunk's turn; `p` where not given.
    pub group_size: Option<usize>,
}

impl PipelineShape {
    /// `p` ranks with one stage each.
    pub fn new(ranks: usize, microbatches: usize) -> Self {
        PipelineShape {
            ranks,
            virtual_stages: 1,
            microbatches,
            group_size: None,
        }
    }

    /// The same with `virtual_stages` on each rank.
    pub fn with_virtual_stages(self, virtual_stages: usize) -> Self {
        PipelineShape {
            virtual_stages,
            ..self
        }
    }

    /// Stages of the whole pipeline.
    pub fn num_stages(&self) -> usize {
        self.ranks * self.virtual_stages
    }

    /// The bubble of equal stages without time for messages, idle in parts of computing time:
    /// `(p-1)/(v m)`. (Narayanan et al. 2021, section 2.2.)
    pub fn equal_bubble(&self) -> f64 {
        (self.ranks - 1) as f64 / (self.virtual_stages * self.microbatches) as f64
    }

    /// Micro batches that a chunk runs in a row.
    pub fn group_size(&self) -> usize {
        self.group_size.unwrap_or(self.ranks)
    }
}

/// What `schedule` cannot run of `shape`: Megatron's rules for interleaving.
pub fn schedule_violations(schedule: PipelineSchedule, shape: &PipelineShape) -> Vec<Violation> {
    let PipelineShape {
        ranks: p,
        virtual_stages: v,
        microbatches: m,
        ..
    } = *shape;
    let mut violations = Vec::new();
    for (name, size) in [("ranks", p), ("virtual stages", v), ("micro batches", m)] {
        if size == 0 {
            let rule = format!("a pipeline has at least 1 of {name}, not 0");
            violations.push(Violation::new(rule, ["1"]));
        }
    }
    if !violations.is_empty() {
        return violations;
    }
    if schedule != PipelineSchedule::Interleaved {
        if v > 1 {
            let rule = format!("schedule {schedule} runs one virtual stage on each rank, not {v}");
            violations.push(Violation::new(
                rule,
                ["1 virtual stage", "schedule interleaved"],
            ));
        }
        if shape.group_size.is_some() {
            let rule = format!(
                "microbatch_group_size_per_virtual_pipeline_stage is for schedule interleaved; \
                 {schedule} has no groups"
            );
            violations.push(Violation::new(rule, ["none", "schedule interleaved"]));
        }
        return violations;
    }
    if p == 1 {
        let rule = "schedule interleaved needs a pipeline of at least 2 ranks, not 1";
        violations.push(Violation::new(rule, ["2"]));
        return violations;
    }
    let group = shape.group_size();
    if group < p || group > m {
        let rule = match shape.group_size {
            Some(group) => format!(
                "microbatch_group_size_per_virtual_pipeline_stage {group} must lie between the \
                 pipeline size {p} and the {m} micro batches of a step"
            ),
            None => format!(
                "schedule interleaved runs groups of {p} micro batches (the pipeline size), but a \
                 step has {m}"
            ),
        };
        let nearest = match (shape.group_size, m < p) {
            (Some(_), false) => vec![group.clamp(p, m).to_string()],
            _ => vec![format!("{p} micro batches")],
        };
        violations.push(Violation { rule, nearest });
    } else if (1..p).contains(&(m % group)) {
        // The last, smaller group has to fill the pipeline as well.
        let legal = |m: &usize| *m >= group && !(1..p).contains(&(m % group));
        let below = (group..m).rev().find(legal);
        let above = (m + 1..).find(legal);
        let rule = format!(
            "schedule interleaved runs the {m} micro batches of a step in groups of {group}, and \
             the {} left over are fewer than the {p} ranks",
            m % group
        );
        let nearest = [below, above].into_iter().flatten();
        let nearest = nearest.map(|m| format!("{m} micro batches")).collect();
        violations.push(Violation { rule, nearest });
    }
    violations
}
