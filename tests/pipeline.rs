//! The pipeline at work: activations held, tied embeddings, failures, and what a run does beside
//! training.

use burn_megatron::comm::threads::ThreadWorld;
use burn_megatron::pipeline::{Schedule, execute};
use burn_megatron::prelude::*;
use burn_megatron::topology::{PipelineSchedule, PipelineShape};
use burn_megatron::train::Sampling;
use megatron_tests::sleeping::{Sleeping, pipeline_grid};
use megatron_tests::{Run, fixture, tensors};
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[test]
fn a_rank_that_dies_in_the_middle_ends_the_others_and_is_named() {
    for (rank_that_dies, v) in [(0, 1), (1, 1), (3, 1), (2, 2)] {
        let shape = PipelineShape::new(4, 8).with_virtual_stages(v);
        let schedule =
            Schedule::new(PipelineSchedule::default_for(v), shape).expect("a legal shape");
        let others = Mutex::new(Vec::new());
        let start = Instant::now();
        let error = run_ranks(&pipeline_grid(4), Duration::from_secs(20), |rank| {
            let mut work = Sleeping {
                last: shape.num_stages() - 1,
                forward: Duration::from_millis(1),
                backward: Duration::from_millis(1),
                dies_at: (rank.rank == rank_that_dies).then_some((rank_that_dies, 2)),
            };
            let spans = execute(&schedule, &*rank.groups.pp.comm, &mut work, rank.clock);
            if let Err(error) = &spans {
                others.lock().expect("no panic").push(error.to_string());
            }
            spans
        });
        let error = error.expect_err("a rank died").to_string();
        let died = format!("rank {rank_that_dies} panicked: the power is out");
        assert_eq!(error, died);
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "nobody waited for the timeout"
        );
        // Whoever still waited for something was told why it will not come.
        let others = others.into_inner().expect("no panic");
        assert!(!others.is_empty());
        let told = format!("rank {rank_that_dies} failed");
        assert!(
            others.iter().all(|error| error.contains(&told)),
            "{others:?}"
        );
    }
}

#[test]
fn a_rank_that_is_silent_in_the_middle_is_named_within_the_timeout() {
    let schedule = Schedule::new(
        PipelineSchedule::OneForwardOneBackward,
        PipelineShape::new(2, 4),
    )
    .expect("a legal shape");
    let ends = ThreadWorld::new(Duration::from_millis(200)).group("pp", &[0, 1]);
    let mut work = Sleeping {
        last: 1,
        forward: Duration::ZERO,
        backward: Duration::ZERO,
        dies_at: None,
    };
    // Rank 1 never runs.
    let error = execute(&schedule, &ends[0], &mut work, Instant::now()).expect_err("silence");
    let error = error.to_string();
    assert!(
        error.contains("rank 0, receive: in group pp [0, 1]"),
        "{error}"
    );
    assert!(
        error.contains("no message from rank 1 within 0.2 s"),
        "{error}"
    );
}

#[test]
fn a_rank_holds_as_many_graphs_as_its_schedule_says() {
    for (schedule, v, held) in [
        (PipelineSchedule::OneForwardOneBackward, 1, [4, 3, 2, 1]),
        (PipelineSchedule::GPipe, 1, [8; 4]),
    ] {
        let run = Run {
            micro_batch_size: 1,
            schedule: Some(schedule),
            ..Run::at(1, 1).with_pipeline(4, v)
        };
        let (_, ends) = run
            .train(|rank, trainer| {
                let live = trainer.last_step().max_live;
                assert_eq!(live, trainer.schedule().max_in_flight(rank.rank));
                Ok(live)
            })
            .expect("run");
        assert_eq!(ends, held, "{schedule}");
    }
    let interleaved = Run::at(1, 1).with_pipeline(2, 2);
    let (_, ends) = interleaved
        .train(|rank, trainer| {
            let want = trainer.schedule().max_in_flight(rank.rank);
            Ok(trainer.last_step().max_live == want)
        })
        .expect("run");
    assert_eq!(ends, [true, true]);
}

#[test]
fn clipping_uses_the_norm_of_all_stages() {
    // Public complaint: torchtitan #596.
    let weights = [(1, 1), (2, 1), (2, 2), (4, 1)].map(|(pp, v)| {
        let run = Run {
            clip_grad: 0.1,
            ..Run::at(1, 1).with_pipeline(pp, v)
        };
        let path = run.scratch("clipped");
        run.train(|_, trainer| trainer.save_weights(&path))
            .expect("run");
        let weights = tensors(&path);
        std::fs::remove_file(&path).expect("the saved weights");
        weights
    });
    let start = tensors(fixture("gpt_init.safetensors"));
    for other in &weights[1..] {
        assert_eq!(other.len(), weights[0].len());
        for (name, (_, values)) in other {
            // The key part of that bias has a gradient of rounding errors.
            let key = |i: usize| name.ends_with("linear_qkv.bias") && i / 16 % 3 == 1;
            for (i, (a, b)) in values.iter().zip(&weights[0][name].1).enumerate() {
                assert!(
                    key(i) || (a - b).abs() <= 1e-5,
                    "{name}[{i}]: {a} is not {b}"
                );
            }
        }
    }
    assert_ne!(
        weights[0]["decoder.final_layernorm.weight"],
        start["decoder.final_layernorm.weight"]
    );
}

#[test]
fn both_copies_of_a_tied_embedding_stay_the_same_for_50_steps() {
    // Public complaints: Megatron-LM #844, #656.
    for (tp, pp, v) in [(1, 2, 1), (1, 2, 2), (2, 4, 1)] {
        let run = Run::at(tp, 1).with_pipeline(pp, v);
        let mut config = run.config().config().clone();
        config.train_iters = 50;
        let config = config.resolve().expect("legal");
        let batches = tensors(fixture("train_tokens.safetensors"));
        let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
            let mut trainer = Trainer::new(&config, rank, None)?;
            let table = |trainer: &Trainer| {
                let mut params = trainer.model().params().iter();
                let words = params.find(|p| p.name == "embedding.word_embeddings.weight");
                words.map(|p| trainer.model().values()[p.range.clone()].to_vec())
            };
            let mut tables = vec![table(&trainer)];
            for step in 0..50 {
                let share = rank.reads_data().then(|| run.share(&batches, step % 8, 0));
                trainer.train_step(&share.unwrap_or_default())?;
                tables.push(table(&trainer));
            }
            Ok((rank.groups.pp.comm.rank(), tables))
        });
        let ranks = ranks.expect("ranks");
        let at = |stage: usize| ranks.iter().filter(move |(pp_rank, _)| *pp_rank == stage);
        for ((_, first), (_, last)) in at(0).zip(at(pp - 1)) {
            assert!(first[0].is_some() && first[50] != first[0]);
            assert_eq!(first, last, "{}", run.layout());
        }
        assert!((1..pp - 1).all(|stage| at(stage).all(|(_, tables)| tables[0].is_none())));
    }
}

#[test]
fn a_rank_makes_its_own_stages_alone() {
    for (pp, v) in [(2, 1), (4, 1), (2, 2)] {
        let run = Run::at(1, 1).with_pipeline(pp, v);
        let (_, names) = run
            .train(|_, trainer| {
                let params = trainer.model().params().iter();
                Ok(params.map(|p| p.name.clone()).collect::<Vec<_>>())
            })
            .expect("run");
        for (rank, names) in names.iter().enumerate() {
            let has = |name: &str| names.iter().any(|n| n == name);
            for layer in 0..4 {
                let own = layer * pp * v / 4 % pp == rank;
                let name = format!("decoder.layers.{layer}.mlp.linear_fc1.weight");
                assert_eq!(has(&name), own, "{} {name} on rank {rank}", run.layout());
            }
            let (first, last) = (rank == 0, rank + 1 == pp);
            assert_eq!(has("embedding.position_embeddings.weight"), first);
            assert_eq!(has("embedding.word_embeddings.weight"), first || last);
            assert_eq!(has("decoder.final_layernorm.weight"), last);
        }
    }
}

#[test]
fn evaluation_and_generation_do_not_depend_on_the_layout() {
    let batches = tensors(fixture("train_tokens.safetensors"));
    let sampling = Sampling {
        temperature: 0.8,
        top_k: 20,
        seed: 3,
    };
    let layouts = [
        (1, false, 1, 1),
        (1, false, 2, 1),
        (2, false, 2, 2),
        (1, false, 4, 1),
        (4, true, 1, 1),
        (2, true, 2, 2),
    ];
    let results = layouts.map(|(tp, sequence_parallel, pp, v)| {
        let run = Run {
            sequence_parallel,
            ..Run::at(tp, 1).with_pipeline(pp, v)
        };
        let (_, ends) = run
            .train(|rank, trainer| {
                let share = rank.reads_data().then(|| run.share(&batches, 0, 0));
                let loss = trainer.evaluate(&share.unwrap_or_default())?;
                Ok((loss.mean(), trainer.generate(&[1, 2, 3], 40, &sampling)?))
            })
            .expect("run");
        assert!(
            ends.iter().all(|end| *end == ends[0]),
            "all ranks have the same"
        );
        ends.into_iter().next().expect("a rank")
    });
    for (loss, text) in &results[1..] {
        assert!(
            (loss - results[0].0).abs() <= 2e-6,
            "{loss} is not {}",
            results[0].0
        );
        assert_eq!(*text, results[0].1);
    }
    assert_eq!(results[0].1.len(), 40);
}

#[test]
fn an_untied_model_trains_alike_at_every_pipeline() {
    let batches = tensors(fixture("train_tokens.safetensors"));
    let losses = [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 4, 1)].map(|(tp, pp, v)| {
        let run = Run::at(tp, 1).with_pipeline(pp, v);
        let mut config = run.config().config().clone();
        config.model.untie_embeddings_and_output_weights = true;
        let config = config.resolve().expect("legal");
        let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
            let mut trainer = Trainer::new(&config, rank, None)?;
            let steps = (0..8).map(|step| {
                let share = rank.reads_data().then(|| run.share(&batches, step, 0));
                trainer.train_step(&share.unwrap_or_default())
            });
            steps.collect::<Result<Vec<_>>>()
        });
        ranks.expect("ranks").swap_remove(0)
    });
    for other in &losses[1..] {
        for (a, b) in losses[0].iter().zip(other) {
            assert!((a.lm_loss - b.lm_loss).abs() <= 2e-6, "{a:?} {b:?}");
            assert!(
                (a.grad_norm / b.grad_norm - 1.0).abs() <= 1e-5,
                "{a:?} {b:?}"
            );
        }
    }
}
