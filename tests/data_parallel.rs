//! What data-parallel ranks share, against the run in which each has everything.

use crate::checkpoints::go;
use burn_megatron::layers::{Recompute, RecomputeMethod};
use megatron_tests::Run;

/// The losses, norms and weights of the same run without a distributed optimizer, bit for bit, and its
/// state in parts. Public reports: Megatron-LM #844, #656 (tied embeddings under ZeRO-1 and pipelines).
#[test]
fn a_distributed_optimizer_changes_no_bit() {
    for (tp, sequence_parallel, pp, v, dp) in [
        (1, false, 1, 1, 2),
        (1, false, 1, 1, 4),
        (1, false, 2, 1, 2),
        (1, false, 2, 2, 2),
        (2, true, 2, 1, 2),
        (1, false, 4, 1, 4),
    ] {
        let plain = Run {
            sequence_parallel,
            micro_batch_size: 1,
            ..Run::at(tp, dp).with_pipeline(pp, v)
        };
        let run = |run: Run| {
            run.train(|_, trainer| {
                let memory = trainer.memory().expect("the tests count").parts;
                Ok((trainer.model().values(), memory.optimizer))
            })
            .expect("run")
        };
        let (steps, whole) = run(plain);
        // Buckets of the usual size, and small ones of which many lie in several parameters.
        for bucket_size in [40_000_000, 1000] {
            let (sharded_steps, parts) = run(Run {
                distributed_optimizer: true,
                bucket_size,
                ..plain
            });
            let what = format!("{} in buckets of {bucket_size}", plain.layout());
            assert_eq!(sharded_steps, steps, "{what}");
            for ((values, bytes), (part_values, part_bytes)) in whole.iter().zip(&parts) {
                assert!(values == part_values, "{what}");
                // An equal part of both moments, and of the weights that the whole optimizer shares with the model; the
                // buckets' padding, and the runs of equal decay beside it.
                let part = bytes * 3 / 2 / dp as u64;
                let more = part_bytes.saturating_sub(part);
                assert!(more < 16384, "{what}: {part_bytes} of {bytes}");
            }
        }
    }
}

/// Public report: Megatron-LM #663 (overlapped communication changes results).
#[test]
fn overlapping_changes_no_bit_in_twenty_steps() {
    for (tp, pp, v, dp, recompute) in [
        (1, 1, 1, 2, false),
        (2, 2, 1, 2, false),
        (1, 2, 2, 3, false),
        (1, 1, 1, 4, true),
    ] {
        let plain = Run {
            distributed_optimizer: true,
            // Several buckets in a layer, and several layers in one.
            bucket_size: 20_000,
            micro_batch_size: 1,
            dropout: 0.1,
            recompute: recompute.then_some(Recompute::Full {
                method: RecomputeMethod::Uniform,
                num_layers: 2,
            }),
            ..Run::at(tp, dp).with_pipeline(pp, v)
        };
        let want = go(plain, None, 0..20, None);
        for (distributed_optimizer, overlap) in [
            (true, (true, true)),
            (true, (false, true)),
            (false, (true, false)),
        ] {
            let run = Run {
                distributed_optimizer,
                overlap,
                ..plain
            };
            let what = format!("{} overlap {overlap:?}", plain.layout());
            assert_eq!(go(run, None, 0..20, None), want, "{what}");
        }
    }
}
