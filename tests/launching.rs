//! Ranks that fail, initial weights under every layout, and what communication costs.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron::Kernels;
use burn_megatron::comm::counted::Collective;
use burn_megatron::launch::ProcessGroup;
use burn_megatron::layers::{Recompute, RecomputeMethod};
use burn_megatron::optim::MixedPrecisionConfig;
use burn_megatron::prelude::*;
use burn_megatron::topology::Axis;
use burn_megatron::train::StepVolume;
use megatron_tests::{Run, fixture, on_tp_ranks, tensors};
use std::time::{Duration, Instant};

#[test]
fn the_rank_that_fails_is_the_one_reported() {
    let grid = RankGrid::new(
        Axes {
            tp: 2,
            dp: 2,
            ..Axes::all(1)
        },
        DEFAULT_ORDER,
    )
    .expect("a grid");
    let start = Instant::now();
    let error = run_ranks(&grid, DEFAULT_TIMEOUT, |rank| {
        if rank.rank == 2 {
            panic!("disk on fire");
        }
        // Ranks 0 and 1 share no group of one axis with each other's failure but the world.
        rank.groups.world.comm.barrier()
    })
    .expect_err("rank 2 failed");
    assert_eq!(error.to_string(), "rank 2 panicked: disk on fire");
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "no rank waited for the timeout"
    );
}

#[test]
fn a_rank_with_bad_data_ends_the_others() {
    let config = Run::at(2, 1).config();
    let error = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(&config, rank, None)?;
        // Rank 0 reads for both; a token outside of the vocabulary stops it, while rank 1 waits.
        let batch = MicroBatch {
            tokens: vec![128; 66],
            loss_mask: None,
        };
        trainer.train_step(&vec![batch; 4])
    })
    .expect_err("rank 0 failed");
    let error = error.to_string();
    assert!(
        error.contains("rank 0 got token 128 at position 0 of sample 0"),
        "{error}"
    );
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let grid = RankGrid::new(
        Axes {
            tp: 2,
            ..Axes::all(1)
        },
        DEFAULT_ORDER,
    )
    .expect("a grid");
    let error = run_ranks(&grid, Duration::from_millis(300), |rank| match rank.rank {
        0 => rank.groups.tp.comm.barrier(),
        _ => Ok(()),
    })
    .expect_err("rank 1 never called");
    let error = error.to_string();
    assert!(
        error.contains("rank 0, barrier: in group tp [0, 1]: no call from rank 1"),
        "{error}"
    );
}

#[test]
fn initial_weights_have_the_same_bits_at_every_layout() {
    let layouts = [
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 1),
        (1, 2, 1),
        (1, 2, 2),
        (2, 4, 1),
    ];
    let weights = layouts.map(|(tp, pp, v)| {
        let run = Run::at(tp, 1).with_pipeline(pp, v);
        let (config, path) = (run.config(), run.scratch("init"));
        run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
            Trainer::new(&config, rank, None)?.save_weights(&path)
        })
        .expect("saved");
        let weights = tensors(&path);
        std::fs::remove_file(&path).expect("the saved weights");
        weights
    });
    assert!(weights.iter().all(|w| w == &weights[0]));
    // Megatron's rule: normal of std 0.02, what adds to the residual scaled by 1/√(2L).
    let std = |name: &str| {
        let values = &weights[0][name].1;
        (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt()
    };
    for (name, want) in [
        ("embedding.word_embeddings.weight", 0.02),
        ("decoder.layers.3.mlp.linear_fc1.weight", 0.02),
        ("decoder.layers.3.mlp.linear_fc2.weight", 0.02 / 8f32.sqrt()),
        (
            "decoder.layers.0.self_attention.linear_proj.weight",
            0.02 / 8f32.sqrt(),
        ),
    ] {
        assert!(
            (std(name) / want - 1.0).abs() < 0.03,
            "{name}: {}",
            std(name)
        );
    }
}

#[test]
fn weights_that_do_not_fit_are_all_listed() {
    let config = Run::at(2, 1).config();
    let grid = &config.layout().grid;
    let error = run_ranks(grid, DEFAULT_TIMEOUT, |rank| {
        let weights = FullWeights::open(fixture("gpt_logits_mb0.safetensors"))?;
        Trainer::new(&config, rank, Some(&weights))
    })
    .expect_err("another file");
    let error = error.to_string();
    for part in [
        "embedding.word_embeddings.weight is missing",
        "decoder.layers.3.mlp.linear_fc2.bias is missing",
        "tokens is not of this model",
        "54 tensors do not fit",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[derive(Module, Debug)]
struct WithOwnParameter {
    scale: Param<Tensor<1>>,
}

#[test]
fn a_replicated_parameter_that_differs_between_ranks_is_refused() {
    let errors = on_tp_ranks(2, |rank| {
        let builder = ParallelBuilder::new(rank);
        let value = Tensor::<1>::full([3], rank.rank as f32, &rank.device);
        let module = WithOwnParameter {
            scale: Param::from_tensor(value),
        };
        ShardedModel::new(module, &builder)
            .init(1)
            .expect_err("differs")
            .to_string()
    });
    assert!(
        errors
            .iter()
            .all(|e| e.contains("parameter scale is replicated")),
        "{errors:?}"
    );
}

#[test]
fn a_step_communicates_exactly_what_was_predicted() {
    let full = |method| {
        Some(Recompute::Full {
            method,
            num_layers: 1,
        })
    };
    let (uniform, block) = (full(RecomputeMethod::Uniform), full(RecomputeMethod::Block));
    for (tp, pp, v, dp, sequence_parallel, recompute) in [
        (1, 1, 1, 1, false, None),
        (2, 1, 1, 1, false, None),
        (4, 1, 1, 1, false, None),
        (1, 1, 1, 4, false, None),
        (2, 1, 1, 2, false, None),
        (1, 2, 1, 1, false, None),
        (1, 2, 2, 1, false, None),
        (1, 4, 1, 2, false, None),
        (2, 2, 1, 2, false, None),
        (2, 2, 2, 1, false, None),
        (2, 1, 1, 2, true, None),
        (4, 1, 1, 1, true, None),
        (2, 4, 1, 1, true, None),
        (2, 1, 1, 1, false, uniform),
        (2, 2, 1, 1, true, block),
    ] {
        let plain = Run {
            sequence_parallel,
            recompute,
            ..Run::at(tp, dp).with_pipeline(pp, v)
        };
        let distributed = Run {
            distributed_optimizer: dp > 1,
            ..plain
        };
        let overlapped = Run {
            overlap: (dp > 1, dp > 1),
            ..distributed
        };
        let halved = Run {
            mixed_precision: MixedPrecisionConfig {
                bf16: true,
                ..MixedPrecisionConfig::default()
            },
            grad_reduce_in_bf16: dp > 1,
            ..overlapped
        };
        let local = Run {
            kernels: Kernels::Local,
            ..plain
        };
        for run in [plain, distributed, overlapped, halved, local] {
            let config = run.config();
            let (steps, ends) = run
                .train(|rank, trainer| {
                    // Parameters that are still on their way count once they are here.
                    trainer.model().values();
                    let groups = &rank.groups;
                    let spent = |group: &ProcessGroup, what| {
                        let account = group.accounts.of(what);
                        (account.calls, account.bytes)
                    };
                    let got = [
                        spent(&groups.tp, Collective::AllReduce),
                        spent(&groups.tp, Collective::Broadcast),
                        spent(&groups.tp, Collective::ReduceScatter),
                        spent(&groups.dp, Collective::AllReduce),
                        spent(&groups.dp, Collective::ReduceScatter),
                        spent(&groups.pp, Collective::Send),
                        spent(&groups.embedding, Collective::AllReduce),
                    ];
                    let gathered =
                        [&groups.tp, &groups.dp].map(|g| spent(g, Collective::AllGather));
                    let pp_rank = groups.pp.comm.rank();
                    let elements = trainer.model().num_parameters();
                    assert_eq!(elements, config.parameters_per_rank(pp_rank));
                    Ok((pp_rank, got, gathered))
                })
                .expect("run");
            let steps = steps.len() as u64;
            for (pp_rank, got, gathered) in ends {
                let want = config.step_volumes(pp_rank);
                let over_all_steps =
                    |volume: StepVolume| (volume.calls * steps, volume.bytes * steps);
                if sequence_parallel {
                    assert_eq!(
                        gathered[0],
                        over_all_steps(want.tp_gather),
                        "{}",
                        run.layout()
                    );
                }
                if run.distributed_optimizer {
                    assert_eq!(
                        gathered[1],
                        over_all_steps(want.dp_gather),
                        "{}",
                        run.layout()
                    );
                }
                let want = [
                    want.tp,
                    want.tp_data,
                    want.tp_scatter,
                    want.dp,
                    want.dp_scatter,
                    want.pp,
                    want.embedding,
                ];
                let want = want.map(over_all_steps);
                assert_eq!(got, want, "{} {recompute:?} stage {pp_rank}", run.layout());
            }
        }
    }
    // s 32, b 2, h 64, L 4, four microbatches: by hand.
    let volumes = Run::at(2, 1).config().step_volumes(0);
    assert_eq!(volumes.tp.calls, 4 * (2 * 4 + 2 * 4 + 2 + 2));
    assert_eq!(volumes.tp.bytes, 4 * 4 * (18 * 32 * 2 * 64 + 3 * 32 * 2));
    assert_eq!(volumes.tp_data.bytes, 4 * 8 * (2 * 33 + 1));
    let volumes = Run::at(1, 1).with_pipeline(2, 2).config().step_volumes(1);
    // Rank 1 has stages 1 and 3: forward from 1, backward from both.
    assert_eq!(volumes.pp.calls, 4 * 3);
    assert_eq!(volumes.pp.bytes, 4 * 3 * 4 * 32 * 2 * 64);
    assert_eq!(volumes.embedding.bytes, 4 * 128 * 64);
    let bf16 = Run {
        mixed_precision: MixedPrecisionConfig {
            bf16: true,
            ..MixedPrecisionConfig::default()
        },
        ..Run::at(2, 1)
    };
    let volumes = bf16.config().step_volumes(0);
    // The loss is reduced in f32.
    assert_eq!(
        volumes.tp.bytes,
        4 * (2 * 18 * 32 * 2 * 64 + 4 * 3 * 32 * 2)
    );
}

#[test]
fn a_rank_finds_its_groups() {
    let config = Run::at(2, 2).config();
    let grid = &config.layout().grid;
    let places = run_ranks(grid, DEFAULT_TIMEOUT, |rank| {
        let (tp, dp) = (&rank.groups.tp.comm, &rank.groups.dp.comm);
        Ok((tp.rank(), tp.size(), dp.rank(), dp.size()))
    });
    assert_eq!(
        places.expect("places"),
        [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    );
    assert_eq!(grid.group_of(3, &[Axis::Dp]), [1, 3]);
}

#[test]
fn a_model_with_an_odd_vocabulary_trains_alike_at_every_tp() {
    // Public complaints: Megatron-LM #1754, #1736.
    for untied in [false, true] {
        let steps = [1, 2, 4].map(|tp| odd_vocabulary(tp, untied));
        for other in &steps[1..] {
            for (a, b) in steps[0].iter().zip(other) {
                assert!((a.lm_loss - b.lm_loss).abs() <= 2e-6, "{a:?} {b:?}");
                assert!(
                    (a.grad_norm / b.grad_norm - 1.0).abs() <= 1e-5,
                    "{a:?} {b:?}"
                );
            }
        }
    }
}

/// Three steps of a small GPT with GPT-2's vocabulary, which no tp divides.
fn odd_vocabulary(tp: usize, untied: bool) -> Vec<StepOutput> {
    let mut config = Run::at(tp, 1).config().config().clone();
    config.model.make_vocab_size_divisible_by = 128;
    config.model.num_layers = 1;
    config.model.hidden_size = 16;
    config.model.untie_embeddings_and_output_weights = untied;
    config.batch.global_batch_size = 2;
    config.vocab_size = 50257;
    let config = config.resolve().expect("a legal configuration");
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(&config, rank, None)?;
        assert_eq!(
            trainer.model().num_elements(),
            config.parameters_per_rank(0)
        );
        let batch = MicroBatch {
            tokens: (0..66).map(|i| 50256 - i * 761).collect(),
            loss_mask: None,
        };
        (0..3)
            .map(|_| trainer.train_step(std::slice::from_ref(&batch)))
            .collect::<Result<Vec<_>>>()
    });
    ranks.expect("ranks").swap_remove(0)
}
