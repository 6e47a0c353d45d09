//! The vocabulary-parallel loss against Megatron's, and its independence of padding.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::autograd::{VocabShard, vocab_parallel_cross_entropy};
use burn_megatron::topology::{padded_vocab_size, shard_range};
use megatron_tests::{arbitrary, assert_close, fixture, host, on_tp_ranks, tensors};

/// Loss and whole logits' gradient at a tensor-parallel size, for logits `[n, padded]`.
fn run(
    tp: usize,
    logits: &Tensor<2>,
    (vocab_size, label_smoothing): (usize, f64),
    target: &[f32],
    upstream: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let [n, padded] = logits.dims();
    let ranks = on_tp_ranks(tp, |rank| {
        let comm = &rank.groups.tp.comm;
        let shard = VocabShard {
            rows: shard_range(padded, tp, comm.rank()),
            vocab_size,
            label_smoothing,
            tp: comm.clone(),
        };
        let mine = logits.clone().slice([0..n, shard.rows.clone()]);
        let mine = mine.autodiff().require_grad();
        let ids: Vec<i64> = target.iter().map(|id| *id as i64).collect();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [n]), &rank.device);
        let loss = vocab_parallel_cross_entropy(mine.clone(), ids, &shard);
        let weights = TensorData::new(upstream.to_vec(), [n]);
        let weighted = loss.clone() * Tensor::from_data(weights, &rank.device);
        let gradients = weighted.sum().backward();
        (
            host(loss.inner()),
            mine.grad(&gradients).expect("a gradient"),
        )
    });
    let (losses, parts): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert!(
        losses.iter().all(|l| *l == losses[0]),
        "every rank has the same loss"
    );
    (losses[0].clone(), host(Tensor::cat(parts, 1)))
}

#[test]
fn loss_and_gradient_are_megatrons() {
    let file = tensors(fixture("vocab_cross_entropy.safetensors"));
    let flex = Device::flex();
    let logits = TensorData::new(file["logits"].1.clone(), [18, 96]);
    let logits = Tensor::<2>::from_data(logits, &flex);
    for (name, smoothing) in [("ls0.0", 0.0), ("ls0.1", 0.1)] {
        for tp in [1, 2, 4] {
            let (target, upstream) = (&file["target"].1, &file["grad_out"].1);
            let (loss, gradient) = run(tp, &logits, (96, smoothing), target, upstream);
            let what = |part| format!("{part}, smoothing {smoothing}, tp={tp}");
            assert_close(&loss, &file[&format!("loss_{name}")].1, 1e-6, &what("loss"));
            assert_close(
                &gradient,
                &file[&format!("grad_{name}")].1,
                1e-6,
                &what("gradient"),
            );
        }
    }
}

#[test]
fn an_odd_vocabulary_has_one_loss_at_every_tp() {
    // Public complaints: Megatron-LM #1754, #1736.
    let flex = Device::flex();
    let (vocab, n) = (50257, 6);
    let target = [0.0, 1.0, 25_000.0, 37_777.0, 50_255.0, 50_256.0];
    let entries = arbitrary([n, vocab], 3, &flex);
    for smoothing in [0.0, 0.1] {
        let outcomes = [1, 2, 4].map(|tp| {
            let padded = padded_vocab_size(vocab, 128, tp);
            // Padding with logits that would win if they took part.
            let padding = Tensor::full([n, padded - vocab], 30.0, &flex);
            let logits = Tensor::cat(vec![entries.clone(), padding], 1);
            let (loss, gradient) = run(tp, &logits, (vocab, smoothing), &target, &[1.0; 6]);
            let gradient = Tensor::<2>::from_data(TensorData::new(gradient, [n, padded]), &flex);
            let of_padding = gradient.clone().slice([0..n, vocab..padded]);
            assert!(
                host(of_padding).iter().all(|g| *g == 0.0),
                "padding has no gradient"
            );
            (loss, host(gradient.slice([0..n, 0..vocab])))
        });
        for (tp, (loss, gradient)) in [2, 4].iter().zip(&outcomes[1..]) {
            assert_close(loss, &outcomes[0].0, 5e-7, &format!("loss, tp={tp}"));
            assert_close(
                gradient,
                &outcomes[0].1,
                1e-6,
                &format!("gradient, tp={tp}"),
            );
        }
    }
}

#[test]
fn a_rank_with_nothing_but_padding_takes_part() {
    // 100 entries padded to 512 over four ranks: three of them own no entry at all.
    let flex = Device::flex();
    let entries = arbitrary([3, 100], 4, &flex);
    let logits = Tensor::cat(vec![entries.clone(), Tensor::zeros([3, 412], &flex)], 1);
    let target = [0.0, 50.0, 99.0];
    for smoothing in [0.0, 0.1] {
        let (want, _) = run(1, &entries, (100, smoothing), &target, &[1.0; 3]);
        let (got, gradient) = run(4, &logits, (100, smoothing), &target, &[1.0; 3]);
        assert_close(&got, &want, 1e-6, "loss");
        assert!(gradient.iter().all(|g| g.is_finite()));
    }
}
