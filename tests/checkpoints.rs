//! What a checkpoint brings back, under the layout that saved it and under others.

use burn_megatron::checkpoint::{Checkpoint, Kind, Retention, SaveTo, Saver};
use burn_megatron::memory::MemoryAccount;
use burn_megatron::prelude::*;
use burn_megatron::train::LoadOptions;
use megatron_tests::Run;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A folder of its own, removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("megatron-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        Scratch(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const GLOBAL_BATCH: usize = 12;

/// Steps of batches of 12, from a checkpoint or from the fixture's weights, and a checkpoint at the end.
pub fn go(
    run: Run,
    load: Option<&Path>,
    steps: Range<usize>,
    save: Option<&Path>,
) -> Vec<StepOutput> {
    train(run, load, steps, save).expect("run")
}

fn train(
    run: Run,
    load: Option<&Path>,
    steps: Range<usize>,
    save: Option<&Path>,
) -> Result<Vec<StepOutput>> {
    let run = Run {
        global_batch_size: GLOBAL_BATCH,
        ..run
    };
    let config = run.config();
    let (b, dp) = (run.micro_batch_size, run.dp);
    let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let weights = FullWeights::open(run.file("init.safetensors"))?;
        let mut trainer = Trainer::new(&config, rank, Some(&weights))?;
        if let Some(dir) = load {
            let checkpoint = Checkpoint::find(dir, None)?;
            trainer.load(&checkpoint, LoadOptions::default())?;
            assert_eq!(checkpoint.manifest().run, json!({ "kept": [1, 2.5] }));
        }
        assert_eq!(trainer.progress().iteration, steps.start as u64);
        let outputs = steps.clone().map(|step| {
            let microbatch = |i: usize| {
                let first = step * GLOBAL_BATCH + (i * dp + rank.groups.dp.comm.rank()) * b;
                let tokens = (first..first + b)
                    .flat_map(|sample| (0..33).map(move |t| ((sample * 7 + t * t) % 128) as i64));
                MicroBatch {
                    tokens: tokens.collect(),
                    loss_mask: None,
                }
            };
            let share: Vec<_> = (0..GLOBAL_BATCH / b / dp).map(microbatch).collect();
            trainer.train_step(&share)
        });
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        if let Some(dir) = save {
            let to = SaveTo {
                dir: dir.to_path_buf(),
                retention: Retention::default(),
            };
            let mut saver = Saver::new(to, rank.groups.saver.comm.clone());
            saver.save(&trainer.snapshot(json!({ "kept": [1, 2.5] })))?;
        }
        Ok(outputs)
    })?;
    Ok(ranks.into_iter().next().unwrap_or_default())
}

/// Every whole tensor of a checkpoint.
pub fn whole(dir: &Path) -> BTreeMap<(Kind, String), Vec<f32>> {
    let checkpoint = Checkpoint::find(dir, None).expect("a checkpoint");
    assert_eq!(checkpoint.verify(), []);
    let tensors = checkpoint.manifest().tensors.iter();
    let kinds = [Kind::Weight, Kind::ExpAvg, Kind::ExpAvgSq];
    let all = tensors.flat_map(|(name, saved)| kinds.map(|kind| (kind, name, &saved.shape)));
    all.map(|(kind, name, shape)| {
        let spec = ParamSpec::replicated(shape.clone(), Init::Zeros);
        let elements = spec.full_elements();
        let mut values = vec![f32::NAN; elements];
        let read = checkpoint.read(kind, name, &spec, &(0..elements), &mut values);
        read.expect("whole");
        ((kind, name.clone()), values)
    })
    .collect()
}

fn distributed(run: Run) -> Run {
    Run {
        distributed_optimizer: true,
        ..run
    }
}

#[test]
fn ten_steps_are_five_and_five() {
    let sequence_parallel = Run {
        sequence_parallel: true,
        dropout: 0.1,
        ..Run::at(2, 1).with_pipeline(2, 2)
    };
    let small = Run {
        micro_batch_size: 1,
        bucket_size: 3000,
        ..distributed(Run::at(1, 2).with_pipeline(2, 1))
    };
    for (i, run) in [
        Run::at(1, 1),
        Run::at(2, 2),
        sequence_parallel,
        small,
        distributed(Run::at(1, 3)),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = Scratch::new(&format!("ten-{i}"));
        let whole = go(run, None, 0..10, None);
        let mut halves = go(run, None, 0..5, Some(&dir.0));
        halves.extend(go(run, Some(&dir.0), 5..10, None));
        assert_eq!(halves, whole, "{}", run.layout());
    }
}

/// Public reports: Megatron-LM #1517, #659 (loading under another layout), torchtitan #811 (the loader's
/// place when the data-parallel size changes).
#[test]
fn any_layout_loads_what_any_other_saved() {
    let dir = Scratch::new("reshard");
    let saved_by = Run {
        bucket_size: 5000,
        ..distributed(Run::at(2, 2).with_pipeline(2, 1))
    };
    go(saved_by, None, 0..3, Some(&dir.0));
    let saved = whole(&dir.0);
    let want = go(saved_by, Some(&dir.0), 3..6, None);
    for (i, run) in [
        Run::at(1, 1),
        Run::at(4, 1),
        Run::at(1, 1).with_pipeline(4, 1),
        Run::at(1, 1).with_pipeline(2, 2),
        Run::at(1, 3),
        distributed(Run::at(1, 3)),
        distributed(Run::at(2, 3).with_pipeline(2, 1)),
    ]
    .into_iter()
    .enumerate()
    {
        // Saved again as it was loaded, it is the same; and the run goes on alike.
        let again = Scratch::new(&format!("reshard-{i}"));
        go(run, Some(&dir.0), 3..3, Some(&again.0));
        assert!(whole(&again.0) == saved, "{}", run.layout());
        let steps = go(run, Some(&again.0), 3..6, None);
        for (got, want) in steps.iter().zip(&want) {
            let difference = (got.lm_loss - want.lm_loss).abs();
            assert!(difference < 1e-5, "{}: {got:?} {want:?}", run.layout());
            assert_eq!(got.learning_rate, want.learning_rate);
            assert_eq!(got.consumed_samples, want.consumed_samples);
        }
    }
}

#[test]
fn a_padded_vocabulary_loads_under_another_padding() {
    let dir = Scratch::new("padding");
    let config = |tp: usize| {
        let mut config = Run::at(tp, 1).config().config().clone();
        config.vocab_size = 101;
        config.model.make_vocab_size_divisible_by = 16;
        config.resolve().expect("a legal configuration")
    };
    let losses = |tp: usize, load: bool, save: bool| -> Vec<f32> {
        let config = config(tp);
        let ranks = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
            let mut trainer = Trainer::new(&config, rank, None)?;
            if load {
                let checkpoint = Checkpoint::find(&dir.0, None)?;
                trainer.load(&checkpoint, LoadOptions::default())?;
            }
            let tokens: Vec<i64> = (0..66).map(|t| t * 5 % 101).collect();
            let batch = vec![
                MicroBatch {
                    tokens,
                    loss_mask: None
                };
                4
            ];
            let losses = (0..3).map(|_| Ok(trainer.train_step(&batch)?.lm_loss));
            let losses = losses.collect::<Result<Vec<f32>>>()?;
            if save {
                let to = SaveTo {
                    dir: dir.0.clone(),
                    ..SaveTo::default()
                };
                let mut saver = Saver::new(to, rank.groups.saver.comm.clone());
                saver.save(&trainer.snapshot(json!(null)))?;
            }
            Ok(losses)
        });
        ranks.expect("ranks").swap_remove(0)
    };
    assert_ne!(
        config(1).layout().padded_vocab_size,
        config(4).layout().padded_vocab_size
    );
    losses(1, false, true);
    let want = losses(1, true, false);
    for (got, want) in losses(4, true, false).iter().zip(&want) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}

#[test]
fn a_flipped_byte_is_found_and_named() {
    let dir = Scratch::new("flipped");
    let run = distributed(Run::at(1, 2));
    go(run, None, 0..1, Some(&dir.0));
    let checkpoint = dir.0.join("iter_0000001");
    for file in ["rank_00000.safetensors", "rank_00001.safetensors"] {
        let path = checkpoint.join(file);
        let bytes = fs::read(&path).expect("a file");
        for at in [100, bytes.len() / 2, bytes.len() - 1] {
            let mut broken = bytes.clone();
            broken[at] ^= 0x10;
            fs::write(&path, &broken).expect("a file");
            let faults = Checkpoint::open(&checkpoint).expect("opens").verify();
            assert_eq!(faults.len(), 1, "{file} byte {at}: {faults:?}");
            assert_eq!(faults[0].file, path);
            if at > 50_000 {
                assert!(faults[0].reason.contains(" of "), "{faults:?}");
                let refused = train(run, Some(&dir.0), 1..2, None)
                    .unwrap_err()
                    .to_string();
                assert!(refused.contains(file), "{refused}");
                assert!(refused.contains("is damaged"), "{refused}");
            }
        }
        fs::write(&path, &bytes[..bytes.len() - 4]).expect("a file");
        let refused = Checkpoint::open(&checkpoint).unwrap_err().to_string();
        assert!(refused.contains(file), "{refused}");
        fs::write(&path, &bytes).expect("a file");
    }
    assert_eq!(Checkpoint::open(&checkpoint).expect("whole").verify(), []);
}

#[test]
fn what_does_not_fit_the_model_is_all_listed() {
    let dir = Scratch::new("misfit");
    go(Run::at(1, 1), None, 0..1, Some(&dir.0));
    let llama = Run {
        llama: true,
        ..Run::at(1, 1)
    };
    let refused = train(llama, Some(&dir.0), 1..2, None)
        .unwrap_err()
        .to_string();
    for part in [
        "output_layer.weight is missing",
        "decoder.layers.0.mlp.linear_fc1.weight has shape",
        "embedding.position_embeddings.weight is not of this model",
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

#[test]
fn a_save_that_fails_leaves_the_one_before_and_the_training_as_they_were() {
    let dir = Scratch::new("failing");
    let config = Run::at(1, 2).config();
    let ends = run_ranks(&config.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(&config, rank, None)?;
        let saver = |dir: PathBuf| {
            let to = SaveTo {
                dir,
                ..SaveTo::default()
            };
            Saver::new(to, rank.groups.saver.comm.clone())
        };
        let mut good = saver(dir.0.clone());
        good.save(&trainer.snapshot(json!(null)))?;
        let batch = vec![
            MicroBatch {
                tokens: (0..66).collect(),
                loss_mask: None
            };
            2
        ];
        trainer.train_step(&batch)?;
        // A file stands where the directory is to be.
        if rank.rank == 0 {
            fs::write(dir.0.join(".iter_0000001.writing"), "").expect("a file");
        }
        rank.groups.world.comm.barrier()?;
        let error = good.save(&trainer.snapshot(json!(null))).unwrap_err();
        let mut impossible = saver(dir.0.join("latest"));
        let background = impossible.save_in_background(trainer.snapshot(json!(null)))?;
        assert!(background.is_none());
        let failed = impossible.wait().expect("a save").unwrap_err();
        let before = trainer.train_step(&batch)?;
        if rank.rank == 0 {
            fs::remove_file(dir.0.join(".iter_0000001.writing")).expect("a file");
        }
        rank.groups.world.comm.barrier()?;
        let saved = good.save(&trainer.snapshot(json!(null)))?;
        Ok((
            error.to_string(),
            failed.to_string(),
            before.iteration,
            saved,
        ))
    });
    for (rank, (error, failed, iteration, saved)) in ends.expect("ranks").into_iter().enumerate() {
        assert!(error.contains(".iter_0000001.writing"), "{rank}: {error}");
        assert!(failed.contains("latest"), "{rank}: {failed}");
        assert_eq!(iteration, 2);
        assert_eq!(saved.path, dir.0.join("iter_0000002"));
    }
    assert_eq!(Checkpoint::iterations(&dir.0).expect("a folder"), [0, 2]);
}

#[test]
fn a_directory_has_what_retention_leaves_and_latest_names_the_newest() {
    let dir = Scratch::new("retention");
    let config = Run::at(1, 1).config();
    let save = |keep_last, save_retain_interval| {
        let rank = RankContext::single(burn::tensor::Device::flex());
        let mut trainer = Trainer::new(&config, &rank, None).expect("a trainer");
        let to = SaveTo {
            dir: dir.0.clone(),
            retention: Retention {
                keep_last,
                save_retain_interval,
            },
        };
        let mut saver = Saver::new(to, rank.groups.saver.comm.clone());
        let batch = vec![
            MicroBatch {
                tokens: (0..66).collect(),
                loss_mask: None
            };
            4
        ];
        for _ in 0..5 {
            trainer.train_step(&batch).expect("a step");
            let outcome = saver.save_in_background(trainer.snapshot(json!(null)));
            assert!(outcome.expect("a thread").is_none_or(|saved| saved.is_ok()));
        }
        saver.wait().expect("a save").expect("saved");
        Checkpoint::iterations(&dir.0).expect("a folder")
    };
    assert_eq!(save(None, None), [1, 2, 3, 4, 5]);
    assert_eq!(save(Some(2), None), [4, 5]);
    assert_eq!(save(None, Some(2)), [2, 4, 5]);
    // Iteration 5 was saved three times: each replaced the one before.
    let latest = fs::read_to_string(dir.0.join("latest")).expect("a file");
    let newest = Checkpoint::find(&dir.0, None).expect("a checkpoint");
    assert_eq!(newest.path(), dir.0.join(latest.trim()));
    assert_eq!(newest.manifest().progress.iteration, 5);
    let of = |iteration| Checkpoint::find(&dir.0, Some(iteration));
    assert_eq!(of(2).expect("kept").manifest().progress.iteration, 2);
    let message = of(3).unwrap_err().to_string();
    assert!(
        message.contains("no checkpoint of iteration 3"),
        "{message}"
    );
    assert!(Checkpoint::find(&dir.0.join("nowhere"), None).is_err());
    assert!(MemoryAccount::of_this_thread().is_some());
}
