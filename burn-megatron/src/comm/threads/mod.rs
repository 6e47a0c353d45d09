//! Ranks that are threads of one process, communicating through shared memory.
//!
//! A collective is a rendezvous: each rank publishes its buffers and waits; when all are there,
//! each does its share of the work directly on the others' buffers; when all are done, all leave.
//! An all-reduce so moves every byte once in and once out, with no staging copy.

mod mailbox;
mod rendezvous;

use super::values::{self, Number};
use super::{Communicator, ReduceOp, Values, ValuesMut};
use crate::error::Result;
use crate::memory::{given_away, taken_over};
use rendezvous::{Call, Group, NumberType, Op, lock};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Elements reduced at a time: small enough to stay in the first-level cache.
const TILE: usize = 4096;

/// What the rank threads of one process share: who failed first, and the groups to wake then.
#[derive(Debug)]
pub struct ThreadWorld {
    timeout: Duration,
    failure: Mutex<Option<(usize, String)>>,
    groups: Mutex<Vec<Arc<Group>>>,
}

impl ThreadWorld {
    /// A world whose ranks wait for one another for at most `timeout` in any one collective.
    pub fn new(timeout: Duration) -> Arc<Self> {
        Arc::new(ThreadWorld {
            timeout,
            failure: Mutex::new(None),
            groups: Mutex::new(Vec::new()),
        })
    }

    /// Joins `members` (world ranks, ascending) into a group called `name` in errors. Returns each
    /// member's end, in the order of `members`.
    pub fn group(self: &Arc<Self>, name: &str, members: &[usize]) -> Vec<ThreadCommunicator> {
        let group = Arc::new(Group::new(name, members));
        lock(&self.groups).push(group.clone());
        (0..members.len())
            .map(|rank| ThreadCommunicator {
                world: self.clone(),
                group: group.clone(),
                rank,
            })
            .collect()
    }

    /// Declares that world rank `rank` will make no further calls. Every rank that waits, or will
    /// wait, for a collective ends with an error naming it. Only the first failure is kept.
    pub fn fail(&self, rank: usize, reason: &str) {
        lock(&self.failure).get_or_insert_with(|| (rank, reason.to_string()));
        for group in lock(&self.groups).iter() {
            group.wake();
        }
    }

    /// The first failure, if there was one: the world rank and its reason.
    pub fn failure(&self) -> Option<(usize, String)> {
        lock(&self.failure).clone()
    }
}

/// One rank thread's end of a group.
#[derive(Clone)]
pub struct ThreadCommunicator {
    world: Arc<ThreadWorld>,
    group: Arc<Group>,
    rank: usize,
}

impl std::fmt::Debug for ThreadCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}/{}]", self.group.name, self.rank, self.size())
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn all_reduce_values(&self, buf: ValuesMut<'_>, op: ReduceOp) -> Result<()> {
        match buf {
            ValuesMut::F32(buf) => self.all_reduce_numbers(buf, op, NumberType::F32),
            ValuesMut::Bf16(buf) => self.all_reduce_numbers(buf, op, NumberType::Bf16),
            ValuesMut::F16(buf) => self.all_reduce_numbers(buf, op, NumberType::F16),
        }
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        assert_eq!(
            recv.len(),
            send.len() * self.size(),
            "all_gather: recv is size * send"
        );
        let len = send.len();
        let call = Call {
            op: Op::AllGather,
            buffer: send.as_ptr().cast_mut(),
            len,
        };
        self.round(call, |calls| {
            for (i, call) in calls.iter().enumerate() {
                // SAFETY: `len` bytes, lent by a rank that waits in `round`; only read, by all.
                let theirs = unsafe { std::slice::from_raw_parts(call.buffer, len) };
                recv[i * len..(i + 1) * len].copy_from_slice(theirs);
            }
        })
    }

    fn reduce_scatter_values(&self, send: Values<'_>, recv: ValuesMut<'_>) -> Result<()> {
        match (send, recv) {
            (Values::F32(send), ValuesMut::F32(recv)) => {
                self.reduce_scatter_numbers(send, recv, NumberType::F32)
            }
            (Values::Bf16(send), ValuesMut::Bf16(recv)) => {
                self.reduce_scatter_numbers(send, recv, NumberType::Bf16)
            }
            (Values::F16(send), ValuesMut::F16(recv)) => {
                self.reduce_scatter_numbers(send, recv, NumberType::F16)
            }
            _ => panic!("reduce_scatter: recv has the type of send"),
        }
    }

    fn broadcast(&self, buf: &mut [u8], root: usize) -> Result<()> {
        assert!(
            root < self.size(),
            "broadcast: root {root} of {} ranks",
            self.size()
        );
        let len = buf.len();
        let call = Call {
            op: Op::Broadcast { root },
            buffer: buf.as_mut_ptr(),
            len,
        };
        let rank = self.rank;
        self.round(call, |calls| {
            if rank != root {
                // SAFETY: both buffers have `len` bytes and belong to different ranks; the root's
                // is only read, this rank's own is written by this rank alone.
                unsafe {
                    std::ptr::copy_nonoverlapping(calls[root].buffer, calls[rank].buffer, len);
                }
            }
        })
    }

    fn barrier(&self) -> Result<()> {
        let call = Call {
            op: Op::Barrier,
            buffer: std::ptr::null_mut(),
            len: 0,
        };
        self.round(call, |_| ())
    }

    fn send(&self, message: Vec<u8>, to: usize) -> Result<()> {
        self.check_peer(to);
        self.check_world("send")?;
        given_away(message.capacity());
        self.group.mail.post(self.rank, to, message);
        Ok(())
    }

    fn receive(&self, len: usize, from: usize) -> Result<Vec<u8>> {
        self.check_peer(from);
        let op = "receive";
        let deadline = Instant::now() + self.world.timeout;
        let check = || self.check_world(op);
        let message = self.group.mail.take(from, self.rank, deadline, check)?;
        taken_over(message.as_ref().map_or(0, Vec::capacity));
        let peer = self.group.members[from];
        match message {
            Some(message) if message.len() == len => Ok(message),
            Some(message) => {
                let reason = format!("rank {peer} sent {} bytes, not {len}", message.len());
                Err(self.error(op, reason))
            }
            None => {
                let seconds = self.world.timeout.as_secs_f64();
                let reason = format!("no message from rank {peer} within {seconds:.1} s");
                Err(self.error(op, reason))
            }
        }
    }
}

impl ThreadCommunicator {
    fn all_reduce_numbers<T: Number>(
        &self,
        buf: &mut [T],
        op: ReduceOp,
        number: NumberType,
    ) -> Result<()> {
        let len = buf.len();
        let call = Call {
            op: Op::AllReduce(op, number),
            buffer: buf.as_mut_ptr().cast(),
            len,
        };
        let (rank, size) = (self.rank, self.size());
        self.round(call, |calls| {
            // Whole cache lines per rank, so that no two ranks write to one line.
            let line = 64 / size_of::<T>();
            let per_rank = len.div_ceil(size).next_multiple_of(line);
            let (start, end) = ((rank * per_rank).min(len), ((rank + 1) * per_rank).min(len));
            let mut sums = [0f32; TILE];
            for at in (start..end).step_by(TILE) {
                let sums = &mut sums[..TILE.min(end - at)];
                for (i, call) in calls.iter().enumerate() {
                    // SAFETY: all calls have `len` numbers of type T (checked by `meet`); each
                    // buffer's owner waits in `round` until every share is done; elements
                    // start..end are touched by this rank alone, since the ranks' shares do not
                    // overlap.
                    let theirs = unsafe {
                        std::slice::from_raw_parts(call.buffer.cast::<T>().add(at), sums.len())
                    };
                    match i {
                        0 => values::start(sums, theirs),
                        _ => values::accumulate(sums, theirs, op),
                    }
                }
                for call in calls {
                    // SAFETY: as above; the shared borrow `theirs` has ended.
                    let theirs = unsafe {
                        std::slice::from_raw_parts_mut(call.buffer.cast::<T>().add(at), sums.len())
                    };
                    values::finish(theirs, sums);
                }
            }
        })
    }

    fn reduce_scatter_numbers<T: Number>(
        &self,
        send: &[T],
        recv: &mut [T],
        number: NumberType,
    ) -> Result<()> {
        assert_eq!(
            send.len(),
            recv.len() * self.size(),
            "reduce_scatter: send is size * recv"
        );
        let call = Call {
            op: Op::ReduceScatter(number),
            buffer: send.as_ptr().cast_mut().cast(),
            len: send.len(),
        };
        let first = self.rank * recv.len();
        self.round(call, |calls| {
            let mut sums = [0f32; TILE];
            for (tile, recv) in recv.chunks_mut(TILE).enumerate() {
                let (at, sums) = (first + tile * TILE, &mut sums[..recv.len()]);
                for (i, call) in calls.iter().enumerate() {
                    // SAFETY: `send.len()` numbers of type T (checked by `meet`), lent by a rank
                    // that waits in `round`; only read.
                    let theirs = unsafe {
                        std::slice::from_raw_parts(call.buffer.cast::<T>().add(at), sums.len())
                    };
                    match i {
                        0 => values::start(sums, theirs),
                        _ => values::accumulate(sums, theirs, ReduceOp::Sum),
                    }
                }
                values::finish(recv, sums);
            }
        })
    }

    fn check_peer(&self, peer: usize) {
        assert!(
            peer < self.size() && peer != self.rank,
            "rank {} exchanges messages with the other {} ranks, not {peer}",
            self.rank,
            self.size()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Runs `f` on one thread per rank of a fresh group.
    fn on_ranks<T: Send>(
        size: usize,
        timeout: Duration,
        f: impl Fn(&ThreadCommunicator) -> T + Sync,
    ) -> Vec<T> {
        let members: Vec<usize> = (0..size).collect();
        let comms = ThreadWorld::new(timeout).group("test", &members);
        thread::scope(|scope| {
            let handles: Vec<_> = comms.iter().map(|c| scope.spawn(|| f(c))).collect();
            handles
                .into_iter()
                .map(|h| h.join().expect("rank"))
                .collect()
        })
    }

    #[test]
    fn messages_arrive_in_the_order_sent_whoever_is_first() {
        let results = on_ranks(3, LONG, |comm| {
            let (next, last) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            for i in 0..100u8 {
                comm.send(vec![i; usize::from(i)], next)?;
            }
            (0..100)
                .map(|i| Ok(comm.receive(i, last)? == vec![i as u8; i]))
                .collect::<Result<Vec<bool>>>()
        });
        for result in results {
            assert!(result.unwrap().into_iter().all(|right| right));
        }
    }

    #[test]
    fn a_receive_that_nobody_meets_names_the_sender_and_a_failure_ends_it_at_once() {
        let results = on_ranks(2, Duration::from_millis(50), |comm| match comm.rank() {
            0 => comm.receive(8, 1).map(|_| ()),
            _ => Ok(()),
        });
        let error = results[0].as_ref().unwrap_err().to_string();
        assert!(
            error.contains("no message from rank 1 within 0.1 s"),
            "{error}"
        );

        let results = on_ranks(2, LONG, |comm| match comm.rank() {
            0 => comm.receive(8, 1).map(|_| ()),
            _ => {
                comm.world.fail(1, "out of memory");
                Ok(())
            }
        });
        let error = results[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("rank 1 failed: out of memory"), "{error}");

        let results = on_ranks(2, LONG, |comm| match comm.rank() {
            0 => comm.receive(8, 1).map(|_| ()),
            _ => comm.send(vec![0; 4], 0),
        });
        let error = results[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("rank 1 sent 4 bytes, not 8"), "{error}");
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn all_reduce_is_the_sum_in_rank_order() {
        for (size, len) in [(1, 5), (2, 0), (2, 1), (3, 100), (4, 10_007)] {
            let value = |rank: usize, i: usize| 1.0 / (1 + rank * 31 + i) as f32;
            let results = on_ranks(size, LONG, |comm| {
                let mut buf: Vec<f32> = (0..len).map(|i| value(comm.rank(), i)).collect();
                comm.all_reduce(&mut buf, ReduceOp::Sum).map(|()| buf)
            });
            let want: Vec<f32> = (0..len)
                .map(|i| (1..size).fold(value(0, i), |sum, rank| sum + value(rank, i)))
                .collect();
            for result in results {
                assert_eq!(result.expect("all_reduce"), want, "size {size} len {len}");
            }
        }
    }

    #[test]
    fn gather_scatter_and_broadcast_place_parts_by_rank() {
        let results = on_ranks(3, LONG, |comm| -> Result<_> {
            let rank = comm.rank() as u8;
            let mut gathered = [0; 6];
            comm.all_gather(&[rank, rank + 10], &mut gathered)?;
            let mut part = [0.0; 2];
            let send: Vec<f32> = (0..6).map(|i| (i + comm.rank()) as f32).collect();
            comm.reduce_scatter(&send, &mut part)?;
            let mut text = if rank == 1 { *b"yes" } else { *b"..." };
            comm.broadcast(&mut text, 1)?;
            let mut top = [-(comm.rank() as f32)];
            comm.all_reduce(&mut top, ReduceOp::Max)?;
            comm.barrier()?;
            Ok((gathered, part, text, top))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (gathered, part, text, top) = result.expect("collectives");
            assert_eq!(gathered, [0, 10, 1, 11, 2, 12]);
            let first = (3 * 2 * rank + 3) as f32;
            assert_eq!(part, [first, first + 3.0]);
            assert_eq!((&text, top), (b"yes", [0.0]));
        }
    }

    #[test]
    fn values_of_16_bits_are_added_in_f32_and_rounded_once() {
        use burn::tensor::{bf16, f16};
        // In bf16 256 + 1 is 256: added one by one, the ones would be lost.
        let results = on_ranks(3, LONG, |comm| {
            let value = [256.0, 1.0, 1.0][comm.rank()];
            let mut all = vec![bf16::from_f32(value); 5000];
            comm.all_reduce_values(ValuesMut::Bf16(&mut all), ReduceOp::Sum)?;
            let send = vec![f16::from_f32(value); 3 * 5000];
            let mut part = vec![f16::ZERO; 5000];
            comm.reduce_scatter_values(Values::F16(&send), ValuesMut::F16(&mut part))?;
            Ok::<_, crate::Error>((all, part))
        });
        for result in results {
            let (all, part) = result.expect("collectives");
            assert!(all.iter().all(|sum| sum.to_f32() == 258.0));
            assert!(part.iter().all(|sum| sum.to_f32() == 258.0));
        }
    }

    #[test]
    fn a_missing_rank_is_named_within_the_timeout() {
        // The public complaint: a hang that names nobody (Megatron-LM #735).
        let results = on_ranks(3, Duration::from_millis(200), |comm| match comm.rank() {
            1 => Ok(()),
            _ => comm.barrier(),
        });
        for rank in [0, 2] {
            let error = results[rank]
                .as_ref()
                .expect_err("rank 1 never came")
                .to_string();
            let told = [
                format!("rank {rank}"),
                "barrier".into(),
                "rank 1 within".into(),
            ];
            assert!(told.iter().all(|t| error.contains(t)), "{error}");
        }
    }

    #[test]
    fn a_failed_rank_ends_the_waiting_ones() {
        let world = ThreadWorld::new(LONG);
        let comms = world.group("tp", &[4, 6]);
        let error = thread::scope(|scope| {
            let waiting = scope.spawn(|| comms[0].barrier());
            world.fail(6, "out of memory");
            waiting
                .join()
                .expect("no panic")
                .expect_err("rank 6 failed")
        });
        let error = error.to_string();
        assert!(
            error.contains("rank 4") && error.contains("rank 6 failed: out of memory"),
            "{error}"
        );
    }

    #[test]
    fn ranks_that_disagree_are_told_so() {
        let results = on_ranks(2, LONG, |comm| {
            let mut buf = vec![0.0; 3 + comm.rank()];
            comm.all_reduce(&mut buf, ReduceOp::Sum)
        });
        for result in results {
            let error = result.expect_err("lengths differ").to_string();
            assert!(
                error.contains("rank 0 calls") && error.contains("of 4"),
                "{error}"
            );
        }
    }
}
