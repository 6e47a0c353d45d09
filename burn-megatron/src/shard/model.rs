//! A rank's model with the record of every parameter, in one flat order.

use super::{FlatBuffer, FullWeights, Init, ParallelBuilder, ParamSpec, Sharding, upload};
use crate::Precision;
use crate::comm::{all_gather_bytes, all_gather_values};
use crate::error::{ErrorKind, Result};
use crate::launch::{ProcessGroups, RankContext};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor, TensorData};
use burn_megatron_kernels::flat::{self, Part};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

/// One parameter of a rank's model.
#[derive(Debug, Clone)]
pub struct ParamRecord {
    pub id: ParamId,
    /// Its path in the module tree, the same on every rank that holds a part of it.
    pub name: String,
    pub spec: ParamSpec,
    /// Its elements in the rank's flat buffers.
    pub range: Range<usize>,
    /// Whether weight decay applies: Megatron's rule exempts biases and vectors.
    pub decays: bool,
}

impl ParamRecord {
    /// Whether this rank counts the parameter in sums over the model-parallel ranks: every part of a
    /// split one, one copy of a replicated one, the first stage's copy of a tied one.
    pub fn counts_at(&self, groups: &ProcessGroups) -> bool {
        let part = self.spec.sharding != Sharding::Replicated || groups.tp.comm.rank() == 0;
        let copy = self.spec.tied_over_stages && groups.embedding.comm.rank() > 0;
        part && !copy
    }
}

/// A rank's model: its chunks (one module, or one for each virtual pipeline stage) and the records
/// of their parameters. A flat buffer of [`num_elements`](ShardedModel::num_elements) values holds
/// them all, one after another, with a few zeros between them: it divides over the data-parallel ranks, as
/// does what both ends of a pipeline hold.
#[derive(Debug)]
pub struct ShardedModel<M> {
    chunks: Vec<M>,
    params: Vec<ParamRecord>,
    elements: usize,
    /// Each chunk's parameters among them all.
    places: Vec<Range<usize>>,
    context: RankContext,
    sequence_parallel: bool,
    precision: Precision,
    allocated: Option<u64>,
}

impl<M: Module> ShardedModel<M> {
    /// Takes the records of `module`'s parameters from the builder that its layers were made with.
    /// Float parameters from elsewhere (a layer of Burn's own) count as replicated.
    pub fn new(module: M, builder: &ParallelBuilder) -> Self {
        ShardedModel::of_chunks(vec![module], builder)
    }

    /// The same of several chunks: the rank's virtual pipeline stages, in pipeline order. A path is
    /// the same in whichever chunk it is, so no two chunks of a model have one in common.
    pub fn of_chunks(chunks: Vec<M>, builder: &ParallelBuilder) -> Self {
        let mut collect = CollectParams {
            builder,
            path: Vec::new(),
            params: Vec::new(),
            end: 0,
        };
        let first = chunks.iter().map(|chunk| {
            let first = collect.params.len();
            chunk.visit(&mut collect);
            first..collect.params.len()
        });
        ShardedModel {
            places: first.collect(),
            elements: collect.aligned(),
            params: collect.params,
            chunks,
            context: builder.context().clone(),
            sequence_parallel: builder.sequence_parallel(),
            precision: builder.precision(),
            allocated: builder.allocated(),
        }
    }

    /// The modules: one, or one for each virtual pipeline stage.
    pub fn chunks(&self) -> &[M] {
        &self.chunks
    }

    /// Whether its layers exchange parts of the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// The type of its parameters.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Bytes that it took to build, where they are counted
    /// ([`CountingAllocator`](crate::memory::CountingAllocator)).
    pub fn allocated(&self) -> Option<u64> {
        self.allocated
    }

    /// Its parameters, in flat order.
    pub fn params(&self) -> &[ParamRecord] {
        &self.params
    }

    /// Elements of this rank's flat buffers.
    pub fn num_elements(&self) -> usize {
        self.elements
    }

    /// Elements of this rank's parameters.
    pub fn num_parameters(&self) -> usize {
        self.params.iter().map(|param| param.range.len()).sum()
    }

    /// Fills every parameter with its initial values: the same values under every layout.
    ///
    /// # Errors
    /// If a replicated parameter that was built elsewhere differs between ranks, naming it.
    pub fn init(&mut self, seed: u64) -> Result<()> {
        let mut flat = self.values();
        for param in &self.params {
            param
                .spec
                .fill(&param.name, seed, &mut flat[param.range.clone()]);
        }
        self.set_values(&flat);
        self.check_replicas(&flat)
    }

    /// Fills every parameter from a full, unsharded set of weights.
    ///
    /// # Errors
    /// If a tensor is missing, misshapen, of another type, or not of this model: all are listed.
    pub fn load(&mut self, weights: &FullWeights) -> Result<()> {
        let flat = weights.read(&self.params, self.elements, &self.names_of_all_stages()?)?;
        self.set_values(&flat);
        Ok(())
    }

    /// Writes the full, unsharded weights to `path`. Every rank of the tensor- and pipeline-parallel
    /// groups calls it; rank 0 of both writes.
    pub fn save(&self, path: &Path) -> Result<()> {
        super::weights::save(path, &self.params, &self.values(), &self.context.groups)
    }

    /// The names of the whole model's parameters, over all pipeline stages.
    pub(crate) fn names_of_all_stages(&self) -> Result<BTreeSet<String>> {
        let mine: Vec<&str> = self.params.iter().map(|p| p.name.as_str()).collect();
        let pp = &*self.context.groups.pp.comm;
        let all = all_gather_bytes(pp, mine.join("\n").as_bytes())?;
        let names = all.iter().map(|bytes| String::from_utf8_lossy(bytes));
        Ok(names
            .flat_map(|names| names.lines().map(String::from).collect::<Vec<_>>())
            .collect())
    }

    /// A copy of all parameters in flat order, in f32.
    pub fn values(&self) -> Vec<f32> {
        let mut flat = vec![0.0; self.elements];
        let mut flatten = Flatten {
            params: self.params.iter(),
            flat: &mut flat,
        };
        for chunk in &self.chunks {
            chunk.visit(&mut flatten);
        }
        flat
    }

    /// Replaces all parameters by `flat`, rounded to the model's type.
    ///
    /// # Panics
    /// If `flat` is not as long as the parameters.
    pub fn set_values(&mut self, flat: &[f32]) {
        assert_eq!(
            flat.len(),
            self.num_elements(),
            "one value per parameter element"
        );
        let mut assign = Assign {
            params: self.params.iter(),
            precision: self.precision,
            flat,
        };
        for chunk in &mut self.chunks {
            *chunk = chunk.clone().map(&mut assign);
        }
    }

    /// Replaces all parameters by their elements of `flat`, a tensor of the model's type on its device: on the host they are
    /// views of it, on a card no value visits the host.
    ///
    /// # Panics
    /// If `flat` is not as long as the parameters.
    pub fn set_values_on_device(&mut self, flat: Tensor<1>) {
        assert_eq!(
            flat.dims()[0],
            self.num_elements(),
            "one value per parameter element"
        );
        let ranges: Vec<_> = self.params.iter().map(|p| p.range.clone()).collect();
        let mut give = Give {
            params: self.params.iter(),
            values: flat::scatter(flat, &ranges).into_iter(),
        };
        for chunk in &mut self.chunks {
            *chunk = chunk.clone().map(&mut give);
        }
    }

    /// Leaves every parameter without values, until they are set: whoever else holds what they were views of may change
    /// it in place.
    pub(crate) fn let_go(&mut self) {
        for chunk in &mut self.chunks {
            *chunk = chunk.clone().map(&mut LetGo);
        }
    }

    /// The place of a chunk's first parameter among all.
    pub(crate) fn first_param(&self, chunk: usize) -> usize {
        self.places[chunk].start
    }

    /// Replaces each chunk by what `map` makes of it and the records of its parameters.
    pub(crate) fn map_chunks(&mut self, map: impl Fn(M, &[ParamRecord]) -> M) {
        for (chunk, place) in self.chunks.iter_mut().zip(&self.places) {
            *chunk = map(chunk.clone(), &self.params[place.clone()]);
        }
    }

    /// Adds the gradients of one backward pass over one of the chunks to `sums`, the flat buffer of
    /// them all, where it lies, and frees them. Parameters without a gradient add nothing.
    pub fn sum_gradients(&self, chunk: usize, gradients: &mut Gradients, sums: &mut FlatBuffer) {
        let host = matches!(sums, FlatBuffer::Host(_));
        // Taken, so that nobody else holds the buffer and it is changed in place.
        let held = match std::mem::take(sums) {
            FlatBuffer::Host(held) => upload(held, &Device::flex()),
            FlatBuffer::Device(held) => held,
        };
        let mut collect = CollectGradients {
            params: self.params[self.places[chunk].clone()].iter(),
            gradients,
            parts: Vec::new(),
        };
        self.chunks[chunk].visit(&mut collect);
        let held = FlatBuffer::Device(flat::gather(held, collect.parts));
        *sums = match host {
            true => FlatBuffer::Host(held.into_host()),
            false => held,
        };
    }

    /// Every rank must hold the same values of what is replicated.
    fn check_replicas(&self, flat: &[f32]) -> Result<()> {
        let groups = &self.context.groups;
        for (axis, comm) in [("tp", &groups.tp.comm), ("dp", &groups.dp.comm)] {
            for param in self.params.iter().filter(|p| p.spec.init == Init::AsBuilt) {
                let hash = fingerprint(&flat[param.range.clone()]);
                if all_gather_values(&**comm, hash)?
                    .iter()
                    .any(|other| *other != hash)
                {
                    let reason = format!(
                        "parameter {} is replicated but its initial values differ between the {axis} \
                         ranks; build it with the ParallelBuilder, or from fixed values",
                        param.name
                    );
                    let rank = self.context.rank;
                    return Err(ErrorKind::Rank { rank, reason }.into());
                }
            }
        }
        Ok(())
    }
}

/// FNV-1a over the values' bits.
fn fingerprint(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Whether Burn enters the variant of an enum, such as [`Norm`](crate::layers::Norm): which module was
/// chosen is no part of a parameter's name.
fn is_choice(container: &str) -> bool {
    container.starts_with("Enum:")
}

impl CollectParams<'_> {
    /// The end, where it divides over the data-parallel ranks.
    fn aligned(&self) -> usize {
        let dp = &self.builder.context().groups.dp.comm;
        self.end.next_multiple_of(dp.size())
    }
}

struct CollectParams<'a> {
    builder: &'a ParallelBuilder,
    path: Vec<String>,
    params: Vec<ParamRecord>,
    end: usize,
}

impl ModuleVisitor for CollectParams<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if !is_choice(container) {
            self.path.push(name.to_string());
        }
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        if !is_choice(container) {
            self.path.pop();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.dims();
        let spec = self.builder.spec(param.id);
        let spec = spec.unwrap_or_else(|| {
            let replicated = ParamSpec::replicated(shape, Init::AsBuilt);
            self.builder.under_sequence_parallelism(replicated)
        });
        if spec.tied_over_stages {
            self.end = self.aligned();
        }
        let start = self.end;
        self.end += shape.iter().product::<usize>();
        let range = start..self.end;
        if spec.tied_over_stages {
            self.end = self.aligned();
        }
        let name = self.path.join(".");
        self.params.push(ParamRecord {
            id: param.id,
            decays: D > 1 && !name.ends_with(".bias"),
            name,
            spec,
            range,
        });
    }
}

/// A module's parameters come in the order of their records.
const IN_ORDER: &str = "one record for each parameter";

struct Flatten<'a> {
    params: std::slice::Iter<'a, ParamRecord>,
    flat: &'a mut [f32],
}

impl ModuleVisitor for Flatten<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let record = self.params.next().expect(IN_ORDER);
        let data = host_data(param.val().inner());
        self.flat[record.range.clone()].copy_from_slice(f32s(&data));
    }
}

struct Assign<'a> {
    params: std::slice::Iter<'a, ParamRecord>,
    precision: Precision,
    flat: &'a [f32],
}

impl ModuleMapper for Assign<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let record = self.params.next().expect(IN_ORDER);
        let (id, old, mapper) = param.consume();
        let values = self.flat[record.range.clone()].to_vec();
        let data = TensorData::new(values, old.dims());
        let value = parameter(data, self.precision, &old.device());
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Gives parameters their values.
struct Give<'a> {
    params: std::slice::Iter<'a, ParamRecord>,
    values: std::vec::IntoIter<Tensor<1>>,
}

impl ModuleMapper for Give<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let record = self.params.next().expect(IN_ORDER);
        let (id, _, mapper) = param.consume();
        let value = self.values.next().expect("one value for each parameter");
        let shape: [usize; D] = (record.spec.local_shape().try_into())
            .expect("as many dimensions as the parameter has");
        let value = value.reshape(shape).autodiff();
        Param::from_mapped_value(id, value.require_grad(), mapper)
    }
}

/// Takes parameters' values away.
struct LetGo;

impl ModuleMapper for LetGo {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, old, mapper) = param.consume();
        let none = Tensor::empty([0; D], (&old.device(), old.dtype()));
        Param::from_mapped_value(id, none, mapper)
    }
}

struct CollectGradients<'a> {
    params: std::slice::Iter<'a, ParamRecord>,
    gradients: &'a mut Gradients,
    parts: Vec<Part<Tensor<1>>>,
}

impl ModuleVisitor for CollectGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let record = self.params.next().expect(IN_ORDER);
        if let Some(gradient) = param.val().grad_remove(self.gradients) {
            self.parts.push(Part {
                tensor: gradient.reshape([record.range.len()]),
                start: record.range.start,
            });
        }
    }
}

/// A tensor without a graph, on the host in f32.
pub(crate) fn host_data<const D: usize>(x: Tensor<D>) -> TensorData {
    match x.dtype() {
        DType::F32 => x.into_data(),
        _ => x.cast(FloatDType::F32).into_data(),
    }
}

/// Its values.
pub(crate) fn f32s(data: &TensorData) -> &[f32] {
    data.as_slice().expect("the tensor is f32")
}

/// A parameter's tensor of f32 data, rounded to its type.
pub(crate) fn parameter<const D: usize>(
    data: TensorData,
    precision: Precision,
    device: &Device,
) -> Tensor<D> {
    let value: Tensor<D> = Tensor::from_data(data, (device, DType::F32));
    let value = match precision {
        Precision::Fp32 => value,
        narrow => value.cast(narrow.float_dtype()),
    };
    value.require_grad()
}
