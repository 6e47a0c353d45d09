//! Everything a run needs, checked and opened before a rank starts.

use super::rank::intervals;
use crate::config::{RunConfig, TokenizerType};
use crate::data::{self, Corpus, RunData, TokenBatches, Wanted};
use crate::error::{Failure, Result};
use crate::say::say;
use crate::units::timestamp;
use burn_megatron::checkpoint::{Checkpoint, Progress};
use burn_megatron::data::{SamplerConfig, Tokenizer};
use burn_megatron::shard::FullWeights;
use burn_megatron::train::{LoadOptions, ResolvedConfig, Sampling};
use burn_megatron::{Error, ErrorKind, Violation};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A run that can start.
pub struct Plan {
    pub config: RunConfig,
    pub resolved: ResolvedConfig,
    pub run_dir: PathBuf,
    pub data: RunData,
    /// The checkpoint to go on from.
    pub load: Option<Checkpoint>,
    /// How far the training is at the start.
    pub start: Progress,
    pub started: Instant,
    /// The weights to start from, if not random ones.
    pub init: Option<FullWeights>,
    /// The text to write at the end, if any.
    pub sample: Option<SamplePlan>,
}

/// The text to write at the end.
pub struct SamplePlan {
    tokenizer: Arc<Tokenizer>,
    /// The prompt's tokens.
    pub prompt: Vec<i64>,
    pub max_new_tokens: usize,
    pub sampling: Sampling,
}

impl Plan {
    /// Checks the configuration as a whole, makes the run's folder and opens the data.
    ///
    /// # Errors
    /// A violated rule (all of them are listed), or a file that cannot be used.
    pub fn prepare(config: RunConfig, name: &str) -> Result<Arc<Self>> {
        let tokenizer = match config.data.tokenizer_type {
            Some(_) => Some(Arc::new(data::build_tokenizer(&config.data.tokenizer())?)),
            None => None,
        };
        let resolved = resolve(&config, tokenizer.as_deref())?;
        let sample = SamplePlan::new(&config, tokenizer.as_ref())?;
        let load = find_checkpoint(&config)?;
        let start = match &load {
            Some(checkpoint) if !config.checkpoint.finetune => checkpoint.manifest().progress,
            _ => Progress::default(),
        };
        check_start(&config, start, load.as_ref())?;
        // A checkpoint has its own weights; the others were for the start.
        let init = match &config.training.init_weights {
            Some(path) if load.is_none() => Some(FullWeights::open(path)?),
            _ => None,
        };
        let batches = match &config.data.token_batches {
            Some(path) => Some(TokenBatches::open(path, wanted(&config, &resolved))?),
            None => {
                Corpus::check(&config)?;
                None
            }
        };
        if let Some(path) = &config.logging.trace {
            can_be_written(path)?;
        }
        let run_dir = make_run_dir(&config, name)?;
        config.save(&run_dir.join("config.toml"))?;
        let data = match batches {
            Some(batches) => RunData::Batches(Arc::new(batches)),
            None => RunData::Corpus(Corpus::open(&config, tokenizer, &run_dir, start)?),
        };
        Ok(Arc::new(Plan {
            config,
            resolved,
            run_dir,
            data,
            load,
            start,
            started: Instant::now(),
            init,
            sample,
        }))
    }

    /// How long a rank waits for the others in one collective.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(60.0 * self.config.training.distributed_timeout_minutes)
    }

    /// Evaluation intervals of the run.
    pub fn intervals(&self) -> usize {
        let iters = self.config.training.train_iters;
        intervals(iters, self.config.data.eval_interval).len()
    }

    /// What is taken from the checkpoint beside the weights.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            no_load_optim: self.config.checkpoint.no_load_optim,
            finetune: self.config.checkpoint.finetune,
        }
    }

    /// What every checkpoint of this run keeps of it: its configuration, and the vocabulary that the data
    /// told.
    pub fn saved_with(&self) -> Value {
        json!({ "config": self.config, "vocab_size": self.resolved.config().vocab_size })
    }

    /// What data-parallel rank `rank` reads.
    pub fn share(&self, rank: usize) -> SamplerConfig {
        SamplerConfig {
            data_parallel_rank: rank,
            data_parallel_size: self.resolved.layout().dp,
            micro_batch_size: self.config.training.micro_batch_size,
            global_batch_size: self.config.training.global_batch_size,
        }
    }
}

/// The checkpoint of `--load`. That there is none is an error, unless told otherwise: a misspelt directory
/// would train from the start.
fn find_checkpoint(config: &RunConfig) -> Result<Option<Checkpoint>> {
    let config = &config.checkpoint;
    let Some(dir) = &config.load else {
        return Ok(None);
    };
    match Checkpoint::find(dir, config.ckpt_step) {
        Ok(checkpoint) => Ok(Some(checkpoint)),
        Err(error) => match error.kind() {
            ErrorKind::NoCheckpoint { .. } if !config.exit_on_missing_checkpoint => {
                say!("{error}: starting from step 1");
                Ok(None)
            }
            _ => Err(error.into()),
        },
    }
}

/// That something is left to train, and from the same counters.
fn check_start(config: &RunConfig, start: Progress, load: Option<&Checkpoint>) -> Result<()> {
    let training = &config.training;
    if start.iteration > 0 && start.iteration >= training.train_iters as u64 {
        return Err(Failure::usage(
            format!(
                "the checkpoint is of step {}, and the run has {}",
                start.iteration, training.train_iters
            ),
            "give more steps (--train-iters), or load its weights alone (--finetune)",
        ));
    }
    // A dataset is shuffled over all epochs that its run takes.
    let saved = load.and_then(|checkpoint| checkpoint.manifest().run.get("config"));
    let saved = saved.and_then(|config| config.get("training"));
    let saved = |name: &str| saved.and_then(|training| training.get(name)?.as_u64());
    let samples = saved("train_iters").zip(saved("global_batch_size"));
    let ours = (training.train_iters * training.global_batch_size) as u64;
    let corpus = config.data.token_batches.is_none();
    if let Some((iters, batch)) = samples
        && start.iteration > 0
        && corpus
        && iters * batch != ours
    {
        say!(
            "warning: this run takes {ours} samples in all, the one that saved {}: its data come in another \
             order from here on",
            iters * batch
        );
    }
    if start.iteration > 0 && start.seed != training.seed {
        say!(
            "warning: the checkpoint was trained with seed {}, this run has seed {}: its data come in another \
             order",
            start.seed,
            training.seed
        );
    }
    Ok(())
}

/// The library's rules and the program's, in one list.
fn resolve(config: &RunConfig, tokenizer: Option<&Tokenizer>) -> Result<ResolvedConfig> {
    let mut violations = rules(config);
    // What --vocab-size is to a NullTokenizer, its own vocabulary already counts.
    let null = config.data.tokenizer_type == Some(TokenizerType::Null);
    let vocab_size = match (tokenizer, config.data.vocab_size.filter(|_| !null)) {
        (Some(tokenizer), None) => Some(tokenizer.vocab_size()),
        (Some(tokenizer), Some(size)) => {
            if size < tokenizer.vocab_size() {
                violations.push(Violation {
                    rule: format!("vocab_size {size} is below the tokenizer's entries"),
                    nearest: vec![tokenizer.vocab_size().to_string()],
                });
            }
            Some(size)
        }
        (None, size) => size,
    };
    if vocab_size.is_none() {
        violations.push(rule("give a tokenizer (--tokenizer-type) or --vocab-size"));
    }
    // Without a vocabulary the other rules still want checking; any legal size does for that.
    match config.train_config(vocab_size.unwrap_or(1)).resolve() {
        Ok(resolved) if violations.is_empty() => Ok(resolved),
        Ok(_) => Err(Error::config(violations).into()),
        Err(error) => match error.kind() {
            ErrorKind::Config(more) => {
                violations.extend(more.iter().cloned());
                Err(Error::config(violations).into())
            }
            _ => Err(error.into()),
        },
    }
}

/// The rules that are the program's own.
fn rules(config: &RunConfig) -> Vec<Violation> {
    let data = &config.data;
    let mut violations = Vec::new();
    match (data.data_path.is_empty(), &data.token_batches) {
        (true, None) => violations.push(rule("give --data-path or --token-batches")),
        (false, Some(_)) => violations.push(rule("give data_path or token_batches, not both")),
        _ => {}
    }
    if data.token_batches_loss_mask && data.token_batches.is_none() {
        violations.push(rule("token_batches_loss_mask needs token_batches"));
    }
    let jsonl = data.data_path.iter().any(|path| path.ends_with(".jsonl"));
    if jsonl && data.tokenizer_type.is_none() {
        violations.push(rule(
            "a .jsonl data path needs a tokenizer (--tokenizer-type)",
        ));
    }
    if config.training.rampup_batch_size.is_some() && data.token_batches.is_some() {
        violations.push(rule(
            "token_batches are of one size: rampup_batch_size needs a data_path",
        ));
    }
    let checkpoint = &config.checkpoint;
    if checkpoint.save.is_none() && checkpoint.save_interval.is_some() {
        violations.push(rule("save_interval needs a directory (--save)"));
    }
    if checkpoint.load.is_none() && checkpoint.ckpt_step.is_some() {
        violations.push(rule("ckpt_step needs a directory (--load)"));
    }
    let at_least_one = [
        ("save_interval", checkpoint.save_interval.unwrap_or(1)),
        ("exit_interval", checkpoint.exit_interval.unwrap_or(1)),
        ("keep_last", checkpoint.keep_last.unwrap_or(1)),
        ("eval_interval", data.eval_interval),
        ("log_interval", config.logging.log_interval),
    ];
    for (name, value) in at_least_one {
        if value == 0 {
            violations.push(Violation {
                rule: format!("{name} must be at least 1"),
                nearest: vec!["1".into()],
            });
        }
    }
    // A year, and no more than a Duration holds.
    let minutes = config.training.distributed_timeout_minutes;
    if !(minutes > 0.0 && minutes <= 525_600.0) {
        violations.push(Violation {
            rule: format!("distributed_timeout_minutes is {minutes}, but must be above 0"),
            nearest: vec!["10".into()],
        });
    }
    if config.generate.tokens > 0 && data.tokenizer_type.is_none() {
        violations.push(rule(
            "a sample at the end needs a tokenizer (--tokenizer-type)",
        ));
    }
    if !(config.generate.temperature >= 0.0 && config.generate.temperature.is_finite()) {
        violations.push(rule("temperature must be a number, 0 or above"));
    }
    violations
}

fn rule(text: &str) -> Violation {
    Violation {
        rule: text.into(),
        nearest: Vec::new(),
    }
}

fn wanted(config: &RunConfig, resolved: &ResolvedConfig) -> Wanted {
    Wanted {
        steps: config.training.train_iters,
        global_batch_size: config.training.global_batch_size,
        seq_length: config.training.seq_length,
        vocab_size: resolved.config().vocab_size,
        loss_mask: config.data.token_batches_loss_mask,
    }
}

/// Finds out before the run whether a file can be written after it.
fn can_be_written(path: &Path) -> Result<()> {
    let existed = path.exists();
    let opened = fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|e| Failure::io(path, &e))?;
    if !existed {
        fs::remove_file(path).map_err(|e| Failure::io(path, &e))?;
    }
    Ok(())
}

/// Makes the run's folder. One with something in it is refused: two runs' files would mix.
fn make_run_dir(config: &RunConfig, name: &str) -> Result<PathBuf> {
    let dir = match &config.logging.run_dir {
        Some(dir) => dir.clone(),
        None => Path::new("runs").join(format!("{name}-{}", timestamp(SystemTime::now()))),
    };
    fs::create_dir_all(&dir).map_err(|e| Failure::io(&dir, &e))?;
    let mut entries = fs::read_dir(&dir).map_err(|e| Failure::io(&dir, &e))?;
    match entries.next() {
        None => Ok(dir),
        Some(_) => Err(Failure::usage(
            format!("the run directory {} is not empty", dir.display()),
            "name another with --run-dir, or remove it",
        )),
    }
}

impl SamplePlan {
    fn new(config: &RunConfig, tokenizer: Option<&Arc<Tokenizer>>) -> Result<Option<Self>> {
        let generate = &config.generate;
        let (Some(tokenizer), true) = (tokenizer, generate.tokens > 0) else {
            return Ok(None);
        };
        let prompt = tokenizer.encode(&generate.prompt)?;
        Ok(Some(SamplePlan {
            tokenizer: tokenizer.clone(),
            prompt: prompt.into_iter().map(i64::from).collect(),
            max_new_tokens: generate.tokens,
            sampling: Sampling {
                temperature: generate.temperature,
                top_k: generate.top_k,
                seed: config.training.seed,
            },
        }))
    }

    /// The prompt and its continuation as text.
    pub fn text(&self, continuation: &[i64]) -> Result<String> {
        let ids: Vec<u32> = (self.prompt.iter().chain(continuation))
            .filter_map(|&token| u32::try_from(token).ok())
            .collect();
        Ok(self.tokenizer.decode(&ids)?)
    }
}
