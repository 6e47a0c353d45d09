//! Loops that the compiler turns into the processor's vectors: each body is compiled for the baseline, for
//! AVX2 and for AVX-512, and the best that the processor has is chosen when it runs.

/// How a multiplication and an addition are joined.
pub trait Arithmetic {
    /// `a * b + c`
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// One instruction and one rounding.
pub struct Joined;

/// Two of both: without the instruction, joining them would call a library's function.
pub struct Apart;

impl Arithmetic for Joined {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Arithmetic for Apart {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// What the processor has.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Level {
    Baseline,
    Avx2,
    Avx512,
}

#[cfg(target_arch = "x86_64")]
pub fn level() -> Level {
    static LEVEL: std::sync::OnceLock<Level> = std::sync::OnceLock::new();
    *LEVEL.get_or_init(|| {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => Level::Avx512,
            (true, false) => Level::Avx2,
            (false, _) => Level::Baseline,
        }
    })
}

/// Defines a function whose body, over an [`Arithmetic`] `M`, is compiled for each level.
macro_rules! vectors {
    ($(#[$doc:meta])* $vis:vis fn $name:ident[$m:ident]($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$m: $crate::flex::simd::Arithmetic>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::flex::simd::{Joined, Level, level};
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body::<Joined>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body::<Joined>($($arg),*)
                }
                match level() {
                    // SAFETY: the processor has these instructions.
                    Level::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Level::Avx2 => unsafe { avx2($($arg),*) },
                    Level::Baseline => body::<$crate::flex::simd::Apart>($($arg),*),
                }
            }
            #[cfg(target_arch = "aarch64")]
            {
                body::<$crate::flex::simd::Joined>($($arg),*)
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            {
                body::<$crate::flex::simd::Apart>($($arg),*)
            }
        }
    };
}
pub(crate) use vectors;

/// Sums side by side: enough for four of the widest vectors.
const LANES: usize = 32;

/// The sum of `f` over `x`.
#[inline(always)]
pub fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += f(chunk[i]);
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|v| f(*v)).sum::<f32>()
}

/// The sum of `f` over pairs.
#[inline(always)]
pub fn sum2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut lanes = [0f32; LANES];
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] += f(x[i], y[i]);
        }
    }
    let rest = x_rest.iter().zip(y_rest).map(|(x, y)| f(*x, *y));
    lanes.iter().sum::<f32>() + rest.sum::<f32>()
}

/// The largest value.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |max, v| larger(max, *v))
}

/// `e^x`, to about one unit in the last place; what is below the smallest normal number is no less. NaN stays.
#[inline(always)]
pub fn exp<M: Arithmetic>(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; e^r by its series with minimax coefficients.
    const MAGIC: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_145_75;
    const LN_2_LOW: f32 = 1.428_606_8e-6;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = M::mul_add(x, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = M::mul_add(n, -LN_2_HIGH, x);
    let r = M::mul_add(n, -LN_2_LOW, r);
    let mut p = 1.987_569_1e-4;
    for c in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = M::mul_add(p, r, c);
    }
    let p = M::mul_add(p, r * r, r) + 1.0;
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid<M: Arithmetic>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<M>(-x))
}

/// `erf x`, to 1.5e-7 (Abramowitz and Stegun 7.1.26).
#[inline(always)]
pub fn erf<M: Arithmetic>(x: f32) -> f32 {
    let a = x.abs();
    let t = 1.0 / M::mul_add(0.327_591_1, a, 1.0);
    let mut p = 1.061_405_4;
    for c in [-1.453_152_1, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
        p = M::mul_add(p, t, c);
    }
    let tail = p * t * exp::<M>(-a * a);
    (1.0 - tail).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(from: f32, to: f32) -> impl Iterator<Item = f32> {
        (0..=100_000).map(move |i| from + (to - from) * i as f32 / 100_000.0)
    }

    #[test]
    fn exponentials_are_those_of_f64() {
        for x in points(-87.0, 88.0) {
            let want = f64::from(x).exp();
            for got in [exp::<Joined>(x), exp::<Apart>(x)] {
                let error = (f64::from(got) - want).abs() / want;
                assert!(error < 2.5e-7, "e^{x}: {got}, not {want}");
            }
        }
        assert!(exp::<Joined>(f32::NEG_INFINITY) < 1e-37);
        assert!(exp::<Joined>(f32::NAN).is_nan());
    }

    #[test]
    fn erf_is_that_of_its_integral() {
        // Simpson's rule in f64.
        let erf64 = |x: f64| {
            let (n, f) = (2000, |t: f64| (-t * t).exp());
            let h = x / n as f64;
            let inner: f64 = (1..n)
                .map(|i| (2 + 2 * (i % 2)) as f64 * f(i as f64 * h))
                .sum();
            (f(0.0) + f(x) + inner) * h / 3.0 * 2.0 / std::f64::consts::PI.sqrt()
        };
        for x in points(-5.0, 5.0).step_by(997) {
            let error = f64::from(erf::<Joined>(x)) - erf64(f64::from(x));
            assert!(error.abs() < 4e-7, "erf {x}: {error:e}");
        }
    }

    #[test]
    fn reductions_take_every_length() {
        for len in 0..100 {
            let x: Vec<f32> = (0..len).map(|i| (i * 37 % 23) as f32 - 11.0).collect();
            assert_eq!(sum(&x, |v| v), x.iter().sum::<f32>());
            assert_eq!(
                sum2(&x, &x, |a, b| a * b),
                x.iter().map(|v| v * v).sum::<f32>()
            );
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
