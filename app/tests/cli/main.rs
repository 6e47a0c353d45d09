//! The program as its users meet it: flags, messages, exit codes, files.

mod checkpoints;
mod schedules;

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The repository: configs name the bundled corpus relative to it.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn fixture(name: &str) -> String {
    let path = root().join("tests/fixtures").join(name);
    path.to_string_lossy().into_owned()
}

fn megatron(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_megatron"));
    command.current_dir(root()).args(args);
    command
}

/// A run's folder, and the flags that put its files there.
struct Run {
    dir: TempDir,
}

impl Run {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Run { dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_string_lossy().into_owned()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = megatron(&["train", "--no-tui"]);
        command.args(["--run-dir", &self.path("run")]);
        command.args(["--metrics-file", &self.path("metrics.jsonl")]);
        command.args(args);
        command
    }

    fn metrics(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("metrics.jsonl")).unwrap();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// A value of every step.
    fn numbers(&self, key: &str) -> Vec<f64> {
        let steps = self.metrics();
        steps
            .iter()
            .map(|step| step[key].as_f64().unwrap())
            .collect()
    }

    /// The losses' bits.
    fn losses(&self) -> Vec<u32> {
        let losses = self.numbers("lm_loss").into_iter();
        losses.map(|loss| (loss as f32).to_bits()).collect()
    }
}

/// The flags of a model of two layers on a small dataset, and more.
fn small_corpus(more: &str) -> Vec<String> {
    let model = "--vocab-size 50304 --num-layers 2 --hidden-size 32 --num-attention-heads 2 \
                 --seq-length 16 --micro-batch-size 1";
    let words = model.split_whitespace().chain(more.split_whitespace());
    let data = [
        "--data-path".to_string(),
        fixture("data/small_text_document"),
    ];
    data.into_iter().chain(words.map(String::from)).collect()
}

fn stderr(command: &mut Command, code: i32) -> String {
    let output = command.assert().code(code).get_output().clone();
    String::from_utf8(output.stderr).unwrap()
}

fn stdout(command: &mut Command) -> String {
    let output = command.assert().success().get_output().clone();
    String::from_utf8(output.stdout).unwrap()
}

/// The flags in a help text, sorted.
fn flags(command: &str) -> Vec<String> {
    let help = stdout(&mut megatron(&[command, "--help"]));
    let mut flags: Vec<String> = help
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("--"))
        .filter_map(|line| line.split_whitespace().next())
        .map(|name| format!("{command} --{name}"))
        .collect();
    flags.sort();
    flags
}

/// A new, renamed or removed flag shows up here; options.txt is then edited by hand, on purpose.
#[test]
fn the_flags_are_those_of_the_list() {
    let expected = include_str!("options.txt");
    let found: Vec<String> = ["preprocess", "schedule", "train"]
        .iter()
        .flat_map(|c| flags(c))
        .collect();
    let expected: Vec<&str> = expected.lines().collect();
    assert_eq!(found, expected, "see app/tests/cli/options.txt");
}

#[test]
fn every_violation_is_listed_before_anything_runs() {
    let run = Run::new();
    let message = stderr(
        &mut run.command(&[
            "--num-attention-heads",
            "3",
            "--hidden-size",
            "64",
            "--tensor-model-parallel-size",
            "2",
            "--world-size",
            "3",
            "--global-batch-size",
            "7",
            "--log-interval",
            "0",
        ]),
        2,
    );
    for part in [
        "log_interval must be at least 1",
        "num_attention_heads 3",
        "world_size 3",
        "--data-path or --token-batches",
        "nearest legal",
        "help:",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!Path::new(&run.path("run")).exists(), "a folder was made");
}

#[test]
fn an_unknown_key_names_file_and_key() {
    let run = Run::new();
    let config = run.path("mine.toml");
    fs::write(&config, "[training]\ntrain_iter = 3\n").unwrap();
    let message = stderr(&mut run.command(&["--config", &config]), 2);
    for part in ["mine.toml", "train_iter", "line 2", "train_iters"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn a_missing_file_says_what_to_do() {
    let run = Run::new();
    let message = stderr(&mut run.command(&["--config", "no-such.toml"]), 1);
    assert!(message.contains("no-such.toml"), "{message}");
    assert!(message.contains("relative paths start at"), "{message}");
}

#[test]
fn a_missing_dataset_leaves_nothing_behind() {
    let run = Run::new();
    let args = ["--config", "configs/tiny.toml", "--data-path", "no-such"];
    let message = stderr(&mut run.command(&args), 1);
    assert!(message.contains("no-such.idx"), "{message}");
    assert!(!Path::new(&run.path("run")).exists(), "a folder was made");
}

#[test]
fn preprocess_writes_megatrons_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("small");
    let input = fixture("data/small.jsonl");
    let (vocab, merges) = (fixture("gpt2/vocab.json"), fixture("gpt2/merges.txt"));
    for workers in ["1", "3"] {
        let args = [
            "preprocess",
            "--input",
            &input,
            "--output-prefix",
            &prefix.to_string_lossy(),
            "--tokenizer-type",
            "GPT2BPETokenizer",
            "--vocab-file",
            &vocab,
            "--merge-file",
            &merges,
            "--append-eod",
            "--workers",
            workers,
        ];
        let said = stdout(&mut megatron(&args));
        assert!(said.contains("81 documents"), "{said}");
        assert!(said.contains("6,354 tokens"), "{said}");
        for ending in ["bin", "idx"] {
            let name = format!("small_text_document.{ending}");
            let written = fs::read(dir.path().join(&name)).unwrap();
            let expected = fs::read(fixture(&format!("data/{name}"))).unwrap();
            assert!(written == expected, "{name} differs with {workers} workers");
        }
    }
}

#[test]
fn a_bad_json_line_is_named_or_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("bad.jsonl");
    fs::write(
        &input,
        "{\"text\": \"1 2\"}\n{\"text\": \n{\"text\": \"3\"}\n",
    )
    .unwrap();
    let (input, prefix) = (input.to_string_lossy(), dir.path().join("out"));
    let args = [
        "preprocess",
        "--input",
        &input,
        "--output-prefix",
        &prefix.to_string_lossy(),
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "10",
    ];
    let message = stderr(&mut megatron(&args), 1);
    assert!(message.contains("bad.jsonl"), "{message}");
    assert!(message.contains("line 2"), "{message}");
    assert!(message.contains("--skip-bad-lines"), "{message}");
    let said = stdout(megatron(&args).arg("--skip-bad-lines"));
    assert!(said.contains("2 documents"), "{said}");
    assert!(said.contains("1 bad line"), "{said}");
}

/// The flags of the fixtures' GPT, trained from their weights on their tokens.
fn fixture_run(run: &Run) -> Command {
    let mut command = run.command(&[]);
    for pair in [
        ["--num-layers", "4"],
        ["--hidden-size", "64"],
        ["--num-attention-heads", "4"],
        ["--seq-length", "32"],
        ["--micro-batch-size", "2"],
        ["--global-batch-size", "8"],
        ["--train-iters", "8"],
        ["--vocab-size", "128"],
        ["--lr", "1e-3"],
        ["--min-lr", "1e-4"],
        ["--lr-decay-style", "cosine"],
        ["--lr-warmup-iters", "2"],
        ["--lr-decay-iters", "8"],
        ["--weight-decay", "0.1"],
        ["--clip-grad", "1.0"],
        ["--adam-beta1", "0.9"],
        ["--adam-beta2", "0.95"],
        ["--tensor-model-parallel-size", "2"],
        ["--world-size", "4"],
        ["--init-weights", &fixture("gpt_init.safetensors")],
        ["--token-batches", &fixture("train_tokens.safetensors")],
    ] {
        command.args(pair);
    }
    command
}

#[test]
fn a_run_at_tp2_dp2_follows_megatrons_and_repeats_itself() {
    let (run, again) = (Run::new(), Run::new());
    let said = stdout(&mut fixture_run(&run));
    assert!(said.contains("tp=2 pp=1 dp=2 (world 4)"), "{said}");
    stdout(&mut fixture_run(&again));
    assert_eq!(run.losses(), again.losses(), "two runs differ");

    let text = fs::read_to_string(fixture("gpt_trajectory.json")).unwrap();
    let megatrons: Value = serde_json::from_str(&text).unwrap();
    let megatrons = megatrons["steps"].as_array().unwrap();
    let ours = run.metrics();
    assert_eq!(ours.len(), megatrons.len());
    for (ours, theirs) in ours.iter().zip(megatrons) {
        let number = |value: &Value| value.as_f64().unwrap();
        let loss = number(&ours["lm_loss"]) - number(&theirs["lm_loss"]);
        assert!(loss.abs() <= 2e-6, "{ours} {theirs}");
        let norm = number(&ours["grad_norm"]) / number(&theirs["grad_norm"]) - 1.0;
        assert!(norm.abs() <= 1e-5, "{ours} {theirs}");
        assert_eq!(ours["iteration"], theirs["step"]);
    }
    let last = &ours[7];
    assert_eq!(last["consumed_samples"], 64);
    for key in ["learning_rate", "tokens_per_second", "step_time_s"] {
        assert!(last[key].is_number(), "{key}: {last}");
    }
}

#[test]
fn batches_of_another_shape_are_refused_before_the_run() {
    let run = Run::new();
    let mut command = fixture_run(&run);
    let message = stderr(command.args(["--seq-length", "16"]), 2);
    assert!(
        message.contains("[steps, 8, 17], not [8, 8, 33]"),
        "{message}"
    );
}

/// The quickstart, cut to three steps: tokenising, training, evaluating, writing a sample, and a
/// saved configuration that runs again.
#[test]
fn the_quickstart_starts_and_ends() {
    let (run, again) = (Run::new(), Run::new());
    let short = [
        "--train-iters",
        "3",
        "--lr-warmup-iters",
        "1",
        "--eval-iters",
        "1",
        "--generate-tokens",
        "4",
    ];
    let mut command = run.command(&["--config", "configs/quickstart.toml"]);
    let said = stdout(command.args(short));
    for part in [
        "tp=2 pp=1 dp=2 (world 4)",
        "iteration 1/3",
        "validation after iteration 3",
        "And the LORD said unto",
        "trained 3 steps",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let saved = run.path("run/config.toml");
    let mut command = again.command(&["--config", &saved]);
    stdout(&mut command);
    assert_eq!(
        run.losses(),
        again.losses(),
        "the saved config runs another run"
    );
}

#[test]
fn a_used_run_directory_is_refused() {
    let run = Run::new();
    fs::create_dir(run.path("run")).unwrap();
    fs::write(run.path("run/config.toml"), "").unwrap();
    let message = stderr(&mut fixture_run(&run), 2);
    assert!(message.contains("is not empty"), "{message}");
}

#[test]
fn a_pipeline_follows_megatrons_run_and_leaves_a_trace() {
    let (plain, piped) = (Run::new(), Run::new());
    stdout(&mut fixture_run(&plain));
    let trace = piped.path("trace.json");
    let mut command = fixture_run(&piped);
    command.args(["--pipeline-model-parallel-size", "2", "--trace", &trace]);
    command.args(["--num-layers-per-virtual-pipeline-stage", "1"]);
    let said = stdout(&mut command);
    for part in [
        "tp=2 pp=2 v=2 dp=1 (world 4)",
        "pp        12 send calls a step",
        "embedding 1 all-reduce calls a step, 32.77 kB (32.77 kB predicted)",
        "bubble of the last step",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let losses = |run: &Run| -> Vec<f64> {
        let loss = |step: &Value| step["lm_loss"].as_f64().unwrap();
        run.metrics().iter().map(loss).collect()
    };
    for (a, b) in losses(&plain).iter().zip(losses(&piped)) {
        assert!((a - b).abs() <= 2e-6, "{b} is not {a}");
    }

    let trace: Value = serde_json::from_str(&fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    // Two pipelines (tp = 2), measured and simulated, of 4 stages and 4 micro batches each way.
    let passes = events.iter().filter(|event| event["ph"] == "X").count();
    assert_eq!(passes, 2 * 2 * 4 * 4 * 2);
    for key in ["bubble_measured", "bubble_simulated"] {
        let bubbles = trace["otherData"][key].as_array().unwrap();
        assert_eq!(bubbles.len(), 2);
        assert!(bubbles.iter().all(|b| b.as_f64().unwrap() > 0.0), "{key}");
    }
    assert_eq!(trace["otherData"]["iteration"], 8);
}

#[test]
fn layers_that_do_not_divide_are_refused_before_the_run() {
    let run = Run::new();
    let mut command = fixture_run(&run);
    command.args(["--pipeline-model-parallel-size", "3", "--world-size", "6"]);
    let message = stderr(&mut command, 2);
    let rule = "pipeline_model_parallel_size 3 must divide num_layers 4; nearest legal: 2, 4";
    assert!(message.contains(rule), "{message}");
    let mut command = fixture_run(&run);
    command.args(["--pipeline-model-parallel-size", "2", "--world-size", "8"]);
    command.args(["--num-virtual-stages-per-pipeline-rank", "2"]);
    command.args(["--global-batch-size", "12"]);
    let message = stderr(&mut command, 2);
    assert!(message.contains("3 micro batches of a step"), "{message}");
    assert!(!Path::new(&run.path("run")).exists(), "a folder was made");
}

#[test]
fn rules_of_the_models_parts_are_checked() {
    let run = Run::new();
    let mut command = fixture_run(&run);
    command.args(["--swiglu", "--squared-relu", "--sequence-parallel"]);
    command.args([
        "--num-query-groups",
        "3",
        "--position-embedding-type",
        "rope",
    ]);
    command.args([
        "--rotary-percent",
        "0.2",
        "--tensor-model-parallel-size",
        "1",
    ]);
    let message = stderr(&mut command, 2);
    for rule in [
        "swiglu and squared_relu are two activations",
        "rotary_percent 0.2 of kv_channels 16 is 3 features, but they turn in pairs",
        "num_query_groups 3 must divide num_attention_heads 4; nearest legal: 2, 4",
        "sequence_parallel needs tensor_model_parallel_size above 1",
    ] {
        assert!(message.contains(rule), "{rule}: {message}");
    }
    let mut command = fixture_run(&run);
    command.args(["--sequence-parallel", "--seq-length", "31"]);
    let message = stderr(&mut command, 2);
    let rule = "tensor_model_parallel_size 2 must divide seq_length 31";
    assert!(message.contains(rule), "{message}");
}

/// Memory is predicted before the run and counted in its first step; what recomputation saves is seen in
/// both.
#[test]
fn the_first_step_tells_where_each_ranks_memory_went() {
    let (kept, full) = (Run::new(), Run::new());
    let activations = |said: &str| -> Vec<f64> {
        let rows = said
            .lines()
            .skip_while(|l| !l.starts_with("memory of each"));
        assert!(rows.clone().nth(1).unwrap().ends_with("peak of the step"));
        assert_eq!(
            rows.clone()
                .take_while(|l| !l.starts_with("iteration"))
                .count(),
            6
        );
        // rank, then "a / b" for weights, gradients, optimizer, activations.
        let kilobytes = |row: &str, at: usize| {
            let words: Vec<&str> = row.split_whitespace().collect();
            let unit = match words[at + 1] {
                "kB" => 1.0,
                "MB" => 1e3,
                unit => panic!("{unit}: {row}"),
            };
            unit * words[at].parse::<f64>().unwrap()
        };
        // All ranks keep as much; one of them may have grown what Burn keeps for all.
        let least = |at: usize| {
            let all = rows.clone().skip(2).take(4).map(|row| kilobytes(row, at));
            all.fold(f64::INFINITY, f64::min)
        };
        vec![least(16), least(19)]
    };
    let said = stdout(&mut fixture_run(&kept));
    assert!(said.contains("memory    "), "{said}");
    let kept_bytes = activations(&said);
    let mut command = fixture_run(&full);
    let said = stdout(command.args(["--recompute-granularity", "full"]));
    let full_bytes = activations(&said);
    assert_eq!(kept.losses(), full.losses());
    // The output layer's gradient is kept either way, and a graph's nodes weigh as much as the values of so small a
    // model.
    for (at, most) in [0.25, 0.6].into_iter().enumerate() {
        let (full, kept) = (full_bytes[at], kept_bytes[at]);
        assert!(full < most * kept, "{full} kB, not much below {kept}");
    }
}

#[test]
fn a_reader_that_goes_away_does_not_end_the_run() {
    let run = Run::new();
    let built = fixture_run(&run);
    let mut command = std::process::Command::new(built.get_program());
    command.args(built.get_args()).current_dir(root());
    let mut child = command
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(run.losses().len(), 8);
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_or_is_counted() {
    let (stopped, counted) = (Run::new(), Run::new());
    let wild = ["--lr", "1e30", "--clip-grad", "0"];
    let message = stderr(fixture_run(&stopped).args(wild), 1);
    for part in [
        "rank ",
        "found a loss of ",
        "in micro batch 0 of iteration 3",
        "--lr",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let mut command = fixture_run(&counted);
    let said = stdout(
        command
            .args(wild)
            .arg("--no-check-for-nan-in-loss-and-grad"),
    );
    assert!(
        said.contains("the gradients of iteration 3 are not finite"),
        "{said}"
    );
    let steps = counted.metrics();
    assert_eq!(steps.len(), 8);
    assert_eq!(steps[7]["skipped_iterations"], 6);
}

#[test]
fn sixteen_bits_train_and_their_loss_scale_is_said() {
    let (plain, bf16, fp16) = (Run::new(), Run::new(), Run::new());
    let layout = ["--world-size", "2", "--tensor-model-parallel-size", "2"];
    stdout(fixture_run(&plain).args(layout));
    let said = stdout(fixture_run(&bf16).args(layout).arg("--bf16"));
    for part in [
        "numbers   weights and activations bf16;",
        "weights 222.21 kB",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let pairs = plain.numbers("lm_loss").into_iter();
    for (a, b) in pairs.zip(bf16.numbers("lm_loss")) {
        assert!(a != b && (a - b).abs() < 0.002, "{a} {b}");
    }
    let high = ["--fp16", "--initial-loss-scale", "67108864"];
    let said = stdout(fixture_run(&fp16).args(layout).args(high));
    let first = "iteration 1 updated nothing: its gradients overflow at a loss scale of 67108864";
    assert!(said.contains(first), "{said}");
    let steps = fp16.metrics();
    assert_eq!(steps[0]["skipped_iterations"], 1);
    assert_eq!(steps[2]["loss_scale"], 33554432.0);

    let high = [
        "--min-loss-scale",
        "67108864",
        "--initial-loss-scale",
        "67108864",
    ];
    let last = Run::new();
    let message = stderr(fixture_run(&last).arg("--fp16").args(high), 1);
    assert!(
        message.contains("at a loss scale of 67108864 that cannot fall"),
        "{message}"
    );
    let other = Run::new();
    let wrong = ["--fp16", "--bf16", "--hysteresis", "0"];
    let message = stderr(fixture_run(&other).args(wrong), 2);
    for part in ["bf16 and fp16 exclude each other", "hysteresis is 0"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let message = stderr(fixture_run(&other).arg("--grad-reduce-in-bf16"), 2);
    assert!(
        message.contains("grad_reduce_in_bf16 goes with bf16, not with fp32"),
        "{message}"
    );
}

#[test]
fn fused_kernels_and_the_reference_train_alike() {
    let runs = ["auto", "fused", "local"].map(|name| {
        let run = Run::new();
        let said = stdout(fixture_run(&run).args(["--transformer-impl", name]));
        (run, said)
    });
    for (said, words) in [
        (
            &runs[0].1,
            "kernels   fused: LayerNorm, attention, bias and GELU",
        ),
        (&runs[2].1, "kernels   none fused"),
    ] {
        assert!(said.contains(words), "{said}");
    }
    let losses = runs.map(|(run, _)| run.numbers("lm_loss"));
    assert_eq!(losses[0], losses[1]);
    assert_ne!(losses[0], losses[2]);
    for (fused, local) in losses[0].iter().zip(&losses[2]) {
        assert!((fused - local).abs() < 2e-6, "{fused} {local}");
    }
    let run = Run::new();
    let wrong = ["--transformer-impl", "fused", "--bf16"];
    let message = stderr(fixture_run(&run).args(wrong), 2);
    assert!(
        message.contains("there are no fused kernels for bf16 on device cpu"),
        "{message}"
    );
}

/// A device that the build has not, or that the machine has not.
#[test]
fn a_device_that_is_not_there_is_refused_before_the_run() {
    let run = Run::new();
    for (device, feature) in [
        ("cuda", cfg!(feature = "cuda")),
        ("wgpu", cfg!(feature = "wgpu")),
    ] {
        if feature {
            continue;
        }
        let said = stderr(fixture_run(&run).args(["--device", device]), 2);
        let rule = format!("build it with `--features {device}`; nearest legal: cpu");
        assert!(said.contains(&rule), "{said}");
    }
}

#[test]
fn batches_grow_at_any_layout_and_over_a_stop() {
    let train = |run: &Run, args: &[&str]| -> (Vec<u64>, Vec<f64>) {
        let words = small_corpus(
            "--train-iters 6 --lr 1e-3 --global-batch-size 8 --rampup-batch-size 2 2 8 --eval-iters 1",
        );
        let mut command = run.command(&[]);
        command.args(words);
        stdout(command.args(args));
        let consumed = run.numbers("consumed_samples").into_iter();
        (consumed.map(|n| n as u64).collect(), run.numbers("lm_loss"))
    };
    let (one, four) = (Run::new(), Run::new());
    let (consumed, losses) = train(&one, &[]);
    assert_eq!(consumed, [2, 4, 8, 16, 24, 32]);
    let trace = four.path("trace.json");
    let layout = ["--world-size", "4", "--pipeline-model-parallel-size", "2"];
    let (save, dir) = (four.path("save"), four.path("again"));
    let stop = ["--save", &save, "--exit-interval", "3", "--trace", &trace];
    train(&four, &[&layout[..], &stop].concat());
    let on = [
        "--load",
        &save,
        "--run-dir",
        &dir,
        "--use-distributed-optimizer",
    ];
    let (other_consumed, other_losses) = train(&four, &[&layout[..], &on].concat());
    assert_eq!(other_consumed, consumed);
    for (one, other) in losses.iter().zip(&other_losses) {
        assert!((one - other).abs() < 1e-5, "{losses:?} {other_losses:?}");
    }
    let message = stderr(
        one.command(&["--data-path", &fixture("data/small_text_document")])
            .args([
                "--vocab-size",
                "50304",
                "--rampup-batch-size",
                "3",
                "2",
                "8",
            ]),
        2,
    );
    assert!(
        message.contains("rampup_batch_size must reach"),
        "{message}"
    );
}
