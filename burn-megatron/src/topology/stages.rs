//! How the layers divide into pipeline stages.
//!
//! Megatron-LM's `transformer_block.py` (`get_num_layers_to_build`) and `validate_args`.

use super::nearest::{divisors, multiples};
use super::{ModelShape, ParallelConfig};
use crate::error::{Error, Result, Violation};
use std::ops::Range;

/// The most stages of a pipeline: far above any machine, and little memory.
const MAX_STAGES: usize = 1 << 16;

/// The layers of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageLayers {
    /// Its place in the pipeline, from 0.
    pub stage: usize,
    /// Stages of the whole pipeline.
    pub num_stages: usize,
    /// Its layers, numbered from 0 over the whole model.
    pub layers: Range<usize>,
}

impl StageLayers {
    /// A model that is one stage.
    pub fn whole(num_layers: usize) -> Self {
        StageLayers {
            stage: 0,
            num_stages: 1,
            layers: 0..num_layers,
        }
    }

    /// `num_layers` layers in equal stages, in pipeline order.
    ///
    /// # Errors
    /// If they do not divide, with the numbers that do.
    pub fn equal(num_layers: usize, num_stages: usize) -> Result<Vec<Self>> {
        let counts = match num_layers.checked_div(num_stages) {
            Some(each) if each > 0 && num_layers.is_multiple_of(num_stages) => {
                vec![each; num_stages]
            }
            _ => {
                return Err(Error::config(vec![Violation {
                    rule: format!("{num_stages} pipeline stages must divide {num_layers} layers"),
                    nearest: divisors(num_stages, num_layers),
                }]));
            }
        };
        Ok(StageLayers::of_counts(counts))
    }

    /// Stages of that many layers each, in pipeline order.
    fn of_counts(counts: Vec<usize>) -> Vec<Self> {
        let (num_stages, mut end) = (counts.len(), 0);
        let stages = counts.into_iter().enumerate().map(|(stage, count)| {
            let layers = end..end + count;
            end = layers.end;
            StageLayers {
                stage,
                num_stages,
                layers,
            }
        });
        stages.collect()
    }

    /// Whether tokens enter here.
    pub fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// Whether the loss is computed here.
    pub fn is_last(&self) -> bool {
        self.stage + 1 == self.num_stages
    }
}

/// A value, or all the rules that were broken.
type Broken<T> = std::result::Result<T, Vec<Violation>>;

/// The stages on each rank, and the layers of every stage in pipeline order.
pub(super) fn divide(
    parallel: &ParallelConfig,
    model: &ModelShape,
) -> Broken<(usize, Vec<StageLayers>)> {
    if parallel.pipeline_model_parallel_size == 0 || model.num_layers == 0 {
        // Reported as a size out of range.
        return Ok((1, Vec::new()));
    }
    let v = virtual_stages(parallel, model.num_layers).map_err(|broken| vec![broken])?;
    let p = parallel.pipeline_model_parallel_size;
    // A stage has a layer, or what counts as one.
    let [embedding, loss] = counted_ends(parallel);
    let most = (model.num_layers + embedding + loss).min(MAX_STAGES);
    if p.saturating_mul(v) > most {
        return Err(vec![Violation {
            rule: format!(
                "pipeline_model_parallel_size {p} times {v} virtual stage(s) must be at most \
                 {most}, for num_layers {}",
                model.num_layers
            ),
            nearest: match (v, most / v) {
                (1, _) => divisors(p, most),
                (_, 0) => vec![format!("{most} virtual stages")],
                (_, ranks) => vec![ranks.to_string()],
            },
        }]);
    }
    Ok((v, split(parallel, model, v)?))
}

/// Virtual stages on each rank, as the flags say; 1 where they say nothing.
fn virtual_stages(
    parallel: &ParallelConfig,
    num_layers: usize,
) -> std::result::Result<usize, Violation> {
    let p = parallel.pipeline_model_parallel_size;
    match (
        parallel.num_virtual_stages_per_pipeline_rank,
        parallel.num_layers_per_virtual_pipeline_stage,
    ) {
        (None, None) => Ok(1),
        (Some(_), Some(_)) => Err(Violation {
            rule: "give num_virtual_stages_per_pipeline_rank or \
                   num_layers_per_virtual_pipeline_stage, not both"
                .into(),
            nearest: Vec::new(),
        }),
        (Some(0), None) => Err(Violation::new(
            "num_virtual_stages_per_pipeline_rank is 0, but must be at least 1",
            ["1"],
        )),
        (Some(v), None) => Ok(v),
        (None, Some(_)) if gives_ends(parallel) || counts_ends(parallel) => Err(Violation::new(
            "num_layers_per_virtual_pipeline_stage is for equal stages",
            ["num_virtual_stages_per_pipeline_rank"],
        )),
        (None, Some(layers)) => {
            let per_rank = num_layers / p;
            match per_rank.checked_div(layers) {
                Some(v) if v > 0 && per_rank.is_multiple_of(layers) => Ok(v),
                _ => Err(Violation {
                    rule: format!(
                        "num_layers_per_virtual_pipeline_stage {layers} must divide the {per_rank} \
                         layers of a pipeline rank"
                    ),
                    nearest: divisors(layers, per_rank),
                }),
            }
        }
    }
}

/// Whether the first or the last rank has a number of layers of its own.
fn gives_ends(parallel: &ParallelConfig) -> bool {
    parallel.decoder_first_pipeline_num_layers.is_some()
        || parallel.decoder_last_pipeline_num_layers.is_some()
}

fn counts_ends(parallel: &ParallelConfig) -> bool {
    counted_ends(parallel) != [0, 0]
}

/// The layers of every stage, in pipeline order. A layer count that does not divide is refused:
/// none is ever left out. (Public complaint: Megatron-LM #1304.)
fn split(
    parallel: &ParallelConfig,
    model: &ModelShape,
    virtual_stages: usize,
) -> Broken<Vec<StageLayers>> {
    let v = virtual_stages;
    let counts = match (gives_ends(parallel), counts_ends(parallel)) {
        (true, true) => Err(vec![Violation::new(
            "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers cannot be \
             combined with account_for_embedding_in_pipeline_split or \
             account_for_loss_in_pipeline_split",
            ["one or the other"],
        )]),
        (true, false) => given_ends(parallel, model.num_layers, v),
        (false, _) => equal_shares(parallel, model.num_layers, v),
    }?;
    debug_assert_eq!(counts.iter().sum::<usize>(), model.num_layers);
    Ok(StageLayers::of_counts(counts))
}

/// Whether the embedding counts as a layer, and whether the loss does.
fn counted_ends(parallel: &ParallelConfig) -> [usize; 2] {
    [
        parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
    ]
    .map(usize::from)
}

/// Equal stages; the embedding and the loss take the place of a layer where they are to count.
fn equal_shares(parallel: &ParallelConfig, num_layers: usize, v: usize) -> Broken<Vec<usize>> {
    let p = parallel.pipeline_model_parallel_size;
    let [embedding, loss] = counted_ends(parallel);
    let (total, stages) = (num_layers + embedding + loss, p * v);
    if !total.is_multiple_of(stages) {
        let counted = match embedding + loss {
            0 => String::new(),
            1 => " plus 1 for the embedding or the loss".into(),
            _ => " plus 2 for the embedding and the loss".into(),
        };
        let virtual_stages = match v {
            1 => String::new(),
            _ => format!(" times {v} virtual stages"),
        };
        return Err(vec![Violation {
            rule: format!(
                "pipeline_model_parallel_size {p}{virtual_stages} must divide num_layers \
                 {num_layers}{counted}"
            ),
            nearest: match v {
                1 => divisors(p, total),
                _ => (multiples(num_layers, stages).into_iter())
                    .filter(|_| embedding + loss == 0)
                    .map(|layers| format!("{layers} layers"))
                    .collect(),
            },
        }]);
    }
    let mut counts = vec![total / stages; stages];
    let last = stages - 1;
    counts[0] -= embedding;
    // One stage holds both ends: a layer counts once for each.
    counts[last] = counts[last].checked_sub(loss).ok_or_else(|| {
        let rule = "with the embedding and the loss counted, no layer is left";
        vec![Violation::new(rule, ["fewer stages"])]
    })?;
    Ok(counts)
}

/// Given numbers of layers on the first and last rank; the others share the rest equally.
fn given_ends(parallel: &ParallelConfig, num_layers: usize, v: usize) -> Broken<Vec<usize>> {
    let p = parallel.pipeline_model_parallel_size;
    let (first, last) = (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    );
    if p < 2 {
        let rule = "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers need \
                    pipeline_model_parallel_size above 1";
        return Err(vec![Violation::new(rule, ["2"])]);
    }
    let mut violations = Vec::new();
    let named = [
        ("decoder_first_pipeline_num_layers", first),
        ("decoder_last_pipeline_num_layers", last),
    ];
    for (name, layers) in named {
        let Some(layers) = layers else { continue };
        if layers == 0 || !layers.is_multiple_of(v) {
            let nearest = multiples(layers, v);
            let rule =
                format!("{name} {layers} must be a multiple of the {v} virtual stages of a rank");
            violations.push(Violation { rule, nearest });
        }
    }
    let ends = first.unwrap_or(0) + last.unwrap_or(0);
    let others = p - usize::from(first.is_some()) - usize::from(last.is_some());
    let rest = num_layers.checked_sub(ends);
    let share = match (rest, others) {
        (Some(0), 0) => Some(0),
        (Some(rest), 1..) if rest > 0 && rest.is_multiple_of(others * v) => {
            Some(rest / (others * v))
        }
        _ => None,
    };
    if share.is_none() {
        violations.push(Violation {
            rule: format!(
                "num_layers {num_layers} less the {ends} of the first and last pipeline rank must \
                 divide over the other {others} ranks of {v} virtual stage(s)"
            ),
            nearest: match others {
                0 => vec![format!("{ends} layers")],
                _ => (multiples(rest.unwrap_or(0), others * v).into_iter())
                    .filter_map(|rest| rest.parse::<usize>().ok())
                    .map(|rest| format!("{} layers", rest + ends))
                    .collect(),
            },
        });
    }
    match (share, violations.is_empty()) {
        (Some(share), true) => {
            let of_rank = |rank: usize| match rank {
                0 => first.map_or(share, |n| n / v),
                _ if rank + 1 == p => last.map_or(share, |n| n / v),
                _ => share,
            };
            Ok((0..p * v).map(|stage| of_rank(stage % p)).collect())
        }
        _ => Err(violations),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelShape = ModelShape {
        num_layers: 8,
        hidden_size: 8,
        num_attention_heads: 1,
        num_query_groups: 1,
        kv_channels: None,
        seq_length: 8,
        max_position_embeddings: 8,
        ffn_hidden_size: 8,
        vocab_size: 8,
        make_vocab_size_divisible_by: 1,
    };

    fn parallel(pp: usize) -> ParallelConfig {
        ParallelConfig {
            pipeline_model_parallel_size: pp,
            ..ParallelConfig::default()
        }
    }

    /// Layers of every stage, in pipeline order.
    fn counts(parallel: &ParallelConfig, num_layers: usize) -> Vec<usize> {
        let model = ModelShape {
            num_layers,
            ..MODEL
        };
        let (v, stages) = divide(parallel, &model).unwrap();
        assert_eq!(stages.len(), v * parallel.pipeline_model_parallel_size);
        let mut next = 0;
        for (i, stage) in stages.iter().enumerate() {
            assert_eq!((stage.stage, stage.layers.start), (i, next));
            next = stage.layers.end;
        }
        assert_eq!(next, num_layers, "no layer is left out");
        stages.iter().map(|stage| stage.layers.len()).collect()
    }

    /// The broken rules as the user reads them.
    fn broken(parallel: &ParallelConfig, num_layers: usize) -> String {
        let model = ModelShape {
            num_layers,
            ..MODEL
        };
        let violations = divide(parallel, &model).unwrap_err();
        let lines = violations.iter().map(ToString::to_string);
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn equal_stages() {
        assert_eq!(counts(&parallel(1), 8), [8]);
        assert_eq!(counts(&parallel(4), 8), [2; 4]);
        for config in [
            ParallelConfig {
                num_virtual_stages_per_pipeline_rank: Some(2),
                ..parallel(2)
            },
            ParallelConfig {
                num_layers_per_virtual_pipeline_stage: Some(2),
                ..parallel(2)
            },
        ] {
            assert_eq!(counts(&config, 8), [2; 4]);
        }
    }

    #[test]
    fn given_first_and_last_ranks() {
        let config = |first, last, v| ParallelConfig {
            decoder_first_pipeline_num_layers: first,
            decoder_last_pipeline_num_layers: last,
            num_virtual_stages_per_pipeline_rank: v,
            ..parallel(4)
        };
        assert_eq!(counts(&config(Some(1), None, None), 10), [1, 3, 3, 3]);
        assert_eq!(counts(&config(None, Some(1), None), 10), [3, 3, 3, 1]);
        assert_eq!(counts(&config(Some(3), Some(1), None), 8), [3, 2, 2, 1]);
        // Each chunk has its share of the ends'.
        let interleaved = counts(&config(Some(2), Some(2), Some(2)), 12);
        assert_eq!(interleaved, [1, 2, 2, 1, 1, 2, 2, 1]);
        let text = broken(&config(Some(3), Some(1), None), 9);
        assert!(
            text.contains("nearest legal: 8 layers, 10 layers"),
            "{text}"
        );
        let text = broken(&config(Some(3), None, Some(2)), 12);
        assert!(text.contains("nearest legal: 2, 4"), "{text}");
    }

    #[test]
    fn the_embedding_and_the_loss_count_as_layers_where_asked() {
        let config = |embedding, loss| ParallelConfig {
            account_for_embedding_in_pipeline_split: embedding,
            account_for_loss_in_pipeline_split: loss,
            ..parallel(4)
        };
        assert_eq!(counts(&config(true, true), 10), [2, 3, 3, 2]);
        assert_eq!(counts(&config(true, false), 11), [2, 3, 3, 3]);
        assert_eq!(counts(&config(false, true), 11), [3, 3, 3, 2]);
        assert_eq!(counts(&config(true, true), 2), [0, 1, 1, 0]);
        let text = broken(&config(true, true), 8);
        assert!(
            text.contains("8 plus 2 for the embedding and the loss"),
            "{text}"
        );
        let text = broken(&config(true, true), 1);
        assert!(text.contains("at most 3, for num_layers 1"), "{text}");
        let both = ParallelConfig {
            decoder_first_pipeline_num_layers: Some(1),
            ..config(true, false)
        };
        assert!(broken(&both, 11).contains("cannot be combined"));
    }

    #[test]
    fn layers_that_do_not_divide_are_refused() {
        // Public complaint: Megatron-LM #1304.
        assert_eq!(
            broken(&parallel(3), 4),
            "pipeline_model_parallel_size 3 must divide num_layers 4; nearest legal: 2, 4"
        );
        let interleaved = ParallelConfig {
            num_virtual_stages_per_pipeline_rank: Some(3),
            ..parallel(2)
        };
        let text = broken(&interleaved, 8);
        assert!(
            text.contains("nearest legal: 6 layers, 12 layers"),
            "{text}"
        );
        let per_stage = ParallelConfig {
            num_layers_per_virtual_pipeline_stage: Some(3),
            ..parallel(2)
        };
        let text = broken(&per_stage, 8);
        assert!(
            text.contains("must divide the 4 layers of a pipeline rank"),
            "{text}"
        );
        let both = ParallelConfig {
            num_virtual_stages_per_pipeline_rank: Some(2),
            ..per_stage
        };
        assert!(broken(&both, 8).contains("not both"));
    }
}
