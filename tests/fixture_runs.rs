//! The eight steps that Megatron-LM itself ran (`fixtures/README.md`), at our layouts.

use burn_megatron::Kernels;
use burn_megatron::layers::{Recompute, RecomputeMethod};
use burn_megatron::shard::Sharding;
use burn_megatron::topology::PipelineSchedule;
use burn_megatron::train::StepOutput;
use megatron_tests::{Run, fixture, tensors};
use serde_json::Value;

const LOSS_TOLERANCE: f64 = 2e-6;
const NORM_TOLERANCE: f64 = 1e-5;
const WEIGHT_TOLERANCE: f32 = 1e-5;

fn json(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(name)).expect("fixture");
    serde_json::from_str(&text).expect("JSON")
}

/// Compares losses (absolutely) and gradient norms (relatively) with a run of Megatron's.
fn assert_steps(got: &[StepOutput], want: &Value, what: &str) {
    let want = want["steps"].as_array().expect("steps");
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        let number = |key: &str| want[key].as_f64().expect("a number");
        let loss = (f64::from(got.lm_loss) - number("lm_loss")).abs();
        let norm = (got.grad_norm / number("grad_norm") - 1.0).abs();
        let at = format!("{what}, iteration {}", got.iteration);
        assert!(
            loss <= LOSS_TOLERANCE,
            "{at}: loss {} differs by {loss:e}",
            got.lm_loss
        );
        assert!(
            norm <= NORM_TOLERANCE,
            "{at}: norm {} differs by {norm:e}",
            got.grad_norm
        );
        let lr = (got.learning_rate - number("lr")).abs();
        assert!(
            lr <= 1e-15 * number("lr"),
            "{at}: learning rate {}",
            got.learning_rate
        );
    }
}

#[test]
fn gpt_trains_as_megatron_does_at_every_layout() {
    let want = json("gpt_trajectory.json");
    let layouts = [
        // (tp, pp, v, dp)
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (4, 1, 1, 1),
        (1, 1, 1, 2),
        (2, 1, 1, 2),
        (1, 1, 1, 4),
        (1, 2, 1, 1),
        (1, 4, 1, 1),
        (1, 2, 2, 1),
        (2, 2, 1, 1),
        (2, 2, 2, 1),
        (1, 2, 1, 2),
        (1, 2, 2, 2),
        (2, 2, 1, 2),
        (4, 4, 1, 1),
    ];
    for (tp, pp, v, dp) in layouts {
        assert_run(Run::at(tp, dp).with_pipeline(pp, v), &want);
    }
}

/// On a device with a driver for Vulkan, Metal or DirectX, with its fused kernels.
#[cfg(feature = "wgpu")]
#[test]
fn a_card_trains_as_megatron_does() {
    let on_card = |run: Run| Run {
        device: burn_megatron::RankDevice::Wgpu,
        kernels: Kernels::Fused,
        ..run
    };
    let want = json("gpt_trajectory.json");
    for (tp, pp, v, dp) in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2)] {
        assert_run(on_card(Run::at(tp, dp).with_pipeline(pp, v)), &want);
    }
    let want = json("llama_trajectory.json");
    for (tp, sequence_parallel) in [(1, false), (2, true)] {
        let run = Run {
            llama: true,
            sequence_parallel,
            ..Run::at(tp, 1)
        };
        assert_run(on_card(run), &want);
    }
    // The same elements are dropped there.
    let dropping = Run {
        dropout: 0.1,
        ..Run::at(2, 1)
    };
    let (want, _) = dropping.train(|_, _| Ok(())).expect("eight steps");
    let (got, _) = on_card(dropping).train(|_, _| Ok(())).expect("eight steps");
    for (got, want) in got.iter().zip(&want) {
        let difference = f64::from((got.lm_loss - want.lm_loss).abs());
        assert!(difference <= 1e-5, "{got:?} is not {want:?}");
    }
}

#[test]
fn llama_trains_as_megatron_does_at_every_layout() {
    let want = json("llama_trajectory.json");
    for (tp, pp, v, dp) in [
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (1, 1, 1, 2),
        (1, 2, 1, 1),
        (1, 4, 1, 1),
        (1, 2, 2, 1),
        (2, 2, 2, 1),
        (2, 2, 1, 2),
    ] {
        let run = Run {
            llama: true,
            ..Run::at(tp, dp).with_pipeline(pp, v)
        };
        assert_run(run, &want);
    }
}

#[test]
fn sequence_parallelism_trains_as_megatron_does() {
    for (llama, tp, pp, v, dp) in [
        (false, 2, 1, 1, 1),
        (false, 4, 1, 1, 1),
        (false, 2, 2, 1, 1),
        (false, 2, 2, 2, 1),
        (false, 2, 1, 1, 2),
        (true, 2, 1, 1, 1),
        (true, 2, 2, 1, 1),
        (true, 2, 2, 2, 1),
        (true, 2, 1, 1, 2),
    ] {
        let run = Run {
            llama,
            sequence_parallel: true,
            ..Run::at(tp, dp).with_pipeline(pp, v)
        };
        let model = if llama { "llama" } else { "gpt" };
        assert_run(run, &json(&format!("{model}_trajectory.json")));
    }
}

#[test]
fn what_is_replicated_stays_the_same_under_sequence_parallelism() {
    // Public complaint: Megatron-LM #1446, norm gradients that differ between tensor-parallel ranks.
    for (llama, tp) in [(false, 2), (false, 4), (true, 2)] {
        let run = Run {
            llama,
            sequence_parallel: true,
            ..Run::at(tp, 1)
        };
        let (_, ranks) = run
            .train(|_, trainer| {
                let (model, values) = (trainer.model(), trainer.model().values());
                let params = model.params().iter();
                let replicated = params.filter(|p| p.spec.sharding == Sharding::Replicated);
                let named = replicated.map(|p| (p.name.clone(), values[p.range.clone()].to_vec()));
                Ok(named.collect::<Vec<_>>())
            })
            .expect("run");
        // Two norms a layer and the last; GPT's have biases, as its row-parallel layers, and positions.
        assert_eq!(ranks[0].len(), if llama { 9 } else { 4 * 6 + 2 + 1 });
        assert!(
            ranks.iter().all(|rank| *rank == ranks[0]),
            "{}",
            run.layout()
        );
    }
}

#[test]
fn dropout_is_the_same_at_every_layout() {
    // Public complaint: Megatron-LM #1256, the wrong generator under sequence parallelism.
    for llama in [false, true] {
        let layouts = [
            // (tp, sequence parallel, pp, v, dp, micro batch)
            (1, false, 1, 1, 1, 2),
            (1, false, 1, 1, 1, 4),
            (2, false, 1, 1, 1, 2),
            (2, true, 1, 1, 1, 2),
            (1, false, 2, 1, 1, 2),
            (1, false, 1, 1, 2, 2),
            (2, true, 2, 2, 2, 1),
        ];
        let runs = layouts.map(|(tp, sequence_parallel, pp, v, dp, micro_batch_size)| {
            let run = Run {
                llama,
                sequence_parallel,
                micro_batch_size,
                dropout: 0.1,
                ..Run::at(tp, dp).with_pipeline(pp, v)
            };
            (run.layout(), run.train(|_, _| Ok(())).expect("run").0)
        });
        for (layout, steps) in &runs[1..] {
            for (a, b) in runs[0].1.iter().zip(steps) {
                let at = format!("{layout}: {b:?} is not {a:?}");
                assert!((a.lm_loss - b.lm_loss).abs() <= 1e-5, "{at}");
                assert!((a.grad_norm / b.grad_norm - 1.0).abs() <= 1e-5, "{at}");
            }
        }
        // And it is there: the first loss is not the one without it.
        let plain = Run {
            llama,
            ..Run::at(1, 1)
        };
        let plain = plain.train(|_, _| Ok(())).expect("run").0;
        assert!((plain[0].lm_loss - runs[0].1[0].lm_loss).abs() > 1e-3);
    }
}

/// The references of the fused kernels, which the other runs use.
#[test]
fn kernels_that_are_not_fused_train_as_megatron_does() {
    for (llama, tp, sequence_parallel, pp) in [
        (false, 1, false, 1),
        (false, 2, true, 2),
        (true, 1, false, 1),
        (true, 2, true, 2),
    ] {
        let run = Run {
            llama,
            sequence_parallel,
            kernels: Kernels::Local,
            ..Run::at(tp, 1).with_pipeline(pp, 1)
        };
        let name = if llama { "llama" } else { "gpt" };
        assert_run(run, &json(&format!("{name}_trajectory.json")));
    }
}

/// Public report: Megatron-LM #1256 (losses that differ with recomputation).
#[test]
fn recomputation_changes_no_bit() {
    let full = |method, num_layers| Recompute::Full { method, num_layers };
    let recomputed = [
        Recompute::Selective,
        full(RecomputeMethod::Uniform, 1),
        full(RecomputeMethod::Uniform, 3),
        full(RecomputeMethod::Block, 1),
    ];
    let layouts = [
        (false, 1, false, 1, 1),
        (false, 2, false, 1, 1),
        (true, 2, true, 2, 1),
    ];
    for (llama, tp, sequence_parallel, pp, dp) in layouts {
        let run = |recompute| {
            let run = Run {
                llama,
                sequence_parallel,
                dropout: 0.1,
                recompute,
                ..Run::at(tp, dp).with_pipeline(pp, 1)
            };
            run.train(|_, trainer| Ok(trainer.model().values()))
                .expect("run")
        };
        let kept = run(None);
        for recompute in recomputed {
            // A stage has two layers where the pipeline has two ranks.
            let recompute = match recompute {
                Recompute::Full { method, num_layers } => full(method, num_layers.min(4 / pp)),
                selective => selective,
            };
            let what = format!("{recompute:?} at llama={llama} tp={tp} pp={pp}");
            assert!(run(Some(recompute)) == kept, "{what}");
        }
    }
}

#[test]
fn other_schedules_and_uneven_stages_train_alike() {
    let want = json("gpt_trajectory.json");
    let pipeline = Run::at(1, 1).with_pipeline(2, 1);
    assert_run(
        Run {
            schedule: Some(PipelineSchedule::GPipe),
            ..pipeline
        },
        &want,
    );
    assert_run(
        Run {
            first_layers: Some(1),
            ..pipeline
        },
        &want,
    );
    // Stages of 1, 2 and 1 layers; and of one layer each between an embedding and a loss alone.
    for pp in [3, 6] {
        assert_run(
            Run {
                account_for_ends: true,
                ..Run::at(1, 1).with_pipeline(pp, 1)
            },
            &want,
        );
    }
}

/// Compares a run's steps and final weights with Megatron's.
fn assert_run(run: Run, want: &Value) {
    let path = run.scratch("final");
    let (steps, _) = run
        .train(|_, trainer| trainer.save_weights(&path))
        .expect("run");
    assert_steps(&steps, want, &run.layout());
    assert_weights(&path, &run);
    std::fs::remove_file(&path).expect("the saved weights");
}

/// Compares saved weights with Megatron's after the eight steps. The key part of the QKV bias is
/// left out: its true gradient is 0, and Adam amplifies the rounding there.
fn assert_weights(path: &std::path::Path, run: &Run) {
    let what = run.layout();
    let (got, want) = (tensors(path), tensors(run.file("final.safetensors")));
    assert_eq!(
        got.keys().collect::<Vec<_>>(),
        want.keys().collect::<Vec<_>>()
    );
    for (name, (shape, want)) in &want {
        assert_eq!(&got[name].0, shape, "{name}");
        for (i, (got, want)) in got[name].1.iter().zip(want).enumerate() {
            let key_bias = name.ends_with("linear_qkv.bias") && i / 16 % 3 == 1;
            let difference = (got - want).abs();
            assert!(
                key_bias || difference <= WEIGHT_TOLERANCE,
                "{what}: {name}[{i}] differs by {difference:e}"
            );
        }
    }
}

#[test]
fn masks_and_loss_averaging_are_megatrons() {
    let variants = json("trajectories_variants.json");
    for (model, name, masked, per_token_loss, erf_gelu) in [
        ("gpt", "masked", true, false, false),
        ("gpt", "masked_pertoken", true, true, false),
        ("gpt", "erfgelu", false, false, true),
        ("llama", "masked", true, false, false),
        ("llama", "masked_pertoken", true, true, false),
    ] {
        for (tp, pp, dp) in [
            (1, 1, 1),
            (2, 1, 1),
            (1, 1, 2),
            (2, 1, 2),
            (2, 2, 1),
            (1, 2, 2),
        ] {
            let run = Run {
                llama: model == "llama",
                masked,
                per_token_loss,
                erf_gelu,
                ..Run::at(tp, dp).with_pipeline(pp, 1)
            };
            let (steps, _) = run.train(|_, _| Ok(())).expect("run");
            let what = format!("{name} {}", run.layout());
            assert_steps(&steps, &variants[format!("{model}/tp1_{name}")], &what);
        }
    }
}

#[test]
fn the_micro_batch_size_does_not_matter() {
    // Public complaints: torchtitan #2972, #1732.
    let want = json("gpt_trajectory.json");
    for (pp, micro_batch_size) in [(1, 1), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (2, 8)] {
        let run = Run {
            micro_batch_size,
            ..Run::at(1, 1).with_pipeline(pp, 1)
        };
        let (steps, _) = run.train(|_, _| Ok(())).expect("run");
        let what = format!("pp={pp}, micro batches of {micro_batch_size}");
        assert_steps(&steps, &want, &what);
    }
}

#[test]
fn the_same_run_twice_has_the_same_bits() {
    for (tp, pp, v, dp) in [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 2)] {
        let run = || {
            Run::at(tp, dp)
                .with_pipeline(pp, v)
                .train(|_, trainer| Ok(trainer.model().values()))
                .expect("run")
        };
        let (first, second) = (run(), run());
        assert_eq!(first, second, "tp={tp} pp={pp} v={v} dp={dp}");
    }
}
