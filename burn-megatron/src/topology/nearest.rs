//! The legal values next to one that breaks a rule, as the user would write them.

/// Greatest common divisor; `gcd(0, n)` is `n`.
pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The multiples of `unit` next to `value` below and above; 0 is not one.
pub(crate) fn multiples(value: usize, unit: usize) -> Vec<String> {
    let Some(below) = value.checked_div(unit) else {
        return Vec::new();
    };
    let below = below * unit;
    let above = below.checked_add(unit);
    written([(below > 0).then_some(below), above])
}

/// The divisors of `whole` next to `value` below and above; none for 0, nor for a `whole` beyond
/// 32 bits, which is no size of a model or a world and would take long to factor.
pub(super) fn divisors(value: usize, whole: usize) -> Vec<String> {
    if u32::try_from(whole).is_err() {
        return Vec::new();
    }
    let (mut below, mut above) = (None, None);
    let pairs = (1..=whole.isqrt()).filter(|d| whole.is_multiple_of(*d));
    for divisor in pairs.flat_map(|d| [d, whole / d]) {
        if divisor < value {
            below = below.max(Some(divisor));
        } else if divisor > value {
            above = Some(above.map_or(divisor, |a: usize| a.min(divisor)));
        }
    }
    written([below, above])
}

fn written(values: [Option<usize>; 2]) -> Vec<String> {
    values.iter().flatten().map(usize::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_neighbours_where_they_exist() {
        assert_eq!(multiples(10, 4), ["8", "12"]);
        assert_eq!(multiples(3, 4), ["4"]);
        assert!(multiples(3, 0).is_empty());
        assert_eq!(multiples(usize::MAX, 2), [(usize::MAX - 1).to_string()]);
        assert_eq!(divisors(5, 12), ["4", "6"]);
        assert_eq!(divisors(13, 12), ["12"]);
        assert_eq!(divisors(0, 12), ["1"]);
        assert_eq!(divisors(4, 36), ["3", "6"]);
        assert!(divisors(3, 0).is_empty());
        assert!(divisors(3, usize::MAX).is_empty());
    }
}
