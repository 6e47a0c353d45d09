//! Every mapping against its definition, forward and backward, at tp = 2 and 4.

use burn::tensor::{Device, Tensor};
use burn_megatron::autograd::*;
use burn_megatron::comm::CommRef;
use megatron_tests::{arbitrary, assert_close, host, on_tp_ranks};

type Mapping = fn(Tensor<3>, &CommRef) -> Tensor<3>;
/// What rank `r` gets from all ranks' tensors.
type Definition = fn(&[Tensor<3>], usize) -> Tensor<3>;

fn own(all: &[Tensor<3>], r: usize) -> Tensor<3> {
    all[r].clone()
}

fn sum(all: &[Tensor<3>], _: usize) -> Tensor<3> {
    all[1..]
        .iter()
        .fold(all[0].clone(), |sum, x| sum + x.clone())
}

fn part(x: Tensor<3>, dim: usize, r: usize, of: usize) -> Tensor<3> {
    let len = x.dims()[dim] / of;
    x.narrow(dim, r * len, len)
}

fn own_part<const DIM: usize>(all: &[Tensor<3>], r: usize) -> Tensor<3> {
    part(all[r].clone(), DIM, r, all.len())
}

fn part_of_sum(all: &[Tensor<3>], r: usize) -> Tensor<3> {
    part(sum(all, r), 0, r, all.len())
}

fn side_by_side<const DIM: usize>(all: &[Tensor<3>], _: usize) -> Tensor<3> {
    Tensor::cat(all.to_vec(), DIM)
}

#[test]
fn forwards_and_backwards_are_conjugate_and_as_defined() {
    let table: [(&str, Mapping, Definition, Definition); 8] = [
        ("copy to tp", copy_to_tensor_parallel_region, own, sum),
        (
            "reduce from tp",
            reduce_from_tensor_parallel_region,
            sum,
            own,
        ),
        (
            "scatter to tp",
            scatter_to_tensor_parallel_region,
            own_part::<2>,
            side_by_side::<2>,
        ),
        (
            "gather from tp",
            gather_from_tensor_parallel_region,
            side_by_side::<2>,
            own_part::<2>,
        ),
        (
            "scatter to sp",
            scatter_to_sequence_parallel_region,
            own_part::<0>,
            side_by_side::<0>,
        ),
        (
            "gather from sp",
            gather_from_sequence_parallel_region,
            side_by_side::<0>,
            part_of_sum,
        ),
        (
            "gather replicated from sp",
            gather_replicated_from_sequence_parallel_region,
            side_by_side::<0>,
            own_part::<0>,
        ),
        (
            "reduce-scatter to sp",
            reduce_scatter_to_sequence_parallel_region,
            part_of_sum,
            side_by_side::<0>,
        ),
    ];
    let flex = Device::flex();
    for (name, mapping, forward, backward) in table {
        for tp in [2, 4] {
            let inputs: Vec<_> = (0..tp).map(|r| arbitrary([8, 3, 12], r, &flex)).collect();
            let shape = forward(&inputs, 0).dims();
            let upstream: Vec<_> = (0..tp).map(|r| arbitrary(shape, 100 + r, &flex)).collect();
            let results = on_tp_ranks(tp as usize, |rank| {
                let x = inputs[rank.rank].clone().autodiff().require_grad();
                let y = mapping(x.clone(), &rank.groups.tp.comm);
                let weighted = y.clone() * upstream[rank.rank].clone().autodiff();
                let mut gradients = weighted.sum().backward();
                let dx = x.grad_remove(&mut gradients).expect("a gradient");
                (host(y.inner()), host(dx))
            });
            for (r, (y, dx)) in results.into_iter().enumerate() {
                let what = |pass| format!("{name}, tp={tp}, rank {r}, {pass}");
                assert_close(&y, &host(forward(&inputs, r)), 1e-6, &what("forward"));
                assert_close(&dx, &host(backward(&upstream, r)), 1e-6, &what("backward"));
            }
        }
    }
}
