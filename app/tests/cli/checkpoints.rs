//! Runs that save, stop and go on; `megatron checkpoint`.

use super::*;

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
    command.args(["train", "--no-tui"]);
    command.args(small_corpus(
        "--train-iters 100000 --global-batch-size 2 --world-size 2 --use-distributed-optimizer --eval-iters 0",
    ));
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

/// Public report: torchtitan #811 (the loader's place is lost when the data-parallel size changes).
#[test]
fn fewer_ranks_go_on_with_the_samples_that_were_next() {
    let train = |run: &Run, args: &[&str]| {
        let words =
            "--train-iters 6 --lr 1e-3 --global-batch-size 4 --eval-interval 3 --eval-iters 2";
        let mut command = run.command(&[]);
        command.args(small_corpus(words));
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
    let (four, two) = (four.numbers("lm_loss"), two.numbers("lm_loss"));
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
