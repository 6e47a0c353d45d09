//! The axes of the rank grid, and a number for each.

use std::fmt;
use std::ops::{Index, IndexMut};

/// A direction of the rank grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Tensor parallel.
    Tp,
    /// Context parallel.
    Cp,
    /// Expert parallel.
    Ep,
    /// Data parallel.
    Dp,
    /// Pipeline parallel.
    Pp,
}

impl Axis {
    /// Every axis, in the default order.
    pub const ALL: [Axis; 5] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Dp, Axis::Pp];

    /// The axis as an order string names it.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Tp => "tp",
            Axis::Cp => "cp",
            Axis::Ep => "ep",
            Axis::Dp => "dp",
            Axis::Pp => "pp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One number for each axis: the grid's sizes, or a rank's coordinates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Axes {
    pub tp: usize,
    pub cp: usize,
    pub ep: usize,
    pub dp: usize,
    pub pp: usize,
}

impl Axes {
    /// The same number for every axis.
    pub const fn all(value: usize) -> Self {
        Axes {
            tp: value,
            cp: value,
            ep: value,
            dp: value,
            pp: value,
        }
    }
}

impl Index<Axis> for Axes {
    type Output = usize;

    fn index(&self, axis: Axis) -> &usize {
        match axis {
            Axis::Tp => &self.tp,
            Axis::Cp => &self.cp,
            Axis::Ep => &self.ep,
            Axis::Dp => &self.dp,
            Axis::Pp => &self.pp,
        }
    }
}

impl IndexMut<Axis> for Axes {
    fn index_mut(&mut self, axis: Axis) -> &mut usize {
        match axis {
            Axis::Tp => &mut self.tp,
            Axis::Cp => &mut self.cp,
            Axis::Ep => &mut self.ep,
            Axis::Dp => &mut self.dp,
            Axis::Pp => &mut self.pp,
        }
    }
}
