//! The rules between a layout, a model and a batch, checked together: every violation at once.
//!
//! They are those of `validate_args` in Megatron-LM's `megatron/training/arguments.py`, of
//! `initialize_model_parallel` and of the layers' own assertions. Where a rule binds the layout to
//! the model, the model is taken as given and the legal values offered are the layout's.

use super::nearest::{divisors, gcd, multiples};
use super::{Axes, BatchShape, Layout, ModelShape, ParallelConfig, PipelineSchedule, RankGrid};
use super::{grid, padded_vocab_size, schedule_violations, stages};
use crate::error::{Error, Result, Violation};

/// The largest value of any size: token ids are 32-bit, and products of two sizes stay exact.
const MAX_SIZE: usize = i32::MAX as usize;

/// Checks every rule and derives the layout.
///
/// # Errors
/// A configuration error with every violation, those of [`unsupported`] included.
pub fn validate(
    parallel: &ParallelConfig,
    model: &ModelShape,
    batch: &BatchShape,
) -> Result<Layout> {
    let world = World::of(parallel);
    let sizes = Axes {
        tp: parallel.tensor_model_parallel_size,
        cp: parallel.context_parallel_size,
        ep: 1,
        dp: world.dp.unwrap_or(1),
        pp: parallel.pipeline_model_parallel_size,
    };

    let mut violations = out_of_range(parallel, model, batch);
    violations.extend(world.violation(parallel));
    violations.extend(grid::parse_order(&sizes, &parallel.order).1);
    violations.extend(model_rules(model));
    violations.extend(tensor_rules(parallel, model, &world));
    // In a world that does not divide, one rank's rule is all that is known.
    violations.extend(batch_violation(batch, world.dp.unwrap_or(1)));
    violations.extend(unsupported(parallel));
    let (virtual_stages, stages) = match stages::divide(parallel, model) {
        Ok(stages) => stages,
        Err(broken) => {
            violations.extend(broken);
            Default::default()
        }
    };
    if !violations.is_empty() {
        return Err(Error::config(violations));
    }
    let layout = Layout {
        grid: RankGrid::new(sizes, &parallel.order)?,
        ep: parallel.expert_model_parallel_size,
        dp: sizes.dp,
        num_microbatches: batch.global_batch_size / (batch.micro_batch_size * sizes.dp),
        padded_vocab_size: padded_vocab_size(
            model.vocab_size,
            model.make_vocab_size_divisible_by,
            sizes.tp,
        ),
        stages,
        virtual_stages,
        pipeline_schedule: parallel
            .pipeline_schedule
            .unwrap_or(PipelineSchedule::default_for(virtual_stages)),
        group_size: parallel.microbatch_group_size_per_virtual_pipeline_stage,
    };
    // These build on all the others: the micro batches of a step are a whole number.
    let violations = schedule_violations(layout.pipeline_schedule, &layout.pipeline());
    match violations.is_empty() {
        true => Ok(layout),
        false => Err(Error::config(violations)),
    }
}

/// What the configuration asks for that this version does not have.
pub fn unsupported(parallel: &ParallelConfig) -> Vec<Violation> {
    let sizes = [
        (parallel.context_parallel_size, "context"),
        (parallel.expert_model_parallel_size, "expert"),
    ];
    let above_one = sizes.into_iter().filter(|(size, _)| *size > 1);
    let violation = |(_, kind)| {
        let rule = format!("{kind} parallelism is not available in this version");
        Violation::new(rule, ["1"])
    };
    above_one.map(violation).collect()
}

/// How the world divides, as far as the configuration says.
struct World {
    /// tp * pp * cp: the ranks of one copy of the model.
    model_parallel: Option<usize>,
    /// The world size asked for, or one copy's.
    size: Option<usize>,
    /// `None` where the world is not whole copies.
    dp: Option<usize>,
}

impl World {
    fn of(parallel: &ParallelConfig) -> Self {
        let model_parallel = parallel
            .tensor_model_parallel_size
            .checked_mul(parallel.pipeline_model_parallel_size)
            .and_then(|n| n.checked_mul(parallel.context_parallel_size));
        let size = parallel.world_size.or(model_parallel);
        let dp = match (size, model_parallel) {
            (Some(size), Some(copy)) if size.is_multiple_of(copy) => size.checked_div(copy),
            _ => None,
        };
        World {
            model_parallel,
            size,
            dp,
        }
    }

    fn violation(&self, parallel: &ParallelConfig) -> Option<Violation> {
        // A size of 0 is reported by itself.
        if self.dp.is_some() || self.size == Some(0) || self.model_parallel == Some(0) {
            return None;
        }
        let world = self.size.map_or("of all ranks".into(), |n| n.to_string());
        let nearest = match (self.size, self.model_parallel) {
            (Some(size), Some(copy)) => multiples(size, copy),
            _ => Vec::new(),
        };
        Some(Violation {
            rule: format!(
                "world_size {world} must be a multiple of tensor_model_parallel_size {} times \
                 pipeline_model_parallel_size {} times context_parallel_size {}",
                parallel.tensor_model_parallel_size,
                parallel.pipeline_model_parallel_size,
                parallel.context_parallel_size
            ),
            nearest,
        })
    }
}

/// Sizes that are 0, or too large to reckon with. The other rules take a 0 as fitting, so that it
/// is reported once.
fn out_of_range(
    parallel: &ParallelConfig,
    model: &ModelShape,
    batch: &BatchShape,
) -> Vec<Violation> {
    let named = [
        (
            "tensor_model_parallel_size",
            parallel.tensor_model_parallel_size,
        ),
        (
            "pipeline_model_parallel_size",
            parallel.pipeline_model_parallel_size,
        ),
        ("context_parallel_size", parallel.context_parallel_size),
        (
            "expert_model_parallel_size",
            parallel.expert_model_parallel_size,
        ),
        ("world_size", parallel.world_size.unwrap_or(1)),
        ("num_layers", model.num_layers),
        ("hidden_size", model.hidden_size),
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.num_query_groups),
        ("seq_length", model.seq_length),
        ("max_position_embeddings", model.max_position_embeddings),
        ("ffn_hidden_size", model.ffn_hidden_size),
        ("vocab_size", model.vocab_size),
        (
            "make_vocab_size_divisible_by",
            model.make_vocab_size_divisible_by,
        ),
        ("micro_batch_size", batch.micro_batch_size),
        ("global_batch_size", batch.global_batch_size),
    ];
    let outside = named
        .into_iter()
        .filter(|(_, size)| !(1..=MAX_SIZE).contains(size));
    let violation = |(name, size): (&str, usize)| Violation {
        rule: format!("{name} {size} must be at least 1 and at most {MAX_SIZE}"),
        nearest: vec![size.clamp(1, MAX_SIZE).to_string()],
    };
    outside.map(violation).collect()
}

/// Rules within the model.
fn model_rules(model: &ModelShape) -> Vec<Violation> {
    let mut violations = Vec::new();
    let (heads, groups) = (model.num_attention_heads, model.num_query_groups);
    if model.kv_channels.is_none() && !divides(heads, model.hidden_size) {
        violations.push(Violation {
            rule: format!(
                "hidden_size {} must be a multiple of num_attention_heads {heads}",
                model.hidden_size
            ),
            nearest: multiples(model.hidden_size, heads),
        });
    }
    if !divides(groups, heads) {
        violations.push(Violation {
            rule: format!("num_query_groups {groups} must divide num_attention_heads {heads}"),
            nearest: divisors(groups, heads),
        });
    }
    let (seq, positions) = (model.seq_length, model.max_position_embeddings);
    if seq > positions && positions > 0 {
        violations.push(Violation {
            rule: format!("seq_length {seq} must be at most max_position_embeddings {positions}"),
            nearest: vec![positions.to_string()],
        });
    }
    violations
}

/// What tensor and sequence parallelism split must split evenly.
fn tensor_rules(parallel: &ParallelConfig, model: &ModelShape, world: &World) -> Vec<Violation> {
    let tp = parallel.tensor_model_parallel_size;
    let mut split = vec![
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.num_query_groups),
        ("ffn_hidden_size", model.ffn_hidden_size),
    ];
    if parallel.sequence_parallel {
        split.push(("seq_length", model.seq_length));
    }
    // A value is offered only if it keeps all of these rules, and the world in whole copies.
    let room = world.dp.map_or(0, |dp| dp.saturating_mul(tp));
    let whole = split.iter().fold(0, |whole, (_, size)| gcd(whole, *size));
    let whole = if parallel.world_size.is_some() {
        gcd(whole, room)
    } else {
        whole
    };

    let broken = split.iter().filter(|(_, size)| !divides(tp, *size));
    let mut violations: Vec<_> = broken
        .map(|(name, size)| Violation {
            rule: format!("tensor_model_parallel_size {tp} must divide {name} {size}"),
            nearest: divisors(tp, whole),
        })
        .collect();
    if parallel.sequence_parallel && tp == 1 {
        violations.push(Violation {
            rule: "sequence_parallel needs tensor_model_parallel_size above 1: it splits the sequence \
                   over the tensor-parallel ranks"
                .into(),
            nearest: vec!["false".into()],
        });
    }
    violations
}

/// Every one of `dp` data-parallel ranks runs the same whole number of microbatches.
pub(crate) fn batch_violation(batch: &BatchShape, dp: usize) -> Option<Violation> {
    let (micro, global) = (batch.micro_batch_size, batch.global_batch_size);
    let unit = micro.saturating_mul(dp);
    if divides(unit, global) {
        return None;
    }
    Some(Violation {
        rule: format!(
            "global_batch_size {global} must be a multiple of micro_batch_size {micro} times the \
             data-parallel size {dp}"
        ),
        nearest: multiples(global, unit),
    })
}

fn divides(part: usize, whole: usize) -> bool {
    part == 0 || whole.is_multiple_of(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use proptest::prelude::*;

    fn model() -> ModelShape {
        ModelShape {
            num_layers: 4,
            hidden_size: 96,
            num_attention_heads: 12,
            num_query_groups: 6,
            kv_channels: None,
            seq_length: 32,
            max_position_embeddings: 32,
            ffn_hidden_size: 384,
            vocab_size: 100,
            make_vocab_size_divisible_by: 64,
        }
    }

    fn parallel(tp: usize, world_size: impl Into<Option<usize>>) -> ParallelConfig {
        ParallelConfig {
            tensor_model_parallel_size: tp,
            world_size: world_size.into(),
            ..Default::default()
        }
    }

    const BATCH: BatchShape = BatchShape {
        micro_batch_size: 2,
        global_batch_size: 8,
    };

    /// The violations as the user reads them.
    fn broken(parallel: &ParallelConfig, model: &ModelShape, batch: &BatchShape) -> Vec<String> {
        match validate(parallel, model, batch).unwrap_err().kind() {
            ErrorKind::Config(violations) => violations.iter().map(|v| v.to_string()).collect(),
            kind => panic!("{kind:?}"),
        }
    }

    #[test]
    fn a_legal_layout() {
        let layout = validate(&parallel(2, 4), &model(), &BATCH).unwrap();
        assert_eq!(layout.to_string(), "tp=2 pp=1 dp=2 (world 4)");
        assert_eq!(layout.num_microbatches, 2);
        assert_eq!(layout.padded_vocab_size, 128);
        let layout = validate(&parallel(3, None), &model(), &BATCH).unwrap();
        assert_eq!((layout.dp, layout.padded_vocab_size), (1, 192));
    }

    #[test]
    fn tensor_parallel_sizes_offered_keep_every_rule() {
        // 12 heads, 6 groups, ffn 384: common divisors 1, 2, 3, 6.
        assert_eq!(
            broken(&parallel(4, None), &model(), &BATCH),
            ["tensor_model_parallel_size 4 must divide num_query_groups 6; nearest legal: 3, 6"]
        );
        // A given world of 16 leaves 1 and 2 of these.
        assert_eq!(
            broken(&parallel(4, 16), &model(), &BATCH)[0],
            "tensor_model_parallel_size 4 must divide num_query_groups 6; nearest legal: 2"
        );
        let sequence_parallel = ParallelConfig {
            sequence_parallel: true,
            ..parallel(3, None)
        };
        assert_eq!(
            broken(&sequence_parallel, &model(), &BATCH),
            ["tensor_model_parallel_size 3 must divide seq_length 32; nearest legal: 2",]
        );
    }

    #[test]
    fn every_violation_is_reported_at_once() {
        let parallel = ParallelConfig {
            tensor_model_parallel_size: 5,
            pipeline_model_parallel_size: 3,
            context_parallel_size: 2,
            expert_model_parallel_size: 2,
            sequence_parallel: true,
            world_size: Some(40),
            order: "tp-pp".into(),
            ..ParallelConfig::default()
        };
        let model = ModelShape {
            hidden_size: 100,
            num_query_groups: 8,
            seq_length: 33,
            ffn_hidden_size: 384,
            vocab_size: 0,
            make_vocab_size_divisible_by: 0,
            ..model()
        };
        let batch = BatchShape {
            micro_batch_size: 3,
            global_batch_size: 8,
        };
        let max = MAX_SIZE;
        assert_eq!(
            broken(&parallel, &model, &batch),
            [
                &*format!("vocab_size 0 must be at least 1 and at most {max}; nearest legal: 1"),
                &*format!(
                    "make_vocab_size_divisible_by 0 must be at least 1 and at most {max}; nearest \
                     legal: 1"
                ),
                "world_size 40 must be a multiple of tensor_model_parallel_size 5 times \
                 pipeline_model_parallel_size 3 times context_parallel_size 2; nearest legal: 30, 60",
                "order \"tp-pp\" leaves out cp, of size 2; nearest legal: tp-pp-dp-ep-cp",
                "hidden_size 100 must be a multiple of num_attention_heads 12; nearest legal: 96, \
                 108",
                "num_query_groups 8 must divide num_attention_heads 12; nearest legal: 6, 12",
                "seq_length 33 must be at most max_position_embeddings 32; nearest legal: 32",
                "tensor_model_parallel_size 5 must divide num_attention_heads 12; nearest legal: 1",
                "tensor_model_parallel_size 5 must divide num_query_groups 8; nearest legal: 1",
                "tensor_model_parallel_size 5 must divide ffn_hidden_size 384; nearest legal: 1",
                "tensor_model_parallel_size 5 must divide seq_length 33; nearest legal: 1",
                "global_batch_size 8 must be a multiple of micro_batch_size 3 times the \
                 data-parallel size 1; nearest legal: 6, 9",
                "context parallelism is not available in this version; nearest legal: 1",
                "expert parallelism is not available in this version; nearest legal: 1",
                "pipeline_model_parallel_size 3 must divide num_layers 4; nearest legal: 2, 4",
            ]
        );
    }

    #[test]
    fn sequence_parallel_needs_ranks() {
        let config = ParallelConfig {
            sequence_parallel: true,
            ..Default::default()
        };
        let found = broken(&config, &model(), &BATCH);
        assert!(found[0].starts_with("sequence_parallel needs"), "{found:?}");
    }

    #[test]
    fn a_global_batch_below_one_step_of_all_ranks() {
        let parallel = parallel(2, 16);
        assert_eq!(
            broken(&parallel, &model(), &BATCH),
            [
                "global_batch_size 8 must be a multiple of micro_batch_size 2 times the \
              data-parallel size 8; nearest legal: 16"
            ]
        );
    }

    /// Mostly small sizes, some of them 0 or too large.
    fn size() -> impl Strategy<Value = usize> {
        prop_oneof![8 => 1..13usize, 1 => Just(0), 1 => Just(usize::MAX)]
    }

    proptest! {
        #[test]
        fn no_configuration_panics_and_offers_are_legal(
            (tp, pp, cp, ep) in (size(), size(), size(), size()),
            world_size in proptest::option::of(size()),
            sequence_parallel: bool,
            sizes in proptest::collection::vec(size(), 11),
        ) {
            let parallel = ParallelConfig {
                tensor_model_parallel_size: tp,
                pipeline_model_parallel_size: pp,
                context_parallel_size: cp,
                expert_model_parallel_size: ep,
                sequence_parallel,
                world_size,
                ..Default::default()
            };
            let model = ModelShape {
                num_layers: sizes[0],
                hidden_size: sizes[1],
                num_attention_heads: sizes[2],
                num_query_groups: sizes[3],
                kv_channels: None,
                seq_length: sizes[4],
                max_position_embeddings: sizes[5],
                ffn_hidden_size: sizes[6],
                vocab_size: sizes[7],
                make_vocab_size_divisible_by: sizes[8],
            };
            let batch = BatchShape {
                micro_batch_size: sizes[9],
                global_batch_size: sizes[10],
            };
            if let Ok(layout) = validate(&parallel, &model, &batch) {
                prop_assert_eq!(
                    layout.num_microbatches * layout.dp * batch.micro_batch_size,
                    batch.global_batch_size
                );
                prop_assert_eq!(layout.padded_vocab_size % tp, 0);
            }
            let rules = |parallel: &ParallelConfig| {
                tensor_rules(parallel, &model, &World::of(parallel))
            };
            for offer in rules(&parallel).iter().flat_map(|v| &v.nearest) {
                if let Ok(tp) = offer.parse() {
                    let offered = ParallelConfig {
                        tensor_model_parallel_size: tp,
                        sequence_parallel: sequence_parallel && tp > 1,
                        ..parallel.clone()
                    };
                    prop_assert!(rules(&offered).is_empty(), "{:?}", offered);
                    if World::of(&parallel).dp.is_some() {
                        prop_assert!(World::of(&offered).dp.is_some(), "{:?}", offered);
                    }
                }
            }
        }
    }
}
