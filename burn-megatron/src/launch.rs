//! Starting ranks: one thread each, with its groups, its device and its share of the cores.

use crate::RankDevice;
use crate::comm::counted::{Accounts, Counted};
use crate::comm::threads::ThreadWorld;
use crate::comm::{CommRef, SingleRank};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::MemoryAccount;
use crate::topology::{Axis, RankGrid};
use burn::tensor::Device;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a rank waits for the others in one collective, unless told otherwise (Megatron's
/// `--distributed-timeout-minutes`).
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Room for the autodiff graph's recursion in a rank's thread.
const STACK_BYTES: usize = 32 << 20;

/// This rank's end of one group, with the accounts of what it communicated there.
#[derive(Debug, Clone)]
pub struct ProcessGroup {
    pub comm: CommRef,
    pub accounts: Arc<Accounts>,
}

impl ProcessGroup {
    fn new(comm: CommRef) -> Self {
        let (comm, accounts) = Counted::wrap(comm);
        ProcessGroup { comm, accounts }
    }
}

/// The groups that a rank belongs to.
#[derive(Debug, Clone)]
pub struct ProcessGroups {
    /// All ranks.
    pub world: ProcessGroup,
    /// The ranks that share one replica's layers between them.
    pub tp: ProcessGroup,
    /// The ranks that hold the same weights and see different samples.
    pub dp: ProcessGroup,
    /// The ranks that share one replica's stages between them.
    pub pp: ProcessGroup,
    /// The first and the last of them, which may each hold a copy of one embedding table; a rank
    /// between them is alone in its own.
    pub embedding: ProcessGroup,
    /// All ranks once more, for what saves checkpoints beside the training.
    pub saver: ProcessGroup,
}

/// What a rank knows of its place: handed to everything that needs a group, instead of globals.
#[derive(Debug, Clone)]
pub struct RankContext {
    /// World rank.
    pub rank: usize,
    pub groups: ProcessGroups,
    /// The device of this rank's tensors, with autodiff.
    pub device: Device,
    /// The moment from which the timelines of all ranks count.
    pub clock: Instant,
    /// What the rank's threads have allocated.
    pub memory: MemoryAccount,
}

impl RankContext {
    /// A world of one rank on `device`: the current thread's, whose memory it counts from here on.
    pub fn single(device: Device) -> Self {
        let alone = || ProcessGroup::new(Arc::new(SingleRank));
        let memory = MemoryAccount::new();
        memory.enter();
        RankContext {
            rank: 0,
            groups: ProcessGroups {
                world: alone(),
                tp: alone(),
                dp: alone(),
                pp: alone(),
                embedding: alone(),
                saver: alone(),
            },
            device: device.autodiff(),
            clock: Instant::now(),
            memory,
        }
    }

    /// Whether this rank is to bring the step's data: the first and the last pipeline stage need it,
    /// and one rank of each tensor-parallel group reads it for the others.
    pub fn reads_data(&self) -> bool {
        let pp = &self.groups.pp.comm;
        self.groups.tp.comm.rank() == 0 && (pp.rank() == 0 || pp.rank() + 1 == pp.size())
    }
}

/// Runs `f` once per rank of `grid`, each on a thread of its own, and returns the results in rank
/// order. Ranks share the machine's cores evenly: each has a thread pool of its own, so that one
/// rank's work never waits behind another's that waits for it.
///
/// # Errors
/// The first rank to fail, by an error or a panic, ends the others at their next collective; its
/// error is the one returned.
pub fn run_ranks<T: Send>(
    grid: &RankGrid,
    timeout: Duration,
    f: impl Fn(&RankContext) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_ranks_on(RankDevice::Cpu, grid, timeout, f)
}

/// The same with the ranks' tensors on devices of that kind.
///
/// # Errors
/// As [`run_ranks`].
pub fn run_ranks_on<T: Send>(
    device: RankDevice,
    grid: &RankGrid,
    timeout: Duration,
    f: impl Fn(&RankContext) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let size = grid.world_size();
    let world = ThreadWorld::new(timeout);
    let contexts = contexts(device, &world, grid);
    let cores = thread::available_parallelism().map_or(1, |n| n.get());
    let first = Mutex::new(None::<Error>);
    let fail = |rank: usize, error: Error| {
        // In this order: the error to be returned is that of the rank the others will name.
        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
        world.fail(rank, &error.to_string());
        first.get_or_insert(error);
    };
    let run = &|context: &RankContext| {
        let outcome = in_pool(context, (cores / size).max(1), || f(context));
        let failed = |failure: Failure| fail(context.rank, failure.into_error(context.rank));
        outcome.map_err(failed).ok()
    };
    let outcomes: Option<Vec<T>> = thread::scope(|scope| {
        let start = |context| {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || run(context));
            // The ranks that did start must not wait for this one.
            let failed = |e| {
                fail(
                    context.rank,
                    rank_failed(context.rank, format!("did not start: {e}")),
                )
            };
            spawned.map_err(failed).ok()
        };
        let handles: Vec<_> = contexts.iter().map(start).collect();
        (handles.into_iter())
            .map(|handle| handle?.join().ok().flatten())
            .collect()
    });
    outcomes.ok_or_else(|| {
        let first = first.into_inner().unwrap_or_else(PoisonError::into_inner);
        first.unwrap_or_else(|| rank_failed(0, "ended without a word".into()))
    })
}

/// Every rank's context: the groups of each axis, joined in one place.
fn contexts(device: RankDevice, world: &Arc<ThreadWorld>, grid: &RankGrid) -> Vec<RankContext> {
    let (size, clock) = (grid.world_size(), Instant::now());
    let join = |name: &str, groups: Vec<Vec<usize>>| {
        let mut ends: Vec<Option<ProcessGroup>> = vec![None; size];
        for members in groups {
            for (member, end) in members.iter().zip(world.group(name, &members)) {
                let comm: CommRef = match members.len() {
                    1 => Arc::new(SingleRank),
                    _ => Arc::new(end),
                };
                ends[*member] = Some(ProcessGroup::new(comm));
            }
        }
        let alone = || ProcessGroup::new(Arc::new(SingleRank));
        let ends = ends.into_iter().map(|end| end.unwrap_or_else(alone));
        ends.collect::<Vec<_>>()
    };
    let all = join("world", vec![(0..size).collect()]);
    let tp = join("tp", grid.groups(&[Axis::Tp]));
    let dp = join("dp", grid.groups(&[Axis::Dp]));
    let pp = join("pp", grid.groups(&[Axis::Pp]));
    let embedding = join("embedding", grid.embedding_groups());
    let saver = join("checkpoint", vec![(0..size).collect()]);
    (all.into_iter()
        .zip(tp)
        .zip(dp)
        .zip(pp)
        .zip(embedding)
        .zip(saver))
    .map(
        |(((((world, tp), dp), pp), embedding), saver)| ProcessGroups {
            world,
            tp,
            dp,
            pp,
            embedding,
            saver,
        },
    )
    .enumerate()
    .map(|(rank, groups)| RankContext {
        rank,
        groups,
        device: device.of_rank(rank).autodiff(),
        clock,
        memory: MemoryAccount::new(),
    })
    .collect()
}

/// Why a rank ended early.
enum Failure {
    Error(Error),
    Panic(Box<dyn Any + Send>),
}

impl Failure {
    fn into_error(self, rank: usize) -> Error {
        let payload = match self {
            Failure::Error(error) => return error,
            Failure::Panic(payload) => payload,
        };
        // An error that `comm::raise` carried out of a layer or a backward step.
        let payload = match payload.downcast::<Error>() {
            Ok(error) => return *error,
            Err(payload) => payload,
        };
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        rank_failed(rank, format!("panicked: {}", text.unwrap_or("no message")))
    }
}

fn rank_failed(rank: usize, reason: String) -> Error {
    ErrorKind::Rank { rank, reason }.into()
}

/// Runs `f` inside a rank's own thread pool of `threads` threads and catches its panics.
fn in_pool<T: Send>(
    context: &RankContext,
    threads: usize,
    f: impl FnOnce() -> Result<T> + Send,
) -> std::result::Result<T, Failure> {
    let (rank, memory) = (context.rank, context.memory);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |_| format!("rank {rank}"))
        .stack_size(STACK_BYTES)
        .start_handler(move |_| memory.enter())
        .build()
        .map_err(|e| Failure::Error(rank_failed(rank, format!("has no thread pool: {e}"))))?;
    // A rank that unwinds is never resumed: only its failure is reported.
    match catch_unwind(AssertUnwindSafe(|| pool.install(f))) {
        Ok(outcome) => outcome.map_err(Failure::Error),
        Err(payload) => Err(Failure::Panic(payload)),
    }
}
