//! Weights and activations of 16 bits, against f32 and against one another under every layout.

use crate::checkpoints::{Scratch, go, whole};
use burn_megatron::checkpoint::Kind;
use burn_megatron::layers::{Recompute, RecomputeMethod};
use burn_megatron::prelude::*;
use burn_megatron::train::Sampling;
use megatron_tests::{Run, bits, fixture, tensors};

const BF16: MixedPrecisionConfig = MixedPrecisionConfig {
    bf16: true,
    ..PLAIN
};
const FP16: MixedPrecisionConfig = MixedPrecisionConfig {
    fp16: true,
    ..PLAIN
};
const PLAIN: MixedPrecisionConfig = MixedPrecisionConfig {
    bf16: false,
    fp16: false,
    loss_scale: None,
    initial_loss_scale: 262_144.0,
    min_loss_scale: 1.0,
    loss_scale_window: 4,
    hysteresis: 1,
};

fn in_precision(mixed_precision: MixedPrecisionConfig, run: Run) -> Run {
    Run {
        mixed_precision,
        ..run
    }
}

/// What one rounding takes of a value, at most.
fn rounding(mixed: MixedPrecisionConfig) -> f32 {
    match mixed.precision() {
        Precision::Fp32 => 0.5f32.powi(24),
        Precision::Bf16 => 0.5f32.powi(9),
        Precision::Fp16 => 0.5f32.powi(12),
    }
}

fn steps(run: Run) -> Vec<StepOutput> {
    run.train(|_, _| Ok(())).expect("run").0
}

/// The largest relative difference of two runs' losses, and of their norms.
fn distance(a: &[StepOutput], b: &[StepOutput]) -> (f32, f64) {
    let both = || a.iter().zip(b);
    let losses = both().map(|(a, b)| (a.lm_loss / b.lm_loss - 1.0).abs());
    let norms = both().map(|(a, b)| (a.grad_norm / b.grad_norm - 1.0).abs());
    (losses.fold(0.0, f32::max), norms.fold(0.0, f64::max))
}

#[test]
fn sixteen_bits_train_as_f32_but_for_their_rounding() {
    for llama in [false, true] {
        let base = Run {
            llama,
            ..Run::at(1, 1)
        };
        let f32s = steps(base);
        for mixed in [BF16, FP16] {
            let (loss, norm) = distance(&steps(in_precision(mixed, base)), &f32s);
            assert!(loss > 0.0, "it rounds");
            assert!(loss <= rounding(mixed), "{loss:e}");
            assert!(norm <= 10.0 * f64::from(rounding(mixed)), "{norm:e}");
        }
    }
}

/// What is split by depth, by samples or by optimizer state computes the same 16-bit values: it differs from
/// one rank as f32 sums of another order do. What is split over tensor-parallel ranks is rounded elsewhere.
#[test]
fn sixteen_bits_are_the_same_at_every_layout() {
    let full = Some(Recompute::Full {
        method: RecomputeMethod::Uniform,
        num_layers: 1,
    });
    for mixed in [BF16, FP16] {
        let base = in_precision(
            mixed,
            Run {
                // Untied: one rank adds the two gradients of a tied table up in 16 bits, two do so in f32.
                llama: true,
                micro_batch_size: 1,
                ..Run::at(1, 1)
            },
        );
        let one = steps(base);
        for (pp, v, dp, overlap, recompute) in [
            (1, 1, 1, false, full),
            (2, 1, 1, false, None),
            (2, 2, 1, false, full),
            (4, 1, 2, false, None),
            (1, 1, 4, false, None),
            (2, 2, 2, true, None),
        ] {
            let run = Run {
                pp,
                virtual_stages: v,
                dp,
                distributed_optimizer: dp > 1,
                overlap: (overlap, overlap),
                recompute,
                ..base
            };
            let (loss, norm) = distance(&steps(run), &one);
            let what = format!("{} {mixed:?}: {loss:e} {norm:e}", run.layout());
            assert!(loss <= 1e-6 && norm <= 1e-9, "{what}");
        }
        for (tp, sequence_parallel, pp, dp) in [(2, false, 1, 1), (2, true, 1, 1), (2, true, 2, 2)]
        {
            let run = Run {
                tp,
                sequence_parallel,
                pp,
                dp,
                distributed_optimizer: dp > 1,
                ..base
            };
            let (loss, norm) = distance(&steps(run), &one);
            let what = format!("{} {mixed:?}: {loss:e} {norm:e}", run.layout());
            assert!(loss <= rounding(mixed), "{what}");
            assert!(norm <= 10.0 * f64::from(rounding(mixed)), "{what}");
        }
    }
}

#[test]
fn zero_and_overlap_change_no_bit_in_sixteen_bits() {
    for (mixed, grad_reduce_in_bf16, tp, pp, dp) in [
        (BF16, false, 1, 1, 2),
        (BF16, true, 2, 1, 2),
        (BF16, true, 1, 2, 4),
        (FP16, false, 2, 2, 2),
    ] {
        let plain = Run {
            grad_reduce_in_bf16,
            micro_batch_size: 1,
            dropout: 0.1,
            ..in_precision(mixed, Run::at(tp, dp).with_pipeline(pp, 1))
        };
        let run = |distributed_optimizer, overlap| {
            let run = Run {
                distributed_optimizer,
                overlap: (overlap, overlap && distributed_optimizer),
                ..plain
            };
            run.train(|_, trainer| Ok(trainer.model().values()))
                .expect("run")
        };
        let want = run(false, false);
        for (distributed, overlap) in [(false, true), (true, false), (true, true)] {
            let what = format!("{} {mixed:?} {distributed} {overlap}", plain.layout());
            assert!(run(distributed, overlap) == want, "{what}");
        }
        if grad_reduce_in_bf16 {
            let exact = steps(Run {
                grad_reduce_in_bf16: false,
                ..plain
            });
            let (loss, _) = distance(&exact, &want.0);
            assert!(loss > 0.0 && loss <= rounding(mixed), "{loss:e}");
        }
    }
}

/// A weight of 1 is 0.004 from its neighbours in bf16: steps of 0.001 and less would all be lost without
/// master weights. (Burn's own optimizers keep bf16 weights' state in bf16.)
#[test]
fn updates_too_small_for_sixteen_bits_are_not_lost() {
    let name = "decoder.layers.1.pre_mlp_layernorm.weight";
    let run = in_precision(BF16, Run::at(1, 1));
    let dirs = [run, Run::at(1, 1)].map(|run| {
        let dir = Scratch::new(&format!("small-{}", run.mixed_precision.bf16));
        go(run, None, 0..3, Some(&dir.0));
        dir
    });
    let [master, plain] = [0, 1].map(|i: usize| {
        let tensors = whole(&dirs[i].0);
        tensors[&(Kind::Weight, name.to_string())].clone()
    });
    // Three steps at 0, 0.0005 and 0.001.
    let moved = |values: &[f32]| -> f32 {
        let all = values.iter().map(|value| (value - 1.0).abs());
        all.sum::<f32>() / values.len() as f32
    };
    assert!(moved(&plain) > 5e-4, "{}", moved(&plain));
    assert!((moved(&master) / moved(&plain) - 1.0).abs() < 0.1);
    let (_, models) = run
        .train(|_, trainer| {
            let params = trainer.model().params();
            let norm = params.iter().find(|param| param.name == name);
            let range = norm.expect("the norm").range.clone();
            Ok(trainer.model().values()[range].to_vec())
        })
        .expect("run");
    // After eight the sum of them shows in the 16-bit weights.
    assert!(models[0].iter().any(|value| *value != 1.0));
}

#[test]
fn a_stop_changes_no_bit_in_sixteen_bits() {
    let window = MixedPrecisionConfig {
        initial_loss_scale: 2f64.powi(40),
        ..FP16
    };
    let zero = |mixed, run| Run {
        distributed_optimizer: true,
        ..in_precision(mixed, run)
    };
    for (name, first, second) in [
        ("bf16", in_precision(BF16, Run::at(2, 1)), None),
        ("fp16", zero(window, Run::at(1, 2)), None),
        (
            // What is kept is f32: another pipeline goes on with the same bits.
            "layout",
            zero(BF16, Run::at(1, 2)),
            Some(in_precision(BF16, Run::at(1, 2))),
        ),
    ] {
        let dir = Scratch::new(&format!("halves-{name}"));
        let whole = go(first, None, 0..10, None);
        let mut halves = go(first, None, 0..5, Some(&dir.0));
        halves.extend(go(second.unwrap_or(first), Some(&dir.0), 5..10, None));
        assert_eq!(bits(&halves), bits(&whole), "{name}");
    }
}

#[test]
fn another_precision_goes_on_from_a_checkpoint() {
    let plain = Run::at(1, 1);
    let dir = Scratch::new("other-precision");
    go(plain, None, 0..5, Some(&dir.0));
    let want = go(plain, Some(&dir.0), 5..10, None);
    for mixed in [BF16, FP16] {
        let got = go(
            in_precision(mixed, Run::at(2, 1)),
            Some(&dir.0),
            5..10,
            None,
        );
        let (loss, _) = distance(&got, &want);
        assert!(loss > 0.0 && loss <= rounding(mixed), "{loss:e}");
    }
}

#[test]
fn stages_of_an_evaluation_exchange_sixteen_bits() {
    let sampling = Sampling {
        temperature: 0.8,
        top_k: 20,
        seed: 3,
    };
    let ends = [(1, 1), (2, 1), (2, 2)].map(|(pp, v)| {
        let run = Run {
            llama: true,
            ..in_precision(BF16, Run::at(1, 1).with_pipeline(pp, v))
        };
        let batches = tensors(fixture("train_tokens.safetensors"));
        let (_, ends) = run
            .train(|_, trainer| {
                let loss = trainer.evaluate(&run.share(&batches, 0, 0))?;
                Ok((loss.mean(), trainer.generate(&[1, 2, 3], 20, &sampling)?))
            })
            .expect("run");
        ends.into_iter().next().expect("a rank")
    });
    assert_eq!(ends[0], ends[1]);
    assert_eq!(ends[0], ends[2]);
}

#[test]
fn a_loss_scale_falls_until_gradients_fit_and_no_schedule_counts_such_steps() {
    let wild = MixedPrecisionConfig {
        initial_loss_scale: 2f64.powi(24),
        loss_scale_window: 2,
        ..FP16
    };
    let run = |mixed, tp, pp, dp| steps(in_precision(mixed, Run::at(tp, dp).with_pipeline(pp, 1)));
    let all = run(wild, 1, 1, 1);
    let fits = all.iter().position(|step| step.grad_norm.is_finite());
    let skipped = fits.expect("a scale that fits");
    assert!((2..6).contains(&skipped), "{all:?}");
    assert_eq!(all[skipped].skipped_iterations, skipped as u64);
    let scales: Vec<f64> = all.iter().filter_map(|step| step.loss_scale).collect();
    let falling = (0..=skipped).map(|i| 2f64.powi(24 - i as i32));
    assert_eq!(scales[..=skipped], falling.collect::<Vec<_>>());
    assert_eq!(scales[skipped + 2], 2.0 * scales[skipped], "{scales:?}");
    // The first that counts has the first one's rate and loss.
    let calm = run(FP16, 1, 1, 1);
    assert_eq!(all[skipped].learning_rate, calm[0].learning_rate);
    assert_eq!(all[skipped + 1].learning_rate, calm[1].learning_rate);
    for (tp, pp, dp) in [(2, 1, 1), (1, 2, 2)] {
        let other = run(wild, tp, pp, dp);
        let scale = |steps: &[StepOutput]| -> Vec<_> {
            let steps = steps.iter();
            steps
                .map(|s| (s.loss_scale, s.skipped_iterations))
                .collect()
        };
        assert_eq!(scale(&other), scale(&all), "tp={tp} pp={pp} dp={dp}");
    }
    // Where it cannot fall, it is an error.
    for fixed in [
        MixedPrecisionConfig {
            loss_scale: Some(2f64.powi(40)),
            ..FP16
        },
        MixedPrecisionConfig {
            initial_loss_scale: 2f64.powi(40),
            min_loss_scale: 2f64.powi(40),
            ..wild
        },
    ] {
        let run = in_precision(fixed, Run::at(2, 1));
        let error = run.train(|_, _| Ok(())).expect_err("overflows").to_string();
        assert!(
            error.contains("at a loss scale of 1099511627776 that cannot fall"),
            "{error}"
        );
    }
}

#[test]
fn a_model_and_its_training_agree_on_their_numbers() {
    let plain = Run::at(1, 1).config();
    let rank = RankContext::single(burn::tensor::Device::flex().autodiff());
    let builder = ParallelBuilder::new(&rank).with_precision(Precision::Bf16);
    let model = plain.model().init(&builder);
    let model = ShardedModel::new(model, &builder);
    let error = Trainer::for_model(model, plain.trainer(), &rank).expect_err("f32 training");
    let error = error.to_string();
    let told = "the model's parameters are bf16, but its training is fp32";
    assert!(error.contains(told), "{error}");
}
