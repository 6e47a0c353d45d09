//! What a rank's memory goes to, against what the configuration predicts.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_megatron::Kernels;
use burn_megatron::autograd::take_gradient;
use burn_megatron::memory::CountingAllocator;
use burn_megatron::models::gpt::GptModel;
use burn_megatron::prelude::*;
use burn_megatron::train::{MeasuredMemory, RankMemory};
use megatron_tests::Run;
use std::sync::Arc;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

const UNIFORM: Option<Recompute> = full(RecomputeMethod::Uniform, 1);

const fn full(method: RecomputeMethod, num_layers: usize) -> Option<Recompute> {
    Some(Recompute::Full { method, num_layers })
}

/// Every rank's predicted and measured memory, the median of three steps of four micro batches of so many samples of
/// 128 tokens.
fn memory(run: Run, samples: usize) -> Vec<(RankMemory, MeasuredMemory)> {
    let mut config = run.config().config().clone();
    config.batch = BatchConfig {
        seq_length: 128,
        micro_batch_size: samples,
        global_batch_size: 4 * samples,
    };
    let config = config.resolve().expect("a legal configuration");
    let microbatch = |i: usize| MicroBatch {
        tokens: (0..129 * samples)
            .map(|t| ((i * 31 + t * 7) % 128) as i64)
            .collect(),
        loss_mask: None,
    };
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(&config, rank, None)?;
        let share = rank.reads_data().then(|| (0..4).map(microbatch).collect());
        let share: Vec<MicroBatch> = share.unwrap_or_default();
        // Burn clears away what graphs leave when it comes to it, sometimes while a forward is measured.
        let mut measured = Vec::new();
        for _ in 0..4 {
            trainer.train_step(&share)?;
            measured.push(*trainer.memory().expect("the tests count"));
        }
        measured.remove(0);
        measured.sort_by_key(|memory| memory.parts.activations);
        let predicted = config.rank_memory(rank.groups.pp.comm.rank());
        Ok((predicted, measured[1]))
    });
    ranks.expect("ranks")
}

fn in_16_bits(run: Run) -> Run {
    Run {
        mixed_precision: MixedPrecisionConfig {
            bf16: true,
            ..MixedPrecisionConfig::default()
        },
        ..run
    }
}

fn local(run: Run) -> Run {
    Run {
        kernels: Kernels::Local,
        ..run
    }
}

/// Three samples in place of one: what the graphs' nodes take cancels, what stays is values. Sequence
/// parallelism divides what plain tensor parallelism replicates; full recomputation keeps one input for
/// each layer.
#[test]
fn graphs_keep_what_was_predicted() {
    let sequence_parallel = Run {
        sequence_parallel: true,
        ..Run::at(2, 1)
    };
    let selective = Some(Recompute::Selective);
    let block = full(RecomputeMethod::Block, 1);
    let base = Run::at(1, 1);
    for run in [
        base,
        Run {
            dropout: 0.1,
            ..base
        },
        Run {
            llama: true,
            ..base
        },
        Run {
            recompute: selective,
            ..base
        },
        Run {
            recompute: UNIFORM,
            ..base
        },
        Run::at(2, 1),
        sequence_parallel,
        Run {
            llama: true,
            dropout: 0.1,
            ..sequence_parallel
        },
        Run {
            recompute: block,
            ..sequence_parallel
        },
        Run {
            recompute: UNIFORM,
            ..sequence_parallel.with_pipeline(2, 1)
        },
        local(base),
        local(Run {
            recompute: selective,
            dropout: 0.1,
            ..base
        }),
        local(Run {
            llama: true,
            ..sequence_parallel.with_pipeline(2, 1)
        }),
        in_16_bits(base),
        in_16_bits(Run {
            dropout: 0.1,
            ..sequence_parallel
        }),
        in_16_bits(Run {
            llama: true,
            ..Run::at(2, 1).with_pipeline(2, 1)
        }),
        base.with_pipeline(2, 1),
        base.with_pipeline(2, 2),
        base.with_pipeline(4, 1),
    ] {
        let (one, three) = (memory(run, 1), memory(run, 3));
        for (rank, (one, three)) in one.into_iter().zip(three).enumerate() {
            let want = three.0.activations - one.0.activations;
            let got = three.1.parts.activations - one.1.parts.activations;
            let what = format!(
                "{} dropout {} {:?} bf16 {} {:?}",
                run.layout(),
                run.dropout,
                run.recompute,
                run.mixed_precision.bf16,
                run.kernels
            );
            assert!(
                got.abs_diff(want) <= want / 1000 + 4096,
                "{what}, rank {rank}: {got} bytes, not {want}"
            );
        }
    }
}

#[test]
fn weights_gradients_and_optimizer_take_what_was_predicted() {
    let base = Run::at(1, 1);
    for run in [base, base.with_pipeline(2, 1), in_16_bits(base)] {
        for (predicted, measured) in memory(run, 1) {
            let (got, want) = (measured.parts, predicted);
            assert_eq!(got.gradients, want.gradients);
            assert!(got.optimizer - want.optimizer < 4096, "{got:?}");
            // Beside the values, each parameter has a name, a specification and a node.
            let parameters = 4096 * 60;
            assert!(got.weights - want.weights < parameters, "{got:?}");
            let all = got.weights + got.gradients + got.optimizer + got.activations;
            assert!(measured.peak > all, "{measured:?}");
        }
    }
}

/// A trainer on this thread alone, and what it trains on.
fn alone() -> (Trainer, Vec<MicroBatch>) {
    let config = Run::at(1, 1).config();
    let rank = RankContext::single(Device::flex().autodiff());
    let batch = config.config().batch;
    let share = (0..batch.global_batch_size / batch.micro_batch_size).map(|i| MicroBatch {
        tokens: (0..batch.micro_batch_size * (batch.seq_length + 1))
            .map(|t| ((i * 31 + t * 7) % 128) as i64)
            .collect(),
        loss_mask: None,
    });
    let trainer = Trainer::new(&config, &rank, None).expect("a trainer");
    (trainer, share.collect())
}

/// The model's weights and the optimizer's are the same values in f32; a copy of the model is one all the same.
#[test]
fn a_step_leaves_a_copy_of_the_model_as_it_was() {
    let (mut trainer, share) = alone();
    let table = |model: &GptModel| {
        let embedding = model.embedding.as_ref().expect("the first stage");
        let weight = embedding.word_embeddings.weight.val();
        weight.into_data().try_to_vec::<f32>().expect("f32")
    };
    trainer.train_step(&share).expect("a step");
    let copy = trainer.model().chunks()[0].clone();
    let before = table(&copy);
    assert_eq!(table(&trainer.model().chunks()[0]), before);
    trainer.train_step(&share).expect("a step");
    assert_eq!(table(&copy), before);
    let now = table(&trainer.model().chunks()[0]);
    assert_ne!(now, before);
    assert_eq!(now, trainer.model().values()[..now.len()]);
    // And the next step goes on from where the last one ended.
    drop(copy);
    trainer.train_step(&share).expect("a step");
    assert_ne!(table(&trainer.model().chunks()[0]), now);
}

/// A backward holds the gradients of the layer that it is in, not of all that it has passed.
#[test]
fn gradients_do_not_wait_for_one_another() {
    for run in [Run::at(1, 1), local(Run::at(1, 1))] {
        let mut config = run.config().config().clone();
        config.batch = BatchConfig {
            seq_length: 4,
            micro_batch_size: 1,
            global_batch_size: 1,
        };
        // Weights outweigh what a backward works with.
        config.model.hidden_size = 256;
        config.model.num_layers = 8;
        let config = config.resolve().expect("a legal configuration");
        let rank = RankContext::single(Device::flex().autodiff());
        let mut trainer = Trainer::new(&config, &rank, None).expect("a trainer");
        let microbatch = MicroBatch {
            tokens: (0..5).collect(),
            loss_mask: None,
        };
        for _ in 0..2 {
            trainer
                .train_step(std::slice::from_ref(&microbatch))
                .expect("a step");
        }
        let MeasuredMemory { parts, peak } = *trainer.memory().expect("the tests count");
        let beside = peak - parts.weights - parts.gradients - parts.optimizer - parts.activations;
        let of_layer = parts.gradients / 8;
        assert!(
            beside < 2 * of_layer,
            "{beside} bytes, a layer has {of_layer}"
        );
    }
}

/// A forward whose backward never comes: its graph goes with the next backward, and its leaves' hooks with the one after.
#[test]
fn a_graph_that_is_given_up_is_freed() {
    struct Hooks(Arc<()>);

    impl ModuleMapper for Hooks {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, device, shape) = (param.id, param.lazy_device(), param.lazy_shape());
            let token = self.0.clone();
            let hooked = move |_: &_, _: bool| {
                let token = token.clone();
                take_gradient(param.val(), move |_| _ = &token)
            };
            Param::uninitialized(id, hooked, device, true, shape)
        }
    }

    let (mut trainer, share) = alone();
    let in_graphs = Arc::new(());
    for _ in 0..2 {
        let model = trainer.model().chunks()[0].clone();
        let model = model.map(&mut Hooks(in_graphs.clone()));
        let tokens = Tensor::<1, Int>::arange(0..32, &Device::flex().autodiff());
        let tokens = tokens.reshape([2, 16]);
        let input = StageInput::Tokens(tokens.clone());
        let hidden = model.forward(input, &PassContext::evaluation());
        let loss = model.loss(hidden, tokens);
        drop((model, loss));
        assert!(Arc::strong_count(&in_graphs) > 50);
        trainer.train_step(&share).expect("a step");
        trainer.train_step(&share).expect("a step");
        assert_eq!(Arc::strong_count(&in_graphs), 1);
    }
}

#[test]
fn a_step_that_failed_takes_nothing_from_the_next() {
    let (mut trainer, share) = alone();
    let (mut other, _) = alone();
    let mut broken = share.clone();
    let batch = Run::at(1, 1).config().config().batch;
    let labels = batch.micro_batch_size * batch.seq_length;
    broken[0].loss_mask = Some(vec![f32::NAN; labels]);
    let error = trainer.train_step(&broken).expect_err("no loss");
    assert!(error.to_string().contains("found a loss of NaN"), "{error}");
    let [again, whole] = [&mut trainer, &mut other].map(|t| t.train_step(&share).expect("a step"));
    assert_eq!(again, whole);
}
