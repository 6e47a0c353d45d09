//! A model of a user's own, from the public parts alone: the README's example, trained.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};
use burn_megatron::models::gpt::GptModel;
use burn_megatron::prelude::*;
use megatron_tests::Run;

/// A language model of one MLP: each token predicts the next from itself alone.
#[derive(Module, Debug)]
struct TinyLm {
    words: VocabParallelEmbedding,
    mlp: Mlp,
    head: ColumnParallelLinear,
}

impl TinyLm {
    fn new(builder: &ParallelBuilder) -> Self {
        let mlp = MlpConfig {
            hidden_size: 32,
            ffn_hidden_size: 64,
            gelu: GeluApproximation::Tanh,
            init_std: 0.2,
            output_init_std: 0.2,
        };
        TinyLm {
            words: VocabParallelEmbeddingConfig::new(50, 64, 32)
                .with_init_std(0.2)
                .init(builder),
            mlp: mlp.init(builder),
            head: ColumnParallelLinearConfig::new(32, 64)
                .with_bias(false)
                .init(builder),
        }
    }
}

impl Stage for TinyLm {
    fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<2> {
        let [b, s] = tokens.dims();
        let x = self
            .words
            .forward(tokens.reshape([b * s]))
            .reshape([b, s, 32]);
        let (logits, _) = self.head.forward(self.mlp.forward(x));
        let v = logits.dims()[2];
        let logits = logits.reshape([b * s, v]);
        let shard = self.words.vocab_shard();
        vocab_parallel_cross_entropy(logits, labels.reshape([b * s]), &shard).reshape([b, s])
    }
}

/// Trains on sequences that count upwards, at a layout; returns the loss of every step.
fn train(tp: usize, dp: usize) -> Result<Vec<f32>> {
    let grid = RankGrid::new(
        Axes {
            tp,
            dp,
            ..Axes::all(1)
        },
        DEFAULT_ORDER,
    )?;
    let batch = BatchConfig {
        seq_length: 16,
        micro_batch_size: 2,
        global_batch_size: 8,
    };
    let config = TrainerConfig::new(
        OptimizerConfig {
            lr: 0.02,
            ..Default::default()
        },
        batch,
        50,
        60,
    )?;
    let losses = run_ranks(&grid, DEFAULT_TIMEOUT, |rank| {
        let builder = ParallelBuilder::new(rank);
        let mut model = ShardedModel::new(TinyLm::new(&builder), &builder);
        model.init(1234)?;
        let mut trainer = Trainer::for_model(model, config.clone(), rank);
        let dp_rank = rank.groups.dp.comm.rank();
        (0..60)
            .map(|step| {
                let microbatch = |i: usize| MicroBatch {
                    tokens: (0..34)
                        .map(|t| ((step * 7 + (i * dp + dp_rank) * 34 + t) % 50) as i64)
                        .collect(),
                    loss_mask: None,
                };
                let share: Vec<_> = (0..4 / dp).map(microbatch).collect();
                Ok(trainer.train_step(&share)?.lm_loss)
            })
            .collect::<Result<Vec<f32>>>()
    })?;
    Ok(losses.into_iter().next().unwrap_or_default())
}

#[test]
fn it_learns_and_its_losses_do_not_depend_on_the_layout() {
    let one = train(1, 1).expect("one rank");
    assert!(one[59] < 0.3 * one[0], "from {} to {}", one[0], one[59]);
    for (tp, dp) in [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4)] {
        let other = train(tp, dp).expect("ranks");
        for (step, (a, b)) in one.iter().zip(&other).enumerate() {
            assert!(
                (a - b).abs() < 2e-5,
                "tp={tp} dp={dp} step {step}: {b} is not {a}"
            );
        }
    }
}

/// A norm of a user's own: root mean square, without a bias.
#[derive(Module, Debug)]
struct OwnNorm {
    scale: Param<Tensor<1>>,
}

impl Sublayer for OwnNorm {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let square = x.clone().powi_scalar(2).mean_dim(2);
        x / (square + 1e-5).sqrt() * self.scale.val().unsqueeze()
    }
}

#[test]
fn a_gpt_takes_another_norm_through_its_layer_spec() {
    let norm = |config: &TransformerConfig, builder: &ParallelBuilder| OwnNorm {
        scale: builder.param(ParamSpec::replicated([config.hidden_size], Init::Ones)),
    };
    let gpt = LayerSpec::gpt();
    let spec = LayerSpec {
        input_layernorm: norm,
        self_attention: gpt.self_attention,
        pre_mlp_layernorm: norm,
        mlp: gpt.mlp,
    };
    let losses = [(1, 1), (2, 2)].map(|(tp, dp)| {
        let config = Run::at(tp, dp).config();
        let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
            let builder = ParallelBuilder::new(rank);
            let module: GptModel<OwnNorm, SelfAttention, Mlp> =
                config.model().init_with(&spec, &builder);
            let mut model = ShardedModel::new(module, &builder);
            model.init(7)?;
            let names: Vec<_> = model.params().iter().map(|p| p.name.clone()).collect();
            assert!(names.contains(&"decoder.layers.3.pre_mlp_layernorm.scale".into()));
            let mut trainer = Trainer::for_model(model, config.trainer(), rank);
            let dp_rank = rank.groups.dp.comm.rank();
            let microbatch = |i: usize| MicroBatch {
                tokens: (0..66)
                    .map(|t| ((i * dp + dp_rank) * 66 + t) as i64 % 128)
                    .collect(),
                loss_mask: None,
            };
            let share: Vec<_> = (0..4 / dp).map(microbatch).collect();
            (0..8)
                .map(|_| Ok(trainer.train_step(&share)?.lm_loss))
                .collect::<Result<Vec<_>>>()
        });
        ranks.expect("ranks").swap_remove(0)
    });
    assert!(losses[0][7] < losses[0][0]);
    for (a, b) in losses[0].iter().zip(&losses[1]) {
        assert!((a - b).abs() < 2e-6, "{losses:?}");
    }
}
