//! A model of a user's own, from the public parts alone: the README's example, trained.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};
use burn_megatron::models::gpt::GptModel;
use burn_megatron::prelude::*;
use megatron_tests::Run;

/// One pipeline stage of a language model of four MLPs: each token predicts the next from itself
/// alone.
#[derive(Module, Debug)]
struct TinyLm {
    words: Option<VocabParallelEmbedding>,
    /// Numbered over the whole model, so that their names do not depend on the layout.
    mlps: Vec<Option<Mlp>>,
    head: Option<ColumnParallelLinear>,
    #[module(skip)]
    vocab: VocabShard,
    /// Compute the MLPs again in the backward.
    #[module(skip)]
    recompute: bool,
}

impl TinyLm {
    fn new(stage: &StageLayers, recompute: bool, builder: &ParallelBuilder) -> Self {
        let mlp = MlpConfig {
            hidden_size: 32,
            ffn_hidden_size: 64,
            activation: Activation::Gelu(GeluApproximation::Tanh),
            bias: true,
            init_std: 0.2,
            output_init_std: 0.02,
        };
        let words = VocabParallelEmbeddingConfig::new(50, 64, 32).with_init_std(0.2);
        let head = ColumnParallelLinearConfig::new(32, 64).with_bias(false);
        TinyLm {
            words: stage.is_first().then(|| words.init(builder)),
            mlps: (0..stage.layers.end)
                .map(|i| stage.layers.contains(&i).then(|| mlp.init(builder)))
                .collect(),
            head: stage.is_last().then(|| head.init(builder)),
            vocab: VocabShard::new(50, 64, builder.tp()),
            recompute,
        }
    }
}

impl Stage for TinyLm {
    fn hidden_size(&self) -> usize {
        32
    }

    fn forward(&self, input: StageInput, _: &PassContext) -> Tensor<3> {
        let hidden = match (input, &self.words) {
            (StageInput::Tokens(tokens), Some(words)) => {
                let [b, s] = tokens.dims();
                let hidden = words.forward(tokens.transpose().reshape([s * b]));
                // Under sequence parallelism a rank gets its part of the positions.
                let positions = hidden.dims()[0] / b;
                hidden.reshape([positions, b, 32])
            }
            (StageInput::Hidden(hidden), None) => hidden,
            _ => panic!("tokens enter where the embedding is"),
        };
        let layer = |mlp: &Mlp, x: Tensor<3>| x.clone() + mlp.forward(x);
        let mlps = self.mlps.iter().flatten();
        mlps.fold(hidden, |x, mlp| match self.recompute {
            true => recompute(mlp, x, layer),
            false => layer(mlp, x),
        })
    }

    fn loss(&self, hidden: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
        let [b, s] = labels.dims();
        let head = self.head.as_ref().expect("the last stage has the head");
        let (logits, _) = head.forward(hidden);
        let v = logits.dims()[2];
        let labels = labels.transpose().reshape([s * b]);
        let loss = vocab_parallel_cross_entropy(logits.reshape([s * b, v]), labels, &self.vocab);
        loss.reshape([s, b]).transpose()
    }
}

/// `(tp, sequence parallel, pp, v, dp)`
type LayoutOf = (usize, bool, usize, usize, usize);

/// Trains on sequences that count upwards, at a layout; returns the loss of every step.
fn train(layout: LayoutOf, recompute: bool) -> Result<Vec<f32>> {
    let (tp, sequence_parallel, pp, v, dp) = layout;
    let grid = RankGrid::new(
        Axes {
            tp,
            pp,
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
            lr: 0.005,
            ..Default::default()
        },
        batch,
        50,
        60,
    )?;
    let losses = run_ranks(&grid, DEFAULT_TIMEOUT, |rank| {
        let builder = ParallelBuilder::new(rank).with_sequence_parallel(sequence_parallel);
        let stages = StageLayers::equal(4, pp * v)?;
        let mine = stages.iter().skip(rank.groups.pp.comm.rank()).step_by(pp);
        let chunks = mine
            .map(|stage| TinyLm::new(stage, recompute, &builder))
            .collect();
        let mut model = ShardedModel::of_chunks(chunks, &builder);
        model.init(1234)?;
        let mut trainer = Trainer::for_model(model, config.clone(), rank)?;
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
    let one = train((1, false, 1, 1, 1), false).expect("one rank");
    assert!(one[59] < 0.3 * one[0], "from {} to {}", one[0], one[59]);
    let layouts = [
        (2, false, 1, 1, 1),
        (4, false, 1, 1, 1),
        (1, false, 1, 1, 2),
        (2, false, 1, 1, 2),
        (1, false, 1, 1, 4),
        (1, false, 2, 1, 1),
        (1, false, 2, 2, 2),
        (2, false, 4, 1, 1),
        (2, true, 1, 1, 1),
        (4, true, 1, 1, 1),
        (2, true, 2, 2, 1),
    ];
    for layout in layouts {
        let other = train(layout, false).expect("ranks");
        for (step, (a, b)) in one.iter().zip(&other).enumerate() {
            assert!(
                (a - b).abs() < 2e-6,
                "{layout:?} step {step}: {b} is not {a}"
            );
        }
    }
}

#[test]
fn recomputing_its_layers_changes_no_bit() {
    for layout in [(1, false, 1, 1, 1), (2, true, 2, 2, 1)] {
        let kept = train(layout, false).expect("ranks");
        assert_eq!(train(layout, true).expect("ranks"), kept, "{layout:?}");
    }
}

/// A norm of a user's own: root mean square, without a bias.
#[derive(Module, Debug)]
struct OwnNorm {
    scale: Param<Tensor<1>>,
}

impl Sublayer for OwnNorm {
    fn forward(&self, x: Tensor<3>, _: &PassContext) -> Tensor<3> {
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
    let losses = [(1, 1, 1), (2, 2, 1), (1, 2, 2)].map(|(tp, dp, pp)| {
        let config = Run::at(tp, dp).with_pipeline(pp, 1).config();
        let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
            let builder = ParallelBuilder::new(rank);
            let stages = config.layout().stages_of(rank.groups.pp.comm.rank());
            let chunks = stages.map(|stage| config.model().init_stage(&spec, stage, &builder));
            let chunks: Vec<GptModel<OwnNorm, SelfAttention, Mlp>> = chunks.collect();
            let mut model = ShardedModel::of_chunks(chunks, &builder);
            model.init(7)?;
            let names: Vec<_> = model.params().iter().map(|p| p.name.clone()).collect();
            let last = rank.groups.pp.comm.rank() + 1 == pp;
            assert_eq!(
                names.contains(&"decoder.layers.3.pre_mlp_layernorm.scale".into()),
                last
            );
            let mut trainer = Trainer::for_model(model, config.trainer(), rank)?;
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
    for other in &losses[1..] {
        for (a, b) in losses[0].iter().zip(other) {
            assert!((a - b).abs() < 2e-6, "{losses:?}");
        }
    }
}
