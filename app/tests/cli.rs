//! The program as its users meet it: flags, messages, exit codes, files.

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

    /// The losses' bits.
    fn losses(&self) -> Vec<u32> {
        let bits = |step: &Value| (step["lm_loss"].as_f64().unwrap() as f32).to_bits();
        self.metrics().iter().map(bits).collect()
    }
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
    assert_eq!(found, expected, "see app/tests/options.txt");
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
fn a_schedule_is_megatrons_order_as_json() {
    let args = ["schedule", "--pp", "4", "--micro-batches", "8"];
    let said = stdout(megatron(&args).args(["--virtual", "2", "--format", "json"]));
    let ranks: Vec<Vec<Value>> = serde_json::from_str(&said).unwrap();
    assert_eq!(ranks.len(), 4);
    let op = |op: &Value| {
        let kind = op["kind"].as_str().unwrap().to_string();
        format!("{kind}{}.{}", op["microbatch"], op["chunk"])
    };
    let ops: Vec<String> = ranks[3].iter().map(op).collect();
    assert_eq!(ops.len(), 2 * 8 * 2);
    // The last rank turns back as soon as its second chunk has a micro batch.
    let start = [
        "F0.0", "F1.0", "F2.0", "F3.0", "F0.1", "B0.1", "F1.1", "B1.1",
    ];
    assert_eq!(ops[..8], start);
    let keys: Vec<&String> = ranks[0][0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["chunk", "kind", "microbatch"]);
}

#[test]
fn a_schedule_that_cannot_be_names_the_nearest_that_can() {
    let args = ["schedule", "--micro-batches", "6", "--virtual", "2"];
    let message = stderr(&mut megatron(&args), 2);
    let nearest = "nearest legal: 4 micro batches, 8 micro batches";
    for part in [nearest, "help: change --pp, --micro-batches"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let idle = ["--forward-time", "0", "--backward-time", "0"];
    let message = stderr(megatron(&["schedule"]).args(idle), 2);
    assert!(message.contains("nothing to draw"), "{message}");
    let message = stderr(&mut megatron(&["schedule", "--p2p-time", "-1"]), 2);
    assert!(message.contains("a time is 0, or"), "{message}");
    let group = ["--microbatch-group-size-per-virtual-pipeline-stage", "4"];
    let message = stderr(megatron(&["schedule"]).args(group), 2);
    assert!(message.contains("1f1b has no groups"), "{message}");
}

#[test]
fn a_schedule_is_a_table_with_its_bubble() {
    let said = stdout(&mut megatron(&["schedule", "--micro-batches", "16"]));
    assert!(!said.contains('\x1b'), "{said}");
    for part in [
        "rank 3  ............F0- B0----- F1- B1-----",
        "bubble     18.8% of compute time; (p-1)/m = 3/16 = 18.8%",
        "in flight  at most 4 3 2 1 micro batches",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_schedule_goes_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    for (format, start) in [
        ("svg", "<svg "),
        ("chrome", "{\""),
        ("text", "gpipe: p = 4"),
    ] {
        let path = dir.path().join(format);
        let mut command = megatron(&["schedule", "--schedule", "gpipe", "--format", format]);
        let said = stdout(command.arg("--output").arg(&path));
        assert_eq!(said, "");
        let written = fs::read_to_string(&path).unwrap();
        assert!(written.starts_with(start), "{format}: {written}");
    }
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
fn the_readme_shows_what_the_program_draws() {
    let shape = ["schedule", "--pp", "4", "--micro-batches", "8"];
    let halves = [
        "--virtual",
        "2",
        "--forward-time",
        "0.5",
        "--backward-time",
        "1",
    ];
    for (name, more) in [("1f1b", &[][..]), ("interleaved", &halves[..])] {
        let drawn = stdout(megatron(&shape).args(more).args(["--format", "svg"]));
        let kept = fs::read_to_string(root().join(format!("docs/pipeline-{name}.svg"))).unwrap();
        assert!(
            drawn == kept,
            "docs/pipeline-{name}.svg is an older picture"
        );
    }
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let table = stdout(&mut megatron(&shape));
    assert!(
        readme.contains(&table),
        "the README's table is not:\n{table}"
    );
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
        let row = rows.clone().nth(2).unwrap();
        assert!(rows.clone().nth(1).unwrap().ends_with("peak of the step"));
        assert_eq!(rows.take_while(|l| !l.starts_with("iteration")).count(), 6);
        // rank, then "a / b" for weights, gradients, optimizer, activations.
        let words: Vec<&str> = row.split_whitespace().collect();
        let kilobytes = |at: usize| {
            let unit = match words[at + 1] {
                "kB" => 1.0,
                "MB" => 1e3,
                unit => panic!("{unit}: {row}"),
            };
            unit * words[at].parse::<f64>().unwrap()
        };
        vec![kilobytes(16), kilobytes(19)]
    };
    let said = stdout(&mut fixture_run(&kept));
    assert!(said.contains("memory    "), "{said}");
    let kept_bytes = activations(&said);
    let mut command = fixture_run(&full);
    let said = stdout(command.args(["--recompute-granularity", "full"]));
    let full_bytes = activations(&said);
    assert_eq!(kept.losses(), full.losses());
    // A graph's nodes weigh as much as the values of so small a model.
    for (at, most) in [0.2, 0.6].into_iter().enumerate() {
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

/// The fixture's run with checkpoints in the run's folder.
fn saving_run(run: &Run, args: &[&str]) -> Command {
    let mut command = fixture_run(run);
    command.args(["--save", &run.path("save")]).args(args);
    command
}

fn checkpoints(run: &Run) -> Vec<String> {
    let all = fs::read_dir(run.path("save")).map(|dir| {
        let names = dir.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<Vec<_>>()
    });
    let mut all = all.unwrap_or_default();
    all.sort();
    all
}

#[test]
fn a_run_that_stops_and_goes_on_is_the_run_that_did_not() {
    let (whole, half) = (Run::new(), Run::new());
    stdout(&mut fixture_run(&whole));
    let said = stdout(&mut saving_run(
        &half,
        &[
            "--save-interval",
            "2",
            "--async-save",
            "--exit-interval",
            "4",
        ],
    ));
    assert!(
        said.contains("stopped by --exit-interval at iteration 4 of 8"),
        "{said}"
    );
    assert!(said.contains("saved iteration 2 to "), "{said}");
    assert_eq!(
        checkpoints(&half),
        ["iter_0000002", "iter_0000004", "latest"]
    );
    // The command that the run printed, with a folder for this test.
    let resume = said
        .lines()
        .find_map(|line| line.trim().strip_prefix("resume"));
    let words: Vec<&str> = resume.unwrap().split_whitespace().skip(1).collect();
    let mut resume = megatron(&words);
    resume.args([
        "--no-tui",
        "--run-dir",
        &half.path("again"),
        "--exit-interval",
        "8",
    ]);
    let said = stdout(&mut resume);
    assert!(said.contains("iteration 5/8"), "{said}");
    assert_eq!(half.losses(), whole.losses());
    let rates = |run: &Run| -> Vec<Value> {
        run.metrics()
            .iter()
            .map(|step| step["learning_rate"].clone())
            .collect()
    };
    assert_eq!(rates(&half), rates(&whole));
}

#[test]
fn a_load_that_finds_nothing_trains_nothing() {
    let run = Run::new();
    let mut command = fixture_run(&run);
    let message = stderr(command.args(["--load", &run.path("chekpoints")]), 1);
    assert!(
        message.contains("chekpoints is not a directory"),
        "{message}"
    );
    assert!(
        message.contains("--no-exit-on-missing-checkpoint"),
        "{message}"
    );
    assert!(!Path::new(&run.path("run")).exists());
    let mut command = fixture_run(&run);
    let said = stdout(command.args([
        "--load",
        &run.path("chekpoints"),
        "--no-exit-on-missing-checkpoint",
    ]));
    assert!(said.contains("starting from step 1"), "{said}");
}

/// A long run on a small dataset that saves after every step, in as many pieces as ranks.
fn endless_run(run: &Run) -> std::process::Command {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_megatron"));
    command
        .current_dir(root())
        .stdout(std::process::Stdio::null());
    command.args([
        "train",
        "--no-tui",
        "--train-iters",
        "100000",
        "--vocab-size",
        "50304",
    ]);
    command.args(["--data-path", &fixture("data/small_text_document")]);
    command.args([
        "--num-layers",
        "2",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "2",
    ]);
    command.args([
        "--seq-length",
        "16",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "2",
    ]);
    command.args([
        "--world-size",
        "2",
        "--use-distributed-optimizer",
        "--eval-iters",
        "0",
    ]);
    command.args([
        "--save-interval",
        "1",
        "--keep-last",
        "2",
        "--save",
        &run.path("save"),
    ]);
    command.args([
        "--load",
        &run.path("save"),
        "--no-exit-on-missing-checkpoint",
    ]);
    command
}

/// Killed at any moment, many of them inside a save, a run goes on from a whole checkpoint, and further.
#[test]
fn forty_kills_lose_no_checkpoint() {
    let run = Run::new();
    let saved = || fs::read_to_string(run.path("save/latest")).unwrap_or_default();
    let (mut step, mut moment, mut unfinished) = (0, 12345u64, 0);
    // From one checkpoint to the next, as fast as it was seen.
    let mut cycle = std::time::Duration::MAX;
    for kill in 0..40 {
        let mut child = endless_run(&run)
            .args(["--run-dir", &run.path(&format!("run-{kill}"))])
            .spawn()
            .unwrap();
        // A first step, and then some time.
        let mut next_save = || {
            let (start, before) = (std::time::Instant::now(), saved());
            while saved() == before {
                assert!(start.elapsed().as_secs() < 60, "no step in a minute");
                assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            start.elapsed()
        };
        next_save();
        if kill < 3 {
            next_save();
            cycle = cycle.min(next_save());
        }
        moment = moment
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        std::thread::sleep(cycle.mul_f64((moment >> 11) as f64 / (1u64 << 53) as f64));
        child.kill().unwrap();
        child.wait().unwrap();

        let left = checkpoints(&run);
        unfinished += usize::from(left.iter().any(|name| name.ends_with(".writing")));
        let said = stdout(&mut megatron(&["checkpoint", "verify", &run.path("save")]));
        assert!(said.contains("every checksum is right"), "{said}");
        let latest = saved();
        // A checkpoint that was whole and not yet named is saved a second time, as `iter_N.1`.
        let reached = latest.trim()["iter_".len()..].split('.').next().unwrap();
        let reached: u64 = reached.parse().unwrap();
        assert!(reached > step, "kill {kill}: from step {step} to {reached}");
        step = reached;
    }
    assert!(unfinished >= 5, "only {unfinished} kills met a save");
}

#[test]
fn a_signal_makes_one_checkpoint_and_a_clean_exit() {
    let run = Run::new();
    let mut command = endless_run(&run);
    command.args(["--save-interval", "1000000", "--exit-signal-handler"]);
    command.args(["--metrics-file", &run.path("metrics.jsonl")]);
    let mut child = command
        .args(["--run-dir", &run.path("run")])
        .spawn()
        .unwrap();
    let steps = || {
        let text = fs::read_to_string(run.path("metrics.jsonl")).unwrap_or_default();
        text.lines().count()
    };
    while steps() < 3 {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let killed = std::process::Command::new("kill")
        .arg(child.id().to_string())
        .status();
    let at = steps();
    assert!(killed.unwrap().success());
    assert!(child.wait().unwrap().success());
    // The step under way, and the one that was about to end as the signal came.
    let end = steps();
    assert!(end <= at + 2, "from step {at} to {end}");
    assert_eq!(
        checkpoints(&run),
        [format!("iter_{end:07}"), "latest".to_string()]
    );
}

/// A file system that refuses to hold more, by the limit of a file's size.
#[test]
fn a_full_disk_ends_no_training_and_no_checkpoint() {
    let run = Run::new();
    stdout(&mut saving_run(&run, &["--exit-interval", "2"]));
    let program = saving_run(&run, &["--load", &run.path("save"), "--save-interval", "2"]);
    let mut command = Command::new("sh");
    let limited = "trap '' XFSZ; ulimit -f 1000; exec \"$@\"";
    command
        .args(["-c", limited, "sh"])
        .arg(program.get_program());
    command
        .args(program.get_args())
        .args(["--run-dir", &run.path("again")]);
    let output = command
        .current_dir(root())
        .assert()
        .code(1)
        .get_output()
        .clone();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("warning: iteration 4 was not saved"),
        "{said}"
    );
    assert!(said.contains("trained 8 steps"), "{said}");
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("iteration 8 was not saved"), "{message}");
    assert_eq!(checkpoints(&run), ["iter_0000002", "latest"]);
    stdout(&mut megatron(&["checkpoint", "verify", &run.path("save")]));
    assert_eq!(run.losses().len(), 8);
}

#[test]
fn a_checkpoint_is_inspected_verified_and_split_anew() {
    let run = Run::new();
    stdout(&mut saving_run(&run, &["--exit-interval", "4"]));
    let (save, output) = (run.path("save"), run.path("resharded"));
    let said = stdout(&mut megatron(&["checkpoint", "inspect", &save]));
    for part in [
        "step      4, 32 samples, 4 updates of the optimizer, seed 1234",
        "saved by  tp=2 pp=1 v=1 dp=2; any layout loads it",
        "weights   210,304 in 52 tensors",
        "[192, 64] in 2 pieces: weight, exp_avg, exp_avg_sq",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let mut command = megatron(&["checkpoint", "reshard", &save, "--output", &output]);
    command.args([
        "--pipeline-model-parallel-size",
        "2",
        "--data-parallel-size",
        "3",
    ]);
    let said = stdout(&mut command);
    assert!(said.contains("tp=1 pp=2 dp=3"), "{said}");
    stdout(&mut megatron(&["checkpoint", "verify", &output]));

    // It goes on as the one that it was made of.
    let other = Run::new();
    for (run, from) in [(&run, &save), (&other, &output)] {
        let mut command = fixture_run(run);
        stdout(command.args(["--load", from, "--run-dir", &run.path("again")]));
    }
    let losses = run.losses();
    assert_eq!(losses[losses.len() - 4..], other.losses()[..]);

    let file = run.path("save/iter_0000004/rank_00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let message = stderr(&mut megatron(&["checkpoint", "verify", &save]), 1);
    for part in ["rank_00001.safetensors at byte", "is damaged"] {
        assert!(message.contains(part), "{part}: {message}");
    }
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

/// Public report: torchtitan #811 (the loader's place is lost when the data-parallel size changes).
#[test]
fn fewer_ranks_go_on_with_the_samples_that_were_next() {
    let train = |run: &Run, args: &[&str]| {
        let mut command = run.command(&["--data-path", &fixture("data/small_text_document")]);
        command.args([
            "--vocab-size",
            "50304",
            "--train-iters",
            "6",
            "--lr",
            "1e-3",
        ]);
        command.args([
            "--num-layers",
            "2",
            "--hidden-size",
            "32",
            "--num-attention-heads",
            "2",
        ]);
        command.args([
            "--seq-length",
            "16",
            "--micro-batch-size",
            "1",
            "--global-batch-size",
            "4",
        ]);
        command.args(["--eval-interval", "3", "--eval-iters", "2"]);
        stdout(command.args(args))
    };
    let (four, two) = (Run::new(), Run::new());
    let save = four.path("save");
    let stop = [
        "--save",
        &save,
        "--exit-interval",
        "3",
        "--use-distributed-optimizer",
    ];
    train(&four, &[&["--world-size", "4"], &stop[..]].concat());
    let dir = four.path("again");
    let on = ["--world-size", "2", "--load", &save, "--run-dir", &dir];
    let went_on = train(&four, &on);
    let whole = train(&two, &["--world-size", "2"]);
    let losses = |run: &Run| -> Vec<f64> {
        let steps = run.metrics();
        steps
            .iter()
            .map(|step| step["lm_loss"].as_f64().unwrap())
            .collect()
    };
    let (four, two) = (losses(&four), losses(&two));
    assert_eq!(four.len(), 6);
    for (four, two) in four.iter().zip(&two) {
        assert!((four - two).abs() < 1e-5, "{four} {two}");
    }
    // The evaluation after the last step looks at the batches that it would have looked at.
    let validation = |said: &str| -> String {
        let lines = said
            .lines()
            .filter(|line| line.starts_with("validation after iteration 6"));
        lines.collect()
    };
    assert!(!validation(&whole).is_empty());
    assert_eq!(validation(&went_on), validation(&whole));
}

#[test]
fn batches_grow_at_any_layout_and_over_a_stop() {
    let train = |run: &Run, args: &[&str]| -> (Vec<u64>, Vec<f64>) {
        let mut command = run.command(&["--data-path", &fixture("data/small_text_document")]);
        command.args([
            "--vocab-size",
            "50304",
            "--train-iters",
            "6",
            "--lr",
            "1e-3",
        ]);
        command.args([
            "--num-layers",
            "2",
            "--hidden-size",
            "32",
            "--num-attention-heads",
            "2",
        ]);
        command.args([
            "--seq-length",
            "16",
            "--micro-batch-size",
            "1",
            "--global-batch-size",
            "8",
        ]);
        command.args(["--rampup-batch-size", "2", "2", "8", "--eval-iters", "1"]);
        stdout(command.args(args));
        let steps = run.metrics();
        let consumed = steps
            .iter()
            .map(|step| step["consumed_samples"].as_u64().unwrap());
        let losses = steps.iter().map(|step| step["lm_loss"].as_f64().unwrap());
        (consumed.collect(), losses.collect())
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
