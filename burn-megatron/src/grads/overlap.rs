//! Communication of gradients and parameters while the rank computes.

use super::DataParallel;
use super::as_they_come::{add, hooked};
use crate::Precision;
use crate::comm::background::{Background, Pending};
use crate::comm::{CommRef, raise};
use crate::error::Result;
use crate::shard::ParamRecord;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The gradients of a step while its backwards run: buckets leave for the other ranks as soon as the last of
/// their gradients is in.
#[derive(Clone)]
pub struct OverlappedReduce(Arc<Mutex<Reducing>>);

struct Reducing {
    sums: Vec<f32>,
    /// Each parameter's elements.
    ranges: Vec<Range<usize>>,
    /// Parameters of each bucket whose last gradient is not in.
    waiting: Vec<usize>,
    /// Buckets that left, in the order in which they did: the same on every rank.
    left: Vec<(usize, Pending<Vec<f32>>)>,
    background: Arc<Background>,
    data_parallel: Arc<DataParallel>,
    dp: CommRef,
}

impl fmt::Debug for OverlappedReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OverlappedReduce")
    }
}

impl OverlappedReduce {
    /// For a step whose sums start as `sums`.
    pub fn new(
        data_parallel: &Arc<DataParallel>,
        params: &[ParamRecord],
        sums: Vec<f32>,
        background: &Arc<Background>,
        dp: &CommRef,
    ) -> Self {
        let ranges: Vec<_> = params.iter().map(|param| param.range.clone()).collect();
        let buckets = data_parallel.buckets().ranges().iter();
        let waiting = buckets.map(|bucket| {
            let inside = |range: &&Range<usize>| meet(range, bucket);
            ranges.iter().filter(inside).count()
        });
        OverlappedReduce(Arc::new(Mutex::new(Reducing {
            waiting: waiting.collect(),
            sums,
            ranges,
            left: Vec::new(),
            background: background.clone(),
            data_parallel: data_parallel.clone(),
            dp: dp.clone(),
        })))
    }

    /// The module whose backward adds the gradients of its parameters, which are those from the model's `first` on: each
    /// as soon as it is there. Where they are the parameters' `last`, buckets leave with them.
    pub fn hooked<M: Module>(&self, module: &M, first: usize, last: bool) -> M {
        let reduce = self.clone();
        hooked(module, first, move |param, gradient| {
            reduce.lock().add(param, gradient, last);
        })
    }

    /// The buckets that have left, in order.
    pub fn left(&self) -> Vec<usize> {
        self.lock().left.iter().map(|(bucket, _)| *bucket).collect()
    }

    /// Waits for all buckets, sends those that never were complete, and returns the sums over the group:
    /// under a distributed optimizer the owned elements hold theirs.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn finish(self) -> Result<Vec<f32>> {
        let gone = self.left();
        let mut reducing = self.lock();
        let buckets = 0..reducing.waiting.len();
        for bucket in buckets.filter(|bucket| !gone.contains(bucket)) {
            reducing.send(bucket);
        }
        let mut sums = std::mem::take(&mut reducing.sums);
        let left = std::mem::take(&mut reducing.left);
        let (data_parallel, dp) = (reducing.data_parallel.clone(), reducing.dp.clone());
        drop(reducing);
        for (bucket, pending) in left {
            let reduced = pending.wait()?;
            sums[data_parallel.reduced_range(bucket, &*dp)].copy_from_slice(&reduced);
        }
        Ok(sums)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Reducing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reducing {
    fn add(&mut self, param: usize, gradient: &[f32], last: bool) {
        let range = self.ranges[param].clone();
        add(&mut self.sums[range.clone()], gradient);
        if !last {
            return;
        }
        let data_parallel = self.data_parallel.clone();
        for (bucket, elements) in data_parallel.buckets().ranges().iter().enumerate() {
            if meet(&range, elements) {
                self.waiting[bucket] -= 1;
                if self.waiting[bucket] == 0 {
                    self.send(bucket);
                }
            }
        }
    }

    fn send(&mut self, bucket: usize) {
        let elements = self.data_parallel.buckets().ranges()[bucket].clone();
        let sums = self.sums[elements].to_vec();
        let (data_parallel, dp) = (self.data_parallel.clone(), self.dp.clone());
        let pending = self
            .background
            .submit(move || data_parallel.reduce_bucket(sums, &*dp));
        self.left.push((bucket, pending));
    }
}

fn meet(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Parameters on their way from the ranks that updated them: a module that waits for each bucket where its
/// forward first needs it.
#[derive(Debug)]
pub struct OverlappedGather {
    buckets: Vec<Arc<Arriving>>,
    precision: Precision,
}

struct Arriving {
    range: Range<usize>,
    values: Mutex<Values>,
}

enum Values {
    Pending(Option<Pending<Vec<u8>>>),
    /// In the parameters' type.
    Here(Arc<Vec<u8>>),
}

impl fmt::Debug for Arriving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arriving({:?})", self.range)
    }
}

impl Arriving {
    /// The bucket's values, once they are here.
    fn wait(&self) -> Result<Arc<Vec<u8>>> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        if let Values::Pending(pending) = &mut *values {
            let arrived = pending.take().expect("a failure ends the rank").wait()?;
            *values = Values::Here(Arc::new(arrived));
        }
        match &*values {
            Values::Here(here) => Ok(here.clone()),
            Values::Pending(_) => unreachable!("they are here"),
        }
    }
}

impl OverlappedGather {
    /// Sends the rank's owned elements, packed, bucket by bucket.
    pub fn start(
        data_parallel: &DataParallel,
        packed: &[f32],
        background: &Background,
        dp: &CommRef,
    ) -> Self {
        let buckets = data_parallel.owned_by_bucket(packed, dp.size());
        let precision = data_parallel.precision();
        let buckets = buckets.map(|(range, own)| {
            let (own, dp) = (precision.encode(own).into_owned(), dp.clone());
            let mut all = vec![0u8; own.len() * dp.size()];
            let pending = background.submit(move || {
                dp.all_gather(&own, &mut all)?;
                Ok(all)
            });
            Arc::new(Arriving {
                range: range.clone(),
                values: Mutex::new(Values::Pending(Some(pending))),
            })
        });
        OverlappedGather {
            buckets: buckets.collect(),
            precision,
        }
    }

    /// The module with parameters that are on their way, those from `params` on.
    pub fn give<M: Module>(&self, module: M, params: &[ParamRecord]) -> M {
        module.map(&mut Arrivals {
            params: params.iter(),
            buckets: &self.buckets,
            precision: self.precision,
        })
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn finish(self) -> Result<()> {
        self.buckets
            .iter()
            .try_for_each(|bucket| bucket.wait().map(drop))
    }
}

struct Arrivals<'a> {
    params: std::slice::Iter<'a, ParamRecord>,
    buckets: &'a [Arc<Arriving>],
    precision: Precision,
}

impl ModuleMapper for Arrivals<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let record = self.params.next().expect("one record for each parameter");
        let range = record.range.clone();
        let here = self
            .buckets
            .iter()
            .filter(|bucket| meet(&range, &bucket.range));
        let here: Vec<_> = here.cloned().collect();
        let (id, device, shape) = (param.id, param.lazy_device(), param.lazy_shape());
        let (dims, precision) = (shape.clone(), self.precision);
        let size = precision.bytes();
        let arrived = move |device: &_, _: bool| {
            let mut bytes = Vec::with_capacity(range.len() * size);
            for bucket in &here {
                // A forward cannot return an error.
                let all = bucket.wait().unwrap_or_else(|error| raise(error));
                let start = range.start.max(bucket.range.start) - bucket.range.start;
                let end = range.end.min(bucket.range.end) - bucket.range.start;
                bytes.extend_from_slice(&all[start * size..end * size]);
            }
            let data = precision.data(&bytes, dims.clone());
            Tensor::from_data(data, (device, precision.dtype())).require_grad()
        };
        Param::uninitialized(id, arrived, device, true, shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::threads::ThreadWorld;
    use crate::grads::{DataParallelConfig, HostSums};
    use crate::launch::RankContext;
    use crate::layers::{Mlp, MlpConfig};
    use crate::shard::{FlatBuffer, ParallelBuilder, ShardedModel};
    use burn::tensor::Device;
    use std::time::Duration;

    /// A rank of a data-parallel group with a stack of MLPs, in buckets of half a layer.
    struct Rank {
        dp: CommRef,
        context: RankContext,
        model: ShardedModel<Vec<Mlp>>,
        data_parallel: Arc<DataParallel>,
        background: Arc<Background>,
    }

    impl Rank {
        fn new(dp: CommRef, use_distributed_optimizer: bool) -> Self {
            let mut context = RankContext::single(Device::flex());
            context.groups.dp.comm = dp.clone();
            let builder = ParallelBuilder::new(&context);
            let mlp = MlpConfig {
                hidden_size: 8,
                ffn_hidden_size: 32,
                activation: crate::layers::Activation::SquaredRelu,
                bias: false,
                init_std: 0.3,
                output_init_std: 0.3,
            };
            let layers: Vec<Mlp> = (0..3).map(|_| mlp.init(&builder)).collect();
            let mut model = ShardedModel::new(layers, &builder);
            model.init(1).unwrap();
            let config = DataParallelConfig {
                use_distributed_optimizer,
                ddp_bucket_size: 8 * 32,
                ..DataParallelConfig::default()
            };
            Rank {
                data_parallel: Arc::new(DataParallel::new(config, &model, &*dp)),
                background: Arc::new(Background::start(dp.rank()).unwrap()),
                dp,
                context,
                model,
            }
        }
    }

    #[test]
    fn buckets_leave_in_the_backward_the_last_layers_first() {
        let ends = ThreadWorld::new(Duration::from_secs(30)).group("dp", &[0, 1]);
        let run = |rank: usize| {
            let Rank {
                dp,
                context,
                model,
                data_parallel,
                background,
            } = Rank::new(Arc::new(ends[rank].clone()), false);
            let (params, elements) = (model.params(), model.num_elements());
            let sums = vec![0.0; elements];
            let reduce = OverlappedReduce::new(&data_parallel, params, sums, &background, &dp);
            let hooked = reduce.hooked(&model.chunks()[0], 0, true);
            let x = Tensor::<3>::ones([2, 1, 8], &context.device) * (rank + 1) as f32;
            let y = |layers: &[Mlp]| layers.iter().fold(x.clone(), |x, mlp| mlp.forward(x)).sum();
            y(&hooked).backward();
            let left = reduce.left();
            let mut want = FlatBuffer::Host(vec![0.0; elements]);
            model.sum_gradients(0, &mut y(&model.chunks()[0]).backward(), &mut want);
            (left, reduce.finish().unwrap(), want.into_host())
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| run(1));
            let (left, sums, mine) = run(0);
            let (other_left, other_sums, others) = other.join().unwrap();
            assert_eq!(left, [5, 4, 3, 2, 1, 0]);
            assert_eq!((&left, &sums), (&other_left, &other_sums));
            for (sum, (mine, other)) in sums.iter().zip(mine.iter().zip(&others)) {
                assert_eq!(*sum, mine + other);
            }
        });
    }

    /// The other rank sends a layer's parameters when this one has passed the layer before, and not earlier.
    #[test]
    fn a_forward_starts_before_all_parameters_are_back() {
        let ends = ThreadWorld::new(Duration::from_secs(30)).group("dp", &[0, 1]);
        let (passed, go_on) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let end = Arc::new(ends[1].clone());
            scope.spawn(move || {
                let rank = Rank::new(end, true);
                let packed = rank.data_parallel.owned().pack(&rank.model.values());
                let owned = rank.data_parallel.owned_by_bucket(&packed, 2);
                for (bucket, (_, own)) in owned.enumerate() {
                    if bucket > 0 && bucket % 2 == 0 {
                        go_on.recv().unwrap();
                    }
                    let own = Precision::Fp32.encode(own);
                    let mut all = vec![0; 2 * own.len()];
                    rank.dp.all_gather(&own, &mut all).unwrap();
                }
            });
            let Rank {
                dp,
                context,
                mut model,
                data_parallel,
                background,
            } = Rank::new(Arc::new(ends[0].clone()), true);
            let packed = data_parallel.owned().pack(&model.values());
            let forward = |x, layers: &[Mlp]| {
                layers.iter().fold(x, |x, mlp| {
                    let y = mlp.forward(x);
                    // The other rank has gone after the last.
                    let _ = passed.send(());
                    y
                })
            };
            let x = Tensor::<3>::ones([2, 1, 8], &context.device);
            let want = (model.chunks()[0].iter()).fold(x.clone(), |x, mlp| mlp.forward(x));
            let arriving = OverlappedGather::start(&data_parallel, &packed, &background, &dp);
            model.map_chunks(|chunk, params| arriving.give(chunk, params));
            let sums = HostSums::new(model.params(), vec![0.0; model.num_elements()]);
            let hooked = sums.hooked(&model.chunks()[0], 0);
            let y = forward(x, &hooked);
            y.into_data().assert_eq(&want.into_data(), true);
            arriving.finish().unwrap();
        });
    }
}
