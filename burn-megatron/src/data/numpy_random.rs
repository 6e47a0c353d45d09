//! NumPy's legacy random state, bit for bit: Megatron's shuffles depend on it.
//!
//! MT19937 of Matsumoto and Nishimura, "Mersenne Twister" (1998), seeded as
//! `numpy.random.RandomState(seed)` seeds it from an integer, and the `shuffle` of that class.

const N: usize = 624;
const M: usize = 397;

/// `numpy.random.RandomState(seed)`.
#[derive(Clone)]
pub struct RandomState {
    key: [u32; N],
    /// Words of `key` already given out; `N` asks for the next block.
    used: usize,
}

impl RandomState {
    /// The state that `RandomState(seed)` starts from, for `0 <= seed < 2^32`.
    pub fn new(seed: u32) -> Self {
        let mut key = [0; N];
        key[0] = seed;
        for i in 1..N {
            let previous = key[i - 1];
            key[i] = (previous ^ (previous >> 30))
                .wrapping_mul(1_812_433_253)
                .wrapping_add(i as u32);
        }
        Self { key, used: N }
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == N {
            self.twist();
        }
        let mut y = self.key[self.used];
        self.used += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// `RandomState.shuffle` of a one-dimensional array, in place. The draws do not depend on the
    /// element type.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            let j = self.interval(i as u64);
            values.swap(i, j as usize);
        }
    }

    /// A number in `0..=max`: mask to the next power of two, reject what is above.
    fn interval(&mut self, max: u64) -> u64 {
        let mask = u64::MAX.checked_shr(max.leading_zeros()).unwrap_or(0);
        loop {
            let draw = if max <= u64::from(u32::MAX) {
                u64::from(self.next_u32())
            } else {
                let high = u64::from(self.next_u32());
                high << 32 | u64::from(self.next_u32())
            };
            if draw & mask <= max {
                return draw & mask;
            }
        }
    }

    fn twist(&mut self) {
        for i in 0..N {
            let y = (self.key[i] & 0x8000_0000) | (self.key[(i + 1) % N] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.key[i] = self.key[(i + M) % N] ^ (y >> 1) ^ odd;
        }
        self.used = 0;
    }
}

/// `numpy.sum` of f64 values: pairwise, in NumPy's order, so that weights normalise to its bits.
pub(crate) fn sum(values: &[f64]) -> f64 {
    let n = values.len();
    if n < 8 {
        // NumPy starts from -0.0, which only shows for an empty array.
        return values.iter().fold(-0.0, |sum, v| sum + v);
    }
    if n > 128 {
        let half = n / 2 - (n / 2) % 8;
        return sum(&values[..half]) + sum(&values[half..]);
    }
    let mut lanes = [0.0; 8];
    lanes.copy_from_slice(&values[..8]);
    let (blocks, rest) = values[8..].as_chunks::<8>();
    for block in blocks {
        lanes.iter_mut().zip(block).for_each(|(lane, v)| *lane += v);
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    let total = ((a + b) + (c + d)) + ((e + f) + (g + h));
    rest.iter().fold(total, |sum, v| sum + v)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures;

    #[test]
    fn shuffles_are_numpys() {
        let cases = fixtures::json("data/numpy_randomstate_shuffle.json");
        for (name, case) in cases.as_object().unwrap() {
            let (seed, n) = name.split_once('_').unwrap();
            let (seed, n): (u32, u64) = (seed.parse().unwrap(), n.parse().unwrap());
            let mut random = RandomState::new(seed);
            for (k, key) in ["first", "second"].into_iter().enumerate() {
                let mut values: Vec<u64> = (0..n).collect();
                random.shuffle(&mut values);
                let expected = case[key].as_array().unwrap();
                for (value, expected) in values.iter().zip(expected) {
                    assert_eq!(*value, expected.as_u64().unwrap(), "{name} {key}");
                }
                let check: u64 = values.iter().zip(1..).map(|(v, i)| v * i).sum();
                assert_eq!(
                    check,
                    case["sum_check"][k].as_u64().unwrap(),
                    "{name} {key}"
                );
            }
        }
    }

    #[test]
    fn interval_covers_its_ends() {
        let mut random = RandomState::new(5);
        let draws: Vec<u64> = (0..100).map(|_| random.interval(2)).collect();
        assert!((0..=2).all(|v| draws.contains(&v)) && draws.iter().all(|v| *v <= 2));
        assert_eq!(random.interval(0), 0);
        assert!(random.interval(1 << 40) <= 1 << 40);
    }

    #[test]
    fn sums_of_any_length_are_close_to_exact() {
        for n in [0, 1, 7, 8, 9, 127, 128, 129, 1000] {
            let values: Vec<f64> = (0..n).map(f64::from).collect();
            assert_eq!(sum(&values), f64::from(n * (n - 1).max(0)) / 2.0);
        }
    }
}
