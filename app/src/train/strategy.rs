//! burn-train's training loop, replaced by rank threads.

use super::feed::{Feed, History, MetricsFile, Remarks};
use super::metrics::{self, EvalReport, StepReport};
use super::plan::Plan;
use super::rank::{self, Communication, RankEnd};
use super::saving::Stop;
use super::{interrupt, terminal};
use crate::error::{Failure, Result};
use crate::say::say;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn::train::logger::FileMetricLogger;
use burn::train::{
    InferenceStep, Interrupter, Learner, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainOutput, TrainStep, TrainingComponents,
    TrainingStrategy, ValidLoader,
};
use burn_megatron::checkpoint::Saved;
use burn_megatron::launch::run_ranks_on;
use burn_megatron::pipeline::{Schedule, Span};
use std::sync::{Arc, Mutex, PoisonError};

/// How the run ended, for the report.
#[derive(Debug)]
pub struct Ended {
    /// Why the run ended before its last step, if it did.
    pub stop: Option<Stop>,
    /// The newest checkpoint of the run.
    pub saved: Option<Saved>,
    /// Why the last save failed, if it did.
    pub save_failed: Option<String>,
    /// The sample's new tokens.
    pub sample: Option<Vec<i64>>,
    /// Rank 0's.
    pub communication: Communication,
    /// Of each rank, in the last step.
    pub spans: Vec<Vec<Span>>,
    /// The schedule of that step.
    pub schedule: Option<Schedule>,
    pub history: History,
}

/// Trains as planned, under burn-train.
///
/// # Errors
/// A rank failed.
pub fn launch(plan: &Arc<Plan>) -> Result<Ended> {
    let interrupter = Interrupter::new();
    let logging = &plan.config.logging;
    let metrics_file = match &logging.metrics_file {
        Some(path) => Some(MetricsFile::after(path, plan.start.iteration as usize)?),
        None => None,
    };
    let remarks = Remarks::default();
    let renderer = terminal::renderer(plan, &interrupter, &remarks);
    interrupt::install(&interrupter)?;
    let strategy = Arc::new(RankThreads {
        plan: plan.clone(),
        metrics_file: Mutex::new(metrics_file),
        remarks,
        ended: Mutex::new(None),
    });
    let (train, valid) = (Arc::new(NoLoader), Arc::new(NoLoader));
    let training = SupervisedTraining::<Shim>::new(&plan.run_dir, train, valid)
        .with_training_strategy(TrainingStrategy::Custom(strategy.clone()))
        .with_metric_logger(FileMetricLogger::new(&plan.run_dir))
        .with_interrupter(interrupter)
        .with_application_logger(None)
        .num_epochs(plan.intervals())
        .renderer(renderer);
    let training = metrics::training()
        .into_iter()
        .fold(training, |training, metric| {
            training.metric_train_numeric(metric)
        });
    let training = training.metric_valid_numeric(metrics::validation());
    // The result holds the renderer: dropping it gives the terminal back before anything prints.
    drop(training.launch(Learner::new(Shim::new(), AdamWConfig::new().init(), 0.0)));
    // What was said after the last line, and all of it where the dashboard had the terminal.
    for line in strategy.remarks.take() {
        say!("{line}");
    }
    let ended = lock(&strategy.ended).take();
    ended.unwrap_or_else(|| Err(Failure::run("no rank ran", "report this: it is a bug")))
}

/// The strategy: as many threads as ranks, each with its own trainer.
struct RankThreads {
    plan: Arc<Plan>,
    metrics_file: Mutex<Option<MetricsFile>>,
    remarks: Remarks,
    ended: Mutex<Option<Result<Ended>>>,
}

impl SupervisedLearningStrategy<Shim> for RankThreads {
    fn fit(
        &self,
        components: TrainingComponents<Shim>,
        learner: Learner<Shim>,
        _: TrainLoader<Shim>,
        _: ValidLoader<Shim>,
        _: usize,
    ) -> (Shim, SupervisedTrainingEventProcessor<Shim>) {
        let interrupter = components.interrupter;
        let feed = Mutex::new(Feed::new(
            components.event_processor,
            components.event_store,
            interrupter.clone(),
            lock(&self.metrics_file).take(),
            self.remarks.clone(),
        ));
        let grid = &self.plan.resolved.layout().grid;
        let device = self.plan.config.training.device;
        let ends = run_ranks_on(device, grid, self.plan.timeout(), |rank| {
            let mut feed = (rank.rank == 0).then(|| lock(&feed));
            rank::run(&self.plan, rank, &interrupter, feed.as_deref_mut())
        });
        let feed = feed.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (processor, history) = feed.into_parts();
        let ended = ends
            .map_err(Failure::from)
            .and_then(|ends| judge(ends, history, &interrupter));
        *lock(&self.ended) = Some(ended);
        (learner.model(), processor)
    }
}

/// What the ranks' ends amount to; rank 0 speaks for all, they agreed on every stop.
fn judge(ends: Vec<RankEnd>, history: History, interrupter: &Interrupter) -> Result<Ended> {
    let spans = ends.iter().map(|end| end.spans.clone()).collect();
    let end = ends.into_iter().next().unwrap_or_default();
    if let Some(error) = interrupter.error() {
        return Err(Failure::run(
            format!("burn-train stopped the run: {error}"),
            "report this: it is a bug",
        ));
    }
    Ok(Ended {
        stop: end.stop,
        saved: end.saved,
        save_failed: end.save_failed,
        sample: end.sample,
        communication: end.communication,
        spans,
        schedule: end.schedule,
        history,
    })
}

/// The lock's content, also after a thread panicked holding it: whoever panicked has been reported.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What burn-train takes for the model.
///
/// Its `Learner` owns one module and one optimizer; ours are N shards, each on its rank's thread
/// with its part of the optimizer. So the learner gets a module that only names a device, which
/// `SupervisedTraining::launch` asks of every model, and the reports' types. It is never stepped.
#[derive(Module, Debug)]
pub struct Shim {
    device: Tensor<1>,
}

impl Shim {
    fn new() -> Self {
        Shim {
            device: Tensor::zeros([1], &Device::flex()),
        }
    }
}

impl TrainStep for Shim {
    type Input = ();
    type Output = StepReport;

    fn step(&self, (): ()) -> TrainOutput<StepReport> {
        unreachable!("the rank threads step their own trainers")
    }
}

impl InferenceStep for Shim {
    type Input = ();
    type Output = EvalReport;

    fn step(&self, (): ()) -> EvalReport {
        unreachable!("the rank threads evaluate with their own trainers")
    }
}

/// What burn-train takes for its data: nothing. Each data-parallel rank reads its own samples.
struct NoLoader;

impl DataLoader<()> for NoLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<()> + 'a> {
        Box::new(NoItems)
    }

    fn num_items(&self) -> usize {
        0
    }

    fn to_device(&self, _: &Device) -> Arc<dyn DataLoader<()>> {
        Arc::new(NoLoader)
    }

    fn slice(&self, _: usize, _: usize) -> Arc<dyn DataLoader<()>> {
        Arc::new(NoLoader)
    }
}

struct NoItems;

impl Iterator for NoItems {
    type Item = std::result::Result<(), DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        None
    }
}

impl DataLoaderIterator<()> for NoItems {
    fn progress(&self) -> Progress {
        Progress::new(0, 0, None)
    }
}
