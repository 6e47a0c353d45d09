//! `megatron schedule`.

use super::*;

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
