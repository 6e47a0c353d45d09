//! Every parallel layer against its dense counterpart, output and gradients, at tp = 1, 2 and 4.

use burn::module::Module;
use burn::nn::{LayerNormConfig as DenseLayerNormConfig, RmsNormConfig as DenseRmsNormConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::Kernels;
use burn_megatron::autograd::{
    GeluApproximation, Heads, RotaryTable, gelu, rotary_embedding, swiglu,
};
use burn_megatron::dropout::PassContext;
use burn_megatron::grads;
use burn_megatron::layers::*;
use burn_megatron::shard::{FlatBuffer, ParallelBuilder, ParamRecord, ShardedModel};
use megatron_tests::{arbitrary, assert_close, host, on_tp_ranks};
use std::collections::BTreeMap;

const SEED: u64 = 5;

/// The output, the input's gradient, and every parameter's whole gradient.
type Outcome = (Vec<f32>, Vec<f32>, BTreeMap<String, Vec<f32>>);

/// Runs a module at a tensor-parallel size: forward on an arbitrary `[s, b, h]`, backward from an
/// arbitrary weighting of the output. Every rank must agree on what is replicated.
fn run<M: Module + Sync>(
    tp: usize,
    build: impl Fn(&ParallelBuilder) -> M + Sync,
    forward: impl Fn(&M, Tensor<3>) -> Tensor<3> + Sync,
) -> Outcome {
    let ranks = on_tp_ranks(tp, |rank| {
        let builder = ParallelBuilder::new(rank);
        let mut model = ShardedModel::new(build(&builder), &builder);
        model.init(SEED).expect("initial values");
        let flex = Device::flex();
        let x = arbitrary([6, 2, 16], 1, &flex).autodiff().require_grad();
        let y = forward(&model.chunks()[0], x.clone());
        let weighted = y.clone() * arbitrary(y.dims(), 2, &flex).autodiff();
        let mut gradients = weighted.sum().backward();
        let mut flat = FlatBuffer::zeros(model.num_elements(), &flex);
        model.sum_gradients(0, &mut gradients, &mut flat);
        let tp = &*rank.groups.tp.comm;
        grads::all_reduce_partial(&mut flat, model.params(), tp).expect("all ranks sum");
        let dx = x.grad(&gradients).expect("the input's gradient");
        let (params, flat) = (model.params().to_vec(), flat.into_host());
        (host(y.inner()), host(dx), params, flat)
    });
    let (y, dx, ..) = &ranks[0];
    for (other_y, other_dx, ..) in &ranks {
        assert_eq!(
            (y, dx),
            (other_y, other_dx),
            "replicated values differ at tp={tp}"
        );
    }
    let parts = ranks
        .iter()
        .map(|(_, _, params, flat)| (params.as_slice(), flat.as_slice()));
    (y.clone(), dx.clone(), whole_gradients(parts))
}

/// Puts the ranks' parts of every gradient together.
fn whole_gradients<'a>(
    ranks: impl Iterator<Item = (&'a [ParamRecord], &'a [f32])>,
) -> BTreeMap<String, Vec<f32>> {
    let mut whole: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (params, flat) in ranks {
        for param in params {
            let unset = || vec![f32::NAN; param.spec.full_elements()];
            let gradient = whole.entry(param.name.clone()).or_insert_with(unset);
            let mut part = &flat[param.range.clone()];
            for run in param.spec.runs() {
                let (now, rest) = part.split_at(run.len());
                for (whole, value) in gradient[run].iter_mut().zip(now) {
                    assert!(
                        whole.is_nan() || whole == value,
                        "{} differs between ranks",
                        param.name
                    );
                    *whole = *value;
                }
                part = rest;
            }
        }
    }
    whole
}

fn assert_same(got: &Outcome, want: &Outcome, what: &str) {
    assert_close(&got.0, &want.0, 2e-6, &format!("{what}: output"));
    assert_close(&got.1, &want.1, 2e-6, &format!("{what}: input gradient"));
    assert_eq!(
        got.2.keys().collect::<Vec<_>>(),
        want.2.keys().collect::<Vec<_>>()
    );
    for (name, want) in &want.2 {
        assert_close(
            &got.2[name],
            want,
            2e-6,
            &format!("{what}: gradient of {name}"),
        );
    }
}

/// The sum that a layer left to its caller (`skip_bias_add`).
fn added((y, bias): (Tensor<3>, Option<Tensor<1>>)) -> Tensor<3> {
    y + bias.expect("the bias that was not added").unsqueeze()
}

#[test]
fn linear_layers_equal_a_dense_product() {
    // The whole weights, from a single rank's layer of the same names.
    let dense = |input: usize, output: usize| {
        run(
            1,
            move |b| {
                ColumnParallelLinearConfig::new(input, output)
                    .with_init_std(0.3)
                    .init(b)
            },
            |layer, x| {
                let weight = layer.weight.val();
                let [s, b, i] = x.dims();
                let y = x.reshape([s * b, i]).matmul(weight.transpose());
                let o = y.dims()[1];
                y.reshape([s, b, o]) + layer.bias.as_ref().expect("a bias").val().unsqueeze()
            },
        )
    };
    let want = dense(16, 32);
    for tp in [1, 2, 4] {
        let column = ColumnParallelLinearConfig::new(16, 32).with_init_std(0.3);
        let gathered = column.clone().with_gather_output(true);
        let got = run(tp, |b| gathered.init(b), |layer, x| layer.forward(x).0);
        assert_same(&got, &want, &format!("column, gathered, tp={tp}"));

        let skipping = gathered.with_skip_bias_add(true);
        let got = run(tp, |b| skipping.init(b), |layer, x| added(layer.forward(x)));
        assert_same(&got, &want, &format!("column, bias apart, tp={tp}"));

        let row = RowParallelLinearConfig::new(16, 32).with_init_std(0.3);
        let whole = row.with_input_is_parallel(false);
        let got = run(tp, |b| whole.init(b), |layer, x| layer.forward(x).0);
        assert_same(&got, &want, &format!("row, whole input, tp={tp}"));

        let skipping = whole.with_skip_bias_add(true);
        let got = run(tp, |b| skipping.init(b), |layer, x| added(layer.forward(x)));
        assert_same(&got, &want, &format!("row, bias apart, tp={tp}"));
    }
}

fn transformer() -> TransformerConfig {
    TransformerConfig {
        num_layers: 1,
        hidden_size: 16,
        num_attention_heads: 4,
        ffn_hidden_size: 64,
        layernorm_epsilon: 1e-5,
        init_method_std: 0.3,
        activation: Activation::Gelu(GeluApproximation::Tanh),
        num_query_groups: 4,
        kv_channels: 4,
        normalization: Normalization::LayerNorm,
        add_bias_linear: true,
        rotary: None,
        qk_layernorm: false,
        hidden_dropout: 0.0,
        attention_dropout: 0.0,
        recompute: None,
    }
}

/// Llama's choices, and what few models have: normalised queries and keys, half of each head turned.
fn llama() -> TransformerConfig {
    TransformerConfig {
        activation: Activation::SwiGlu,
        normalization: Normalization::RmsNorm,
        add_bias_linear: false,
        rotary: Some(RotaryConfig {
            rotary_base: 10_000.0,
            rotary_percent: 0.5,
            rope_scaling_factor: None,
        }),
        qk_layernorm: true,
        num_attention_heads: 8,
        hidden_dropout: 0.2,
        attention_dropout: 0.3,
        ..transformer()
    }
}

#[test]
fn attention_mlp_and_layer_do_not_depend_on_tp() {
    let squared = TransformerConfig {
        activation: Activation::SquaredRelu,
        // A bias on keys, as LayerNorm has, moves all scores of a query alike: its true gradient is 0.
        normalization: Normalization::RmsNorm,
        qk_layernorm: true,
        ..transformer()
    };
    for config in [transformer(), llama(), squared] {
        compare_over_tp(&config);
    }
}

fn compare_over_tp(config: &TransformerConfig) {
    let spec = LayerSpec::gpt();
    let pass = PassContext {
        training: true,
        ..PassContext::evaluation()
    };
    let attention = |tp| {
        run(
            tp,
            |b| SelfAttentionConfig::from(config).init(b),
            |layer, x| layer.forward(x, &pass),
        )
    };
    let mlp = |tp| {
        run(
            tp,
            |b| MlpConfig::from(config).init(b),
            |layer, x| layer.forward(x),
        )
    };
    let layer = |tp| {
        run(
            tp,
            |b| spec.layer(config, b),
            |layer, x| layer.forward(x, &pass),
        )
    };
    for tp in [2, 4] {
        assert_same(
            &attention(tp),
            &attention(1),
            &format!("attention, tp={tp}"),
        );
        assert_same(&mlp(tp), &mlp(1), &format!("mlp, tp={tp}"));
        assert_same(&layer(tp), &layer(1), &format!("layer, tp={tp}"));
    }
}

#[test]
fn layer_norm_equals_burns() {
    let ours = run(
        1,
        |b| LayerNormConfig::new(16).init(b),
        |norm, x| norm.forward(x),
    );
    let flex = Device::flex();
    let x = arbitrary([6, 2, 16], 1, &flex).autodiff().require_grad();
    let dense = DenseLayerNormConfig::new(16).init(&flex.clone().autodiff());
    let y = dense.forward(x.clone());
    let weighted = y.clone() * arbitrary([6, 2, 16], 2, &flex).autodiff();
    let gradients = weighted.sum().backward();
    assert_close(&ours.0, &host(y.inner()), 2e-6, "output");
    assert_close(
        &ours.1,
        &host(x.grad(&gradients).expect("a gradient")),
        2e-6,
        "input gradient",
    );
    let weight = dense.gamma.val().grad(&gradients).expect("a gradient");
    assert_close(&ours.2["weight"], &host(weight), 2e-6, "weight gradient");
}

#[test]
fn embeddings_look_up_every_token_once() {
    let tokens = |device: &Device| -> Tensor<1, Int> {
        let ids = [0i64, 5, 31, 8, 8, 16, 24, 1, 0, 30, 7, 15];
        Tensor::from_data(TensorData::new(ids.to_vec(), [12]), device)
    };
    // The input only lends its shape: the gradient of interest is the table's.
    let forward = |layer: &VocabParallelEmbedding, x: Tensor<3>| {
        layer.forward(tokens(&x.device())).reshape([6, 2, 16]) + x
    };
    let config = VocabParallelEmbeddingConfig::new(30, 32, 16);
    let want = run(
        1,
        |b| config.init(b),
        |layer, x| {
            let ids = tokens(&x.device()).one_hot::<2>(32).float();
            ids.matmul(layer.weight.val()).reshape([6, 2, 16]) + x
        },
    );
    for tp in [1, 2, 4] {
        assert_same(
            &run(tp, |b| config.init(b), forward),
            &want,
            &format!("tp={tp}"),
        );
    }
}

#[test]
fn rms_norm_equals_burns() {
    let ours = run(
        1,
        |b| RmsNormConfig::new(16).init(b),
        |norm, x| norm.forward(x),
    );
    let flex = Device::flex();
    let x = arbitrary([6, 2, 16], 1, &flex).autodiff().require_grad();
    let dense = DenseRmsNormConfig::new(16)
        .with_epsilon(1e-5)
        .init(&flex.clone().autodiff());
    let y = dense.forward(x.clone());
    let weighted = y.clone() * arbitrary([6, 2, 16], 2, &flex).autodiff();
    let gradients = weighted.sum().backward();
    assert_close(&ours.0, &host(y.inner()), 2e-6, "output");
    let dx = host(x.grad(&gradients).expect("a gradient"));
    assert_close(&ours.1, &dx, 2e-6, "input gradient");
    let weight = host(dense.gamma.grad(&gradients).expect("a gradient"));
    assert_close(&ours.2["weight"], &weight, 2e-6, "weight gradient");
}

#[test]
fn swiglu_and_rotary_equal_their_formulas() {
    let flex = Device::flex();
    let input = || arbitrary([3, 5, 8], 1, &flex).autodiff().require_grad();
    let compare = |what: &str, ours: Tensor<3>, x: &Tensor<3>, plain: Tensor<3>, y: &Tensor<3>| {
        let weights = arbitrary(ours.dims(), 2, &flex).autodiff();
        let got = (ours.clone() * weights.clone()).sum().backward();
        let want = (plain.clone() * weights).sum().backward();
        assert_close(&host(ours.inner()), &host(plain.inner()), 1e-6, what);
        let (got, want) = (x.grad(&got), y.grad(&want));
        let [got, want] = [got, want].map(|g| host(g.expect("a gradient")));
        assert_close(&got, &want, 1e-6, &format!("{what}: gradient"));
    };
    let part = |x: &Tensor<3>, from: usize, to: usize| x.clone().slice([0..3, 0..5, from..to]);

    for kernels in [Kernels::Fused, Kernels::Local] {
        let (x, y) = (input(), input());
        let (gate, up) = (part(&y, 0, 4), part(&y, 4, 8));
        let plain = burn::tensor::activation::silu(gate) * up;
        compare("swiglu", swiglu(x.clone(), kernels), &x, plain, &y);

        // The two pairs of the first of two heads turn, by 1 and by 0.1 radians a position.
        let frequencies = [1.0, 0.1];
        let (x, y) = (input(), input());
        let table = RotaryTable::new(&frequencies, 3);
        let heads = Heads {
            width: 4,
            turned: 1,
        };
        let ours = rotary_embedding(x.clone(), heads, &table, kernels);
        let angles = (0..3).flat_map(|p| frequencies.map(|f| p as f32 * f));
        let angles = TensorData::new(angles.collect(), [3, 1, 2]);
        let angles = Tensor::<3>::from_data(angles, &flex).autodiff();
        let (first, second) = (part(&y, 0, 2), part(&y, 2, 4));
        let (cos, sin) = (angles.clone().cos(), angles.sin());
        let turned = [
            first.clone() * cos.clone() - second.clone() * sin.clone(),
            second * cos + first * sin,
            part(&y, 4, 8),
        ];
        compare("rotary", ours, &x, Tensor::cat(turned.to_vec(), 2), &y);
    }
}

#[test]
fn gelu_follows_its_own_derivative() {
    let flex = Device::flex();
    let both = [Kernels::Fused, Kernels::Local].into_iter();
    let both = both.flat_map(|k| [(k, GeluApproximation::Tanh), (k, GeluApproximation::Erf)]);
    for (kernels, how) in both {
        let points: Vec<f32> = (-60..=60).map(|i| i as f32 / 10.0).collect();
        let x = Tensor::<1>::from_data(points.as_slice(), &flex)
            .autodiff()
            .require_grad();
        let gradients = gelu(x.clone(), None, how, kernels).sum().backward();
        let got = host(x.grad(&gradients).expect("a gradient"));
        // Central differences of the formula in f64.
        let f = |x: f64| match how {
            GeluApproximation::Tanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            GeluApproximation::Erf => x * normal_cdf(x),
        };
        let slope = |x: f64| ((f(x + 1e-4) - f(x - 1e-4)) / 2e-4) as f32;
        let want: Vec<f32> = points.iter().map(|x| slope(f64::from(*x))).collect();
        assert_close(&got, &want, 2e-6, &format!("{kernels:?} {how:?}"));
    }
}

/// The normal distribution function, integrated by Simpson's rule from 0.
fn normal_cdf(x: f64) -> f64 {
    let n = 2000;
    let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let step = x / f64::from(n);
    let weight = |i: i32| match i {
        0 => 1.0,
        i if i == n => 1.0,
        i => f64::from(2 + 2 * (i % 2)),
    };
    let sum: f64 = (0..=n)
        .map(|i| weight(i) * density(f64::from(i) * step))
        .sum();
    0.5 + sum * step / 3.0
}
